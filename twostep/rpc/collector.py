"""Python's full garbage collections, kept out of the way of streams.

A full collection looks at everything that lives: a tenth of a second in a process with some thousand requests behind it, every ten to
fifteen seconds under load, and every stream stands still meanwhile. What it finds is little, since nearly everything here is freed by
counting references. So the young generations are collected as always, and all of it while nothing goes on, or at long last.

Not quite everything: a call that ends in an error keeps itself, and all that its frames hold, alive by its traceback. Where such calls are
many and large, memory tells: once the process has grown by so much, a collection is worth its pause.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# While idle; and under load.
_IDLE_EVERY_S = 10.0
_BUSY_EVERY_S = 600.0
# And of what was found alive before, which a collection leaves out otherwise.
_ALL_EVERY_S = 3600.0
# Growth of the process since the last collection of all, after which it collects all under load too; but not more often than while idle.
_GROWTH_BYTES = 256 << 20
# Collections of the middle generation before one of all: never by itself.
_NEVER = 1 << 30


def resident_bytes() -> int:
    """Memory of this process; 0 where nobody tells."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


async def collect_in_quiet_moments(
    activity: Callable[[], int], *, clock: Callable[[], float] = time.monotonic, resident: Callable[[], int] = resident_bytes
) -> None:
    """Never returns; cancelling it restores Python's own rule. `activity` is a number that changes while something goes on.

    What a collection has found alive is left out of the next ones, which look at what is new only: whoever comes in the middle of one
    waits for milliseconds. Cycles that have died among the others stay for an hour, or until the process has grown by a quarter of a
    GiB."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], _NEVER)
    _collect(clock, everything=True)
    collected_at = all_at = clock()
    last, size = activity(), resident()
    try:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now, seen = clock(), activity()
            grown = resident() - size >= _GROWTH_BYTES
            every = _IDLE_EVERY_S if seen == last or grown else _BUSY_EVERY_S
            last = seen
            if now - collected_at >= every:
                # What has grown may be cycles among those that were found alive.
                collected_at, everything = now, grown or now - all_at >= _ALL_EVERY_S
                all_at = now if everything else all_at
                _collect(clock, everything=everything)
                size = resident() if everything else size
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _collect(clock: Callable[[], float], *, everything: bool) -> None:
    since = clock()
    if everything:
        gc.unfreeze()
    found = gc.collect()
    gc.freeze()
    log.debug(
        "a garbage collection of %s took %.0f ms and found %d objects",
        "all" if everything else "what is new",
        (clock() - since) * 1e3,
        found,
    )
