"""Says which part of a block holds which part of a state (KvShape.num_state_blocks), so that a state is cut over ranks as KV is.

    K, or V, of a layer in a block │ KV head 0         │ KV head 1         │
    its columns                    │ 0  │ 1  │ 2  │ 3  │ 4  │ 5  │ 6  │ 7  │      of as many bytes each
    of a rank of four                        ╰─ own ─╯                             in its own block, of KV head 0: columns 2 and 3 of 4

A column has the state of some heads: a piece of it in K and in V of each layer, and so on in the next block. A rank holds the columns of its
own heads, whose bytes no other rank has, beside or within those of its KV heads. So what moves blocks need not know what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StateColumns:
    """Columns [first, first + num_own) of `count`: those of a pool's blocks that states are kept in, all but for one of several ranks
    that hold the same KV head."""

    count: int = 1
    first: int = 0
    num_own: int = 1

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + self.num_own)
