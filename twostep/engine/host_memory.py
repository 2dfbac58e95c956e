"""Host memory for blocks, of preempted sequences (swap_space.py) and of the host tier (host_tier.py): rows in slabs, which are made when
they are first needed and then kept.

    slab 0 |row 0|row 1|row 2| … |      slab 1 |row n|row n+1| …      the lowest free rows are taken: few slabs, long runs

Which rows are taken is bookkeeping under the engine's lock; the memory is touched by the one thread that copies.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import Runner

# Making pinned memory holds up the thread that launches kernels, a few milliseconds for this.
_SLAB_BYTES = 16 << 20


class HostRows:
    """Knows which rows are free."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        # Rows from `_fresh` on were never taken; of the others, those that were given back, as a heap.
        self._fresh = 0
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        return self._fresh - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Returns the lowest free ones, ascending; None, and none is taken, if there are not so many."""
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
    """Holds the rows' memory, and copies between it and the runner's blocks. Copies raise what allocating or copying raises."""

    def __init__(self, runner: Runner, *, rows_per_slab: int = 0) -> None:
        """`rows_per_slab` 0: as many as fit a slab's usual size."""
        self._runner = runner
        self._rows_per_slab = rows_per_slab or max(1, _SLAB_BYTES // runner.kv_shape.block_bytes)
        self._slabs: dict[int, npt.NDArray[np.uint8]] = {}

    def copy_out(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """Copies the device's blocks to as many rows."""
        for place, memory in self._parts(rows):
            self._runner.read_blocks(blocks[place : place + len(memory)], memory)

    def copy_back(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies rows to as many of the device's blocks."""
        for place, memory in self._parts(rows):
            self._runner.write_blocks(blocks[place : place + len(memory)], memory)

    def _parts(self, rows: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Yields (place in `rows`, memory [n, block_bytes]) of each run of n neighbouring rows, in order."""
        place = 0
        while place < len(rows):
            slab, first = divmod(rows[place], self._rows_per_slab)
            count = 1
            while place + count < len(rows) and rows[place + count] == rows[place] + count and first + count < self._rows_per_slab:
                count += 1
            if slab not in self._slabs:
                self._slabs[slab] = self._runner.new_host_blocks(self._rows_per_slab)
            yield place, self._slabs[slab][first : first + count]
            place += count
