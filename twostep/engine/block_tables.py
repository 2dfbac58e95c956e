"""The blocks of all sequences that own some, a row each in the table of each group of layers: a step's block tables are one gather of rows.

        blocks of one group, in the sequence's order
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

    def __init__(self, num_groups: int = 1) -> None:
        self._table = np.zeros((num_groups, 1, 1), np.int32)
        self._free = [0]

    def take(self) -> int:
        """Returns a row of zeros."""
        if not self._free:
            self._grow(2 * self._table.shape[1], self._table.shape[2])
        return self._free.pop()

    def write(self, row: int, group: int, first: int, blocks: Sequence[int]) -> None:
        """Sets a group's blocks of a row from its `first` one on."""
        if (width := first + len(blocks)) > self._table.shape[2]:
            self._grow(self._table.shape[1], max(width, 2 * self._table.shape[2]))
        self._table[group, row, first : first + len(blocks)] = blocks

    def give_back(self, row: int, num_blocks: int) -> None:
        self._table[:, row, :num_blocks] = 0
        self._free.append(row)

    def gather(self, rows: list[int], num_blocks: int) -> npt.NDArray[np.int32]:
        """Returns a copy of the first blocks of these rows, [groups, len(rows), num_blocks]."""
        tables: npt.NDArray[np.int32] = self._table[:, rows, :num_blocks]
        return tables

    def _grow(self, num_rows: int, width: int) -> None:
        old = self._table
        num_groups, old_rows, old_width = old.shape
        larger = np.zeros((num_groups, num_rows, width), np.int32)
        larger[:, :old_rows, :old_width] = old
        # At once: another thread may gather.
        self._table = larger
        self._free += range(old_rows, num_rows)
