"""Python's full garbage collections, kept out of the way of streams.

A full collection looks at everything that lives: a tenth of a second in a process with some thousand requests behind it, every ten to
fifteen seconds under load, and every stream stands still meanwhile. What it finds is little, since nearly everything here is freed by
counting references. So the young generations are collected as always, and everything while nothing goes on.

    quiet       what is new every ten seconds; everything each hour, or once the process has grown
    under load  what is new, so often that it takes about three milliseconds: what lived before is left out

What is new lives, nearly all of it (blocks that were found to hold prefixes, say), so that the time between two collections is what each of
them takes: after half a minute they took 40 ms at 10 requests a second.

What is left under load are cycles among what a collection has found alive: some small objects of each of gRPC's calls; and calls that
end in an error keep what their frames hold, by their traceback. They wait for a quiet second. Only a process that never has one, and has
grown by a GiB, collects everything under load.
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

_LOOK_EVERY_S = 0.5
# Without any activity.
_QUIET_S = 1.0
_IDLE_EVERY_S = 10.0
# Under load at first, and the longest; and what one of them is to take.
_BUSY_EVERY_S = 1.0
_MOST_BUSY_EVERY_S = 30.0
_BUSY_TAKES_S = 0.003
# And of what was found alive before, which a collection leaves out otherwise.
_ALL_EVERY_S = 3600.0
# Growth of the process since everything was collected, after which a quiet second is used for that; and after which none is waited for.
_GROWTH_BYTES = 256 << 20
_LAST_RESORT_BYTES = 1 << 30
# What a collection has found alive is left out of the next ones once looking at it takes so long.
_LONG_S = 0.002
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
    """Never returns; cancelling it restores Python's own rule. `activity` is a number that changes while something goes on."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], _NEVER)
    _collect(clock, everything=True)
    collected_at = all_at = active_at = clock()
    last, size, busy_every_s = activity(), resident(), _BUSY_EVERY_S
    try:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now, seen, growth = clock(), activity(), resident() - size
            if seen != last:
                active_at, last = now, seen
            quiet = now - active_at >= _QUIET_S
            if now - collected_at >= (_IDLE_EVERY_S if quiet else busy_every_s):
                everything = (quiet and (growth >= _GROWTH_BYTES or now - all_at >= _ALL_EVERY_S)) or growth >= _LAST_RESORT_BYTES
                took_s = _collect(clock, everything=everything)
                collected_at = now
                if everything:
                    all_at, size = now, resident()
                elif not quiet:
                    # Twice as long at most: one that found nothing says little of the next.
                    longer = min(2.0, _BUSY_TAKES_S / max(took_s, 1e-6))
                    busy_every_s = min(_MOST_BUSY_EVERY_S, max(_LOOK_EVERY_S, busy_every_s * longer))
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _collect(clock: Callable[[], float], *, everything: bool) -> float:
    """Returns the seconds that it took."""
    since = clock()
    if everything:
        gc.unfreeze()
    found = gc.collect()
    took_s = clock() - since
    if everything or took_s >= _LONG_S:
        gc.freeze()
    log.debug("a garbage collection of %s took %.0f ms and found %d objects", "all" if everything else "what is new", took_s * 1e3, found)
    return took_s
