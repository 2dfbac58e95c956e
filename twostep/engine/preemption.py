"""Which sequence gives way when the pool runs out, and what becomes of its KV: the policy. scheduler.py moves the sequences, swap_space.py
the bytes.

Blocks are taken as sequences grow, not for prompt and max_tokens beforehand: most answers end early, so many more run at once. When
nothing is left, the least urgent sequence gives way, of equals the one that arrived last, in one of two ways:

    recompute   its blocks are freed at once (full ones stay findable, so some may come back for nothing); later all its tokens are
                computed again, as a prompt
    swap        its blocks are copied to the host, and back when there is room

as vLLM does (Kwon et al.: Efficient memory management for large language model serving with PagedAttention, 2023, section 4.5). The
oldest never gives way, so that all get done in turn. Tokens do not depend on any of it: sampling noise is a function of seed and position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

# Until a step and a copy were measured.
_PREFILL_TOKENS_PER_S = 20_000.0
_COPY_BYTES_PER_S = 10e9
# Weight of the latest measurement.
_LATEST = 0.3
# Share of the pool that admission leaves for those that run.
_WATERMARK = 0.01


class PreemptionMode(Enum):
    AUTO = "auto"  # the cheaper one
    RECOMPUTE = "recompute"
    SWAP = "swap"  # as long as the host has room


@dataclass(frozen=True, slots=True)
class PreemptionRates:
    """How fast this device was last seen to be at computing prompts, copying blocks to the host or back."""

    prefill_tokens_per_s: float = _PREFILL_TOKENS_PER_S
    copy_bytes_per_s: float = _COPY_BYTES_PER_S

    def with_prefill(self, num_tokens: int, seconds: float) -> PreemptionRates:
        return replace(self, prefill_tokens_per_s=_mixed(self.prefill_tokens_per_s, num_tokens, seconds))

    def with_copy(self, num_bytes: int, seconds: float) -> PreemptionRates:
        return replace(self, copy_bytes_per_s=_mixed(self.copy_bytes_per_s, num_bytes, seconds))


def cheaper_to_swap(*, num_tokens: int, num_bytes: int, rates: PreemptionRates) -> bool:
    """Returns whether copying a sequence's KV out and back takes less time than computing its tokens again. Found prefixes would make
    computing cheaper, but a pool that has run out soon evicts them."""
    return 2 * num_bytes / rates.copy_bytes_per_s < num_tokens / rates.prefill_tokens_per_s


def watermark(*, num_blocks: int, num_growing: int, num_wanted: int) -> int:
    """Returns the blocks that admission leaves for the sequences already there: one for each of the `num_growing` that will need more, at
    least a hundredth of the pool, and never more than the `num_wanted` they can ever ask for. Else each newcomer would push one out."""
    return min(num_wanted, max(num_growing, math.ceil(num_blocks * _WATERMARK)))


def _mixed(old: float, amount: float, seconds: float) -> float:
    return old if seconds <= 0 or amount <= 0 else (1 - _LATEST) * old + _LATEST * amount / seconds
