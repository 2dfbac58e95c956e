"""Host memory for blocks, of preempted sequences (swap_copies.py) and of the host tier (host_copies.py): rows in slabs, which are made when
they are first needed and then kept.

    slab 0 |row 0|row 1|row 2| … |      slab 1 |row n|row n+1| …      the lowest free rows are taken: few slabs, long runs

Which rows are taken is bookkeeping under the engine's lock; the memory is touched by the one thread that copies.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

# Making pinned memory holds up whoever launches kernels, a few milliseconds for this.
_SLAB_BYTES = 16 << 20


class HostRows:
    """Which rows are free."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        # Rows from `_fresh` on were never taken; of the others, those that were given back, as a heap.
        self._fresh = 0
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        return self._fresh - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """The lowest free ones, ascending; None, and none is taken, if there are not so many."""
        if count > self.num_rows - self.num_used:
            return None
        taken = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        fresh = count - len(taken)
        taken += range(self._fresh, self._fresh + fresh)
        self._fresh += fresh
        return taken

    def give(self, rows: Sequence[int]) -> None:
        for row in rows:
            heapq.heappush(self._free, row)


class HostSlabs:
    """The rows' memory."""

    def __init__(self, block_bytes: int, allocate: Callable[[int], npt.NDArray[np.uint8]]) -> None:
        """`allocate(count)` gives uint8 [count, block_bytes], of the kind that the device copies to and from fastest."""
        self._rows_per_slab = max(1, _SLAB_BYTES // block_bytes)
        self._allocate = allocate
        self._slabs: dict[int, npt.NDArray[np.uint8]] = {}

    def parts(self, rows: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """(place in `rows`, memory [n, block_bytes]) of each run of n neighbouring rows, in order. Raises what allocating raises."""
        place = 0
        while place < len(rows):
            slab, first = divmod(rows[place], self._rows_per_slab)
            count = 1
            while place + count < len(rows) and rows[place + count] == rows[place] + count and first + count < self._rows_per_slab:
                count += 1
            if slab not in self._slabs:
                self._slabs[slab] = self._allocate(self._rows_per_slab)
            yield place, self._slabs[slab][first : first + count]
            place += count
