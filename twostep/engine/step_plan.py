"""Plans what one step computes: Dynamic SplitFuse (DeepSpeed-FastGen, section 3.2) as a pure function, with classes of requests and a bound
on a step's time. scheduler.py feeds it from its queues.

    budget   |d d d d d|-- prompt A, its last 40 --|-- prompt B, all 12 --| b b b |-- batch prompt C, its first 68 ... (the rest later) --|
              decodes    prompts, begun and waiting: the urgent                gaps: what is left is for the batch class

Every step computes about the same number of tokens. Decode tokens go first, one for each sequence; what is left of the budget goes to
prompts: interactive ones, then standard ones, within a class those already begun, then those waiting, in the order they came. A prompt
longer than the rest is split anywhere (not only between blocks), short ones are fused. A prompt that an encoder reads is never split: it
waits for a step that has room for all of it. Batch decodes and batch prompts get what the others leave, so batch work gives way within a
step. While urgent sequences decode, prompts get no more tokens than a step of bounded time has room for (step_bound.py), by the step curve;
but always a least chunk, so that they end, unless they are to wait for some steps.

No request starves: within a class, prompts are strictly first in, first out; with max_num_seqs <= budget the decodes never fill the budget
while a prompt is running or could be admitted; and a sequence that waits long rises by a class (sequence.py, Priority).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from twostep.engine.step_bound import StepTimeLimit
from twostep.request_class import RequestClass
from twostep.step_curve import StepWorkload, chunk_pairs

T = TypeVar("T")

# Share of the pool that admission leaves for those that run.
_WATERMARK = 0.01


def watermark(*, num_blocks: int, num_growing: int, num_wanted: int) -> int:
    """Returns the blocks that admission leaves for the sequences already there: one for each of the `num_growing` that will need more, at
    least a hundredth of the pool, and never more than the `num_wanted` they can ever ask for. Else each newcomer would push one out."""
    return min(num_wanted, max(num_growing, math.ceil(num_blocks * _WATERMARK)))


@dataclass(frozen=True, slots=True)
class RunningPrompt(Generic[T]):
    """A prompt with its blocks. `num_remaining`: tokens to compute before it can be sampled; `num_before`: those computed; `least`: of how
    many of them a chunk consists at least."""

    item: T
    num_remaining: int
    num_before: int = 0
    rank: int = RequestClass.STANDARD
    least: int = 1


@dataclass(frozen=True, slots=True)
class WaitingPrompt(Generic[T]):
    """A prompt not yet begun. `num_uncached`: tokens to compute, at least 1, after `num_before`; `num_blocks`: available blocks that
    admitting it uses up; `least`: as RunningPrompt has it."""

    item: T
    num_uncached: int
    num_blocks: int
    num_before: int = 0
    rank: int = RequestClass.STANDARD
    least: int = 1


@dataclass(frozen=True, slots=True)
class BatchDecode(Generic[T]):
    """A sequence of the batch class that can decode; `num_context`: tokens whose KV it reads."""

    item: T
    num_context: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sequences and blocks that admission may use up."""

    seats: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Chunk(Generic[T]):
    """The next `num_tokens` (at least 1) of a sequence."""

    item: T
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(Generic[T]):
    """`decodes` (one token each) and `prompts` are this step's work; `admitted`, the waiting prompts among `prompts`, in order. `short`:
    the one that ended admission for want of blocks. `withheld`: there are no prompts, because their least chunk is to wait."""

    decodes: Sequence[T]
    prompts: Sequence[Chunk[T]]
    admitted: Sequence[WaitingPrompt[T]]
    short: WaitingPrompt[T] | None = None
    withheld: bool = False


def plan_step(
    *,
    decodes: Sequence[T],
    batch_decodes: Sequence[BatchDecode[T]] = (),
    prompts: Sequence[RunningPrompt[T]],
    waiting: Iterable[WaitingPrompt[T]],
    budget: int,
    max_seqs: int,
    capacity: Capacity,
    batch_capacity: Capacity | None = None,
    num_context: int = 0,
    time_limit: StepTimeLimit | None = None,
) -> StepPlan[T]:
    """Plans one step of at most `budget` tokens and `max_seqs` sequences.

    decodes         urgent ones, one token each, most entitled first (those past the bounds are left for the next step)
    batch_decodes   decodes of the batch class, most entitled first
    prompts         running prompts by rank, then in the order of admission
    waiting         by rank, then in the order they came; read only while tokens and seats are left, so it may be lazy
    capacity        for urgent prompts; the first that does not fit ends admission
    batch_capacity  for batch prompts, out of the same: what urgent ones take is taken from it too. None: as `capacity`
    num_context     tokens whose KV `decodes` read, in sum
    time_limit      None: the budget alone bounds the step
    """
    taken = decodes[: min(budget, max_seqs)]
    step = _Step(budget - len(taken), max_seqs - len(taken), StepWorkload(decodes=len(taken), context=num_context), time_limit)
    queue = _PromptQueue(prompts, waiting)
    chunks: list[Chunk[T]] = []
    admitted: list[WaitingPrompt[T]] = []
    queue.fill(step, chunks, admitted, below=RequestClass.BATCH, capacity=capacity)
    filling = [decode.item for decode in batch_decodes if step.add_decode(decode.num_context)]
    queue.fill(step, chunks, admitted, below=RequestClass.BATCH + 1, capacity=capacity if batch_capacity is None else batch_capacity)
    return StepPlan(
        decodes=[*taken, *filling] if filling else taken, prompts=chunks, admitted=admitted, short=queue.short, withheld=step.withheld
    )


class _Step:
    """Holds what is in the step so far, and what it has room for."""

    def __init__(self, num_tokens: int, num_seqs: int, work: StepWorkload, time_limit: StepTimeLimit | None) -> None:
        self._num_tokens = num_tokens
        self._num_seqs = num_seqs
        self._work = work
        self._limit = time_limit
        self._is_full = False
        self.withheld = False

    @property
    def is_open(self) -> bool:
        return self._num_tokens > 0 and self._num_seqs > 0 and not self._is_full

    def add_decode(self, context: int) -> bool:
        if not self.is_open:
            return False
        work = replace(self._work, decodes=self._work.decodes + 1, context=self._work.context + context)
        if self._limit is not None and self._limit.curve.step_s(work) > self._limit.max_step_s:
            self._is_full = True
            return False
        self._add(work, 1)
        return True

    def add_prompt(self, num_remaining: int, num_before: int, *, rank: int, least: int = 1) -> int:
        """Returns how many of a prompt's tokens are in the step now: `least` at least, or none."""
        count = min(num_remaining, self._num_tokens)
        if count < least:
            # Prompts that come after it would take its place in the next step, too.
            self._is_full = True
            return 0
        if self._limit is not None and (fits := self._num_in_time(self._limit, num_remaining, num_before)) < num_remaining:
            self._is_full = True
            smallest = max(least, min(self._limit.min_chunk, num_remaining))
            if fits < smallest:
                if self._work.prompt_tokens or rank >= RequestClass.BATCH:
                    return 0
                if self._limit.waits:
                    self.withheld = True
                    return 0
                fits = smallest
            count = min(count, fits)
        self._add(self._with_chunk(count, num_before), count)
        return count

    def _num_in_time(self, limit: StepTimeLimit, num_remaining: int, num_before: int) -> int:
        def seconds(count: int) -> float:
            return limit.curve.step_s(self._with_chunk(count, num_before))

        if seconds(num_remaining) <= limit.max_step_s:
            return num_remaining
        return bisect_right(range(1, num_remaining), limit.max_step_s, key=seconds)

    def _with_chunk(self, count: int, num_before: int) -> StepWorkload:
        pairs = self._work.pairs + chunk_pairs(count, num_before)
        return replace(self._work, prompt_tokens=self._work.prompt_tokens + count, pairs=pairs)

    def _add(self, work: StepWorkload, num_tokens: int) -> None:
        self._work = work
        self._num_tokens -= num_tokens
        self._num_seqs -= 1


class _PromptQueue(Generic[T]):
    """Running and waiting prompts, merged by rank; on a tie the running ones first."""

    def __init__(self, prompts: Sequence[RunningPrompt[T]], waiting: Iterable[WaitingPrompt[T]]) -> None:
        self.short: WaitingPrompt[T] | None = None
        self._prompts = iter(prompts)
        self._running = next(self._prompts, None)
        self._waiting = iter(waiting)
        self._candidate: WaitingPrompt[T] | None = None
        self._num_blocks = 0
        self._admission_ended = False

    def fill(self, step: _Step, chunks: list[Chunk[T]], admitted: list[WaitingPrompt[T]], *, below: int, capacity: Capacity) -> None:
        """Puts prompts of ranks under `below` in the step while it is open."""
        while step.is_open:
            running, candidate = self._running, None
            if len(admitted) < capacity.seats and (running is None or running.rank > RequestClass.INTERACTIVE):
                candidate = self._peek()
            if running is not None and running.rank < below and (candidate is None or running.rank <= candidate.rank):
                if count := step.add_prompt(running.num_remaining, running.num_before, rank=running.rank, least=running.least):
                    chunks.append(Chunk(running.item, count))
                    self._running = next(self._prompts, None)
                continue
            if candidate is None or candidate.rank >= below:
                return
            if self._num_blocks + candidate.num_blocks > capacity.blocks:
                self.short, self._admission_ended = candidate, True
            elif count := step.add_prompt(candidate.num_uncached, candidate.num_before, rank=candidate.rank, least=candidate.least):
                self._num_blocks += candidate.num_blocks
                self._candidate = None
                admitted.append(candidate)
                chunks.append(Chunk(candidate.item, count))

    def _peek(self) -> WaitingPrompt[T] | None:
        if self._admission_ended:
            return None
        if self._candidate is None:
            self._candidate = next(self._waiting, None)
            self._admission_ended = self._candidate is None
        return self._candidate
