"""Dynamic SplitFuse (DeepSpeed-FastGen, section 3.2) as a pure function: every step computes about the same number of tokens.

    budget   |d d d d d|-- prompt A, its last 40 --|-- prompt B, all 12 --|-- prompt C, its first 76 ... (the rest later) --|

Decode tokens go first, one for each sequence; what is left of the budget goes to prompts in the order they came: those already
begun, then those waiting. A prompt longer than the rest is split anywhere (not only between blocks), short ones are fused.

Nobody starves: prompts are strictly first in, first out, and with max_num_seqs <= budget the decodes never fill the budget while
a prompt is running or could be admitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Running(Generic[T]):
    """A sequence with its blocks. `num_remaining`: tokens to compute before it can be sampled; 1 when decoding."""

    item: T
    num_remaining: int


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """A prompt not yet begun. `num_uncached`: tokens to compute, at least 1; `num_blocks`: available blocks that admitting it uses up,
    now, for its whole life."""

    item: T
    num_uncached: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Chunk(Generic[T]):
    """The next `num_tokens` (at least 1) of a sequence."""

    item: T
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(Generic[T]):
    """`decodes` (one token each) and `prompts` are this step's work; `admitted`, the waiting prompts among `prompts`, in order."""

    decodes: Sequence[T]
    prompts: Sequence[Chunk[T]]
    admitted: Sequence[Waiting[T]]


def plan_step(
    *,
    decodes: Sequence[T],
    prompts: Iterable[Running[T]],
    waiting: Iterable[Waiting[T]],
    budget: int,
    num_seats: int,
    num_free_blocks: int,
) -> StepPlan[T]:
    """Plans one step of at most `budget` tokens.

    decodes           one token each, most entitled first (those past the budget are left for the next step)
    prompts           running prompts in the order of admission
    waiting           in the order they came; read only while tokens and seats are left, so it may be lazy
    num_seats         sequences that may still be admitted (max_num_seqs less the running and the reserved)
    num_free_blocks   blocks that may still be given out; the first prompt that does not fit ends admission
    """
    taken = decodes[:budget]
    left = budget - len(taken)
    prompt_chunks: list[Chunk[T]] = []
    for prompt in prompts:
        if left == 0:
            break
        count = min(prompt.num_remaining, left)
        prompt_chunks.append(Chunk(prompt.item, count))
        left -= count

    admitted: list[Waiting[T]] = []
    candidates = iter(waiting)
    while left > 0 and len(admitted) < num_seats:
        candidate = next(candidates, None)
        if candidate is None or candidate.num_blocks > num_free_blocks:
            break
        num_free_blocks -= candidate.num_blocks
        count = min(candidate.num_uncached, left)
        admitted.append(candidate)
        prompt_chunks.append(Chunk(candidate.item, count))
        left -= count
    return StepPlan(decodes=taken, prompts=prompt_chunks, admitted=admitted)
