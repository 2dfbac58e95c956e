"""Measures how long one hand-over copied: chunk by chunk, and by the clock on the wall."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class CopyClock:
    """For chunks that overlap, on one event loop.

        chunk 0   |-----|                       summed_s   all three
        chunk 1      |------|                   busy_s     from the first's start to the second's end, and the third:
        chunk 2                     |---|                  pauses, in which the next chunk is computed, do not count

    Not thread-safe.
    """

    def __init__(self) -> None:
        self.summed_s = 0.0
        self.busy_s = 0.0
        self._num_running = 0
        self._busy_since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the copy of one chunk."""
        started = time.monotonic()
        if not self._num_running:
            self._busy_since = started
        self._num_running += 1
        try:
            yield
        finally:
            ended = time.monotonic()
            self._num_running -= 1
            self.summed_s += ended - started
            if not self._num_running:
                self.busy_s += ended - self._busy_since
