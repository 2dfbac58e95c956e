"""Gives the time that all routers share: Redis's clock, which this process's own carries on from one look to the next.

Hosts' wall clocks differ, and are set. What several routers must agree on (windows of what was used, ends of batches and of files) goes by
this one; what one router measures by itself, by its monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from redis.asyncio import Redis


class SharedClock:
    """Until Redis was asked, it shows what the host's wall clock said when it was made."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self.monotonic = monotonic
        self._ahead_s = wall() - monotonic()
        self._known = False

    @property
    def known(self) -> bool:
        """Redis was asked."""
        return self._known

    def unix(self) -> float:
        """Returns the seconds since 1970."""
        return self.monotonic() + self._ahead_s

    def set(self, reply: tuple[int, int]) -> None:
        """Sets the clock by Redis's answer to TIME: seconds, and microseconds of one."""
        seconds, micros = reply
        self._ahead_s = seconds + micros / 1e6 - self.monotonic()
        self._known = True

    async def ask(self, redis: Redis) -> None:
        """Raises RedisError, OSError."""
        self.set(await redis.time())
