"""Where one sequence's KV goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a sequence's KV goes: its blocks in its own order, the first `num_cached_blocks` of which hold theirs already, and
    `num_blocks` of which the prompt's `num_tokens` fill."""

    block_ids: Sequence[int]
    num_cached_blocks: int
    num_blocks: int
    num_tokens: int
