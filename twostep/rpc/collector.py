"""Python's full garbage collections, kept out of the way of streams.

A full collection looks at everything that lives: a tenth of a second in a process with some thousand requests behind it, every ten to
fifteen seconds under load, and every stream stands still meanwhile. What it finds is little, since nearly everything here is freed by
counting references. So the young generations are collected as always, and all of it while nothing goes on, or at long last.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# While idle; and under load.
_IDLE_EVERY_S = 10.0
_BUSY_EVERY_S = 600.0
# Collections of the middle generation before one of all: never by itself.
_NEVER = 1 << 30


async def collect_in_quiet_moments(activity: Callable[[], int], *, clock: Callable[[], float] = time.monotonic) -> None:
    """Never returns; cancelling it restores Python's own rule. `activity` is a number that changes while something goes on."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(before[0], before[1], _NEVER)
    collected_at, last = clock(), activity()
    try:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now, seen = clock(), activity()
            every = _IDLE_EVERY_S if seen == last else _BUSY_EVERY_S
            last = seen
            if now - collected_at >= every:
                collected_at = now
                found = gc.collect()
                log.debug("a full garbage collection took %.0f ms and found %d objects", (clock() - now) * 1e3, found)
    finally:
        gc.set_threshold(*before)
