"""Two small asyncio tools of the transports: a fair queue for room that frees up, and work that a cancel cannot leave behind."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from twostep.errors import ResourceExhausted

T = TypeVar("T")


class FifoGate:
    """Waiters take room in the order in which they came, so that a large request is not starved by small ones."""

    def __init__(self, what: str, *, max_waiting: int = 4096) -> None:
        self._what = what
        self._max_waiting = max_waiting
        self._waiters: deque[asyncio.Event] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def take(self, attempt: Callable[[], T | None], *, deadline: float) -> T:
        """What `attempt` returns, once it is not None. It runs on the event loop, now and after a `pump`; what it raises is raised.

        Raises ResourceExhausted when `deadline` (time.monotonic seconds) passes or too many wait. A cancelled caller has taken nothing.
        """
        if len(self._waiters) >= self._max_waiting:
            raise ResourceExhausted(f"{self._max_waiting} wait for {self._what} already; try another worker, or later")
        turn = asyncio.Event()
        self._waiters.append(turn)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while True:
                    if self._waiters[0] is turn and (taken := attempt()) is not None:
                        return taken
                    turn.clear()
                    await turn.wait()
        except TimeoutError:
            raise ResourceExhausted(f"no room for {self._what} before the deadline; try another worker, or later") from None
        finally:
            self._waiters.remove(turn)
            self.pump()

    def pump(self) -> None:
        """Call it after room was freed: the first in the queue tries again."""
        if self._waiters:
            self._waiters[0].set()


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work` to its end even if the caller is cancelled meanwhile; the cancellation is raised then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()
        raise
