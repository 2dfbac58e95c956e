"""In which order a sequence's blocks are handed over: token by token, those of all groups of layers one after the other.

    columns of block_size tokens     0   1   2   3   4   5            two groups, of which B has a window
    group A                          0   1   2   3   5   7   9        no token after these sees blocks 0 to 2 of B: they are not handed over
    group B                          ·   ·   ·   4   6   8
    state                            10 11

What is final, cached or to be sent is known as tokens: this order makes it one number of blocks. With one group of layers without windows
a block's number is its column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def num_out_of_reach(num_tokens: int, *, reach: int, block_size: int) -> int:
    """Returns how many blocks lie wholly out of reach of all tokens after the first `num_tokens`."""
    return max(0, num_tokens + 1 - reach) // block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """Orders the blocks of a sequence of `num_tokens`. `num_full` and `num_windowed`: groups of layers, the latter with windows, of
    which tokens to come reach back so far (see KvShape.reach). `num_state_blocks` come last."""

    num_tokens: int
    block_size: int
    num_full: int = 1
    num_windowed: int = 0
    reach: int = 0
    num_state_blocks: int = 0

    @property
    def num_columns(self) -> int:
        """Blocks of a group that reads all."""
        return -(-self.num_tokens // self.block_size)

    @property
    def num_left(self) -> int:
        """Returns how many blocks of each group with a window are not handed over, the first ones."""
        if not self.num_windowed:
            return 0
        return num_out_of_reach(self.num_tokens, reach=self.reach, block_size=self.block_size)

    @property
    def num_unseen(self) -> int:
        """Returns how many of the first tokens no token to come sees in the groups with windows."""
        return max(0, self.num_tokens + 1 - self.reach) if self.num_windowed else 0

    @property
    def count(self) -> int:
        """Returns how many blocks there are in all."""
        return self.before(self.num_columns) + self.num_state_blocks

    def before(self, num_columns: int) -> int:
        """Returns how many blocks there are of the first columns."""
        return num_columns * self.num_full + max(0, num_columns - self.num_left) * self.num_windowed

    def places(self) -> Iterator[tuple[int, int]]:
        """Yields of each block, but those of a state, its group and its column."""
        num_left = self.num_left
        for column in range(self.num_columns):
            for group in range(self.num_full + (self.num_windowed if column >= num_left else 0)):
                yield group, column
