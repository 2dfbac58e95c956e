"""Says which part of a block holds which part of a state (KvShape.num_state_blocks), so that a state is cut over ranks as KV is.

    K, or V, of a layer in a block │ KV head 0         │ KV head 1         │
    its columns                    │ 0  │ 1  │ 2  │ 3  │ 4  │ 5  │ 6  │ 7  │      of as many bytes each
    the second rank of four has    └╌╌╌╌╌╌╌╌╌ │ own     │                            of KV head 0, which the first has, too

A column has the state of some heads: a piece of it in K and in V of each layer, which goes on in the sequence's next state block. A rank
has the columns of its own heads, which no other rank has, among the columns of its KV heads. So code that moves blocks need not know what
is in them. Workers tell each other that states lie so: whoever changes it counts STATE_LAYOUT up (twostep/cluster/records.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StateColumns:
    """Says that a rank keeps its states in columns [first, first + num_own) of the `count` columns of its pool's blocks. These are all of
    them, unless several ranks hold the same KV head."""

    count: int = 1
    first: int = 0
    num_own: int = 1

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + self.num_own)
