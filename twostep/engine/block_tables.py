"""The blocks of all sequences that own some, a row each: a step's block tables are one gather of rows.

        blocks, in the sequence's order
row 0   17  4  9  0  0  0
row 1    0  0  0  0  0  0     nobody's
row 2    3 12  5  8 21  0
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockTables:
    """Grows with its sequences, and never shrinks: to the most that owned blocks at once, and the longest. The engine's lock guards it;
    rows of a planned step, which do not change, may be gathered without."""

    def __init__(self) -> None:
        self._table = np.zeros((1, 1), np.int32)
        self._free = [0]

    def take(self) -> int:
        """Returns a row of zeros."""
        if not self._free:
            self._grow(2 * len(self._table), self._table.shape[1])
        return self._free.pop()

    def write(self, row: int, first: int, blocks: Sequence[int]) -> None:
        """Sets the blocks of a row from its `first` one on."""
        if (width := first + len(blocks)) > self._table.shape[1]:
            self._grow(len(self._table), max(width, 2 * self._table.shape[1]))
        self._table[row, first : first + len(blocks)] = blocks

    def give_back(self, row: int, num_blocks: int) -> None:
        self._table[row, :num_blocks] = 0
        self._free.append(row)

    def gather(self, rows: list[int], num_blocks: int) -> npt.NDArray[np.int32]:
        """Returns a copy of the first blocks of these rows, [len(rows), num_blocks]."""
        tables: npt.NDArray[np.int32] = self._table[rows, :num_blocks]
        return tables

    def _grow(self, num_rows: int, width: int) -> None:
        old = self._table
        larger = np.zeros((num_rows, width), np.int32)
        larger[: len(old), : old.shape[1]] = old
        # At once: another thread may gather.
        self._table = larger
        self._free += range(len(old), num_rows)
