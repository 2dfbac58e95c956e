"""Dynamic SplitFuse (DeepSpeed-FastGen, section 3.2) as a pure function, with classes of requests and a bound on a step's time.

    budget   |d d d d d|-- prompt A, its last 40 --|-- prompt B, all 12 --| b b b |-- batch prompt C, its first 68 ... (the rest later) --|
              decodes    prompts, begun and waiting: the urgent                gaps: what is left is for the batch class

Every step computes about the same number of tokens. Decode tokens go first, one for each sequence; what is left of the budget goes to
prompts: interactive ones, then standard ones, within a class those already begun, then those waiting, in the order they came. A prompt
longer than the rest is split anywhere (not only between blocks), short ones are fused. Batch decodes and batch prompts get what the
others leave, so batch work gives way within a step.

Pace: while urgent sequences decode, prompts get no more tokens than a step of bounded time has room for, by the step curve; but always
a least chunk, so that they end.

Nobody starves: within a class, prompts are strictly first in, first out; with max_num_seqs <= budget the decodes never fill the budget
while a prompt is running or could be admitted; and who waits long rises by a class (ageing.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from twostep.request_class import RequestClass
from twostep.step_curve import StepCurve, StepWorkload, chunk_pairs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Running(Generic[T]):
    """A prompt with its blocks. `num_remaining`: tokens to compute before it can be sampled; `num_before`: those computed."""

    item: T
    num_remaining: int
    num_before: int = 0
    rank: int = RequestClass.STANDARD


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """A prompt not yet begun. `num_uncached`: tokens to compute, at least 1, after `num_before`; `num_blocks`: available blocks that
    admitting it uses up, now, for its whole life."""

    item: T
    num_uncached: int
    num_blocks: int
    num_before: int = 0
    rank: int = RequestClass.STANDARD


@dataclass(frozen=True, slots=True)
class Filler(Generic[T]):
    """A sequence of the batch class that can decode; `num_context`: tokens whose KV it reads."""

    item: T
    num_context: int


@dataclass(frozen=True, slots=True)
class Room:
    """What admission may use up: sequences, and blocks."""

    seats: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Longest a mixed step may take. A prompt that alone would break it gets `min_chunk` tokens all the same."""

    curve: StepCurve
    max_step_s: float
    min_chunk: int


@dataclass(frozen=True, slots=True)
class Chunk(Generic[T]):
    """The next `num_tokens` (at least 1) of a sequence."""

    item: T
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(Generic[T]):
    """`decodes` (one token each) and `prompts` are this step's work; `admitted`, the waiting prompts among `prompts`, in order. `short`:
    the one that ended admission for want of blocks."""

    decodes: Sequence[T]
    prompts: Sequence[Chunk[T]]
    admitted: Sequence[Waiting[T]]
    short: Waiting[T] | None = None


def plan_step(
    *,
    decodes: Sequence[T],
    fillers: Sequence[Filler[T]] = (),
    prompts: Sequence[Running[T]],
    waiting: Iterable[Waiting[T]],
    budget: int,
    max_seqs: int,
    room: Room,
    gap_room: Room | None = None,
    num_context: int = 0,
    pace: Pace | None = None,
) -> StepPlan[T]:
    """Plans one step of at most `budget` tokens and `max_seqs` sequences.

    decodes       urgent ones, one token each, most entitled first (those past the bounds are left for the next step)
    fillers       decodes of the batch class, most entitled first
    prompts       running prompts by rank, then in the order of admission
    waiting       by rank, then in the order they came; read only while tokens and seats are left, so it may be lazy
    room          for urgent prompts; the first that does not fit ends admission
    gap_room      for batch prompts, out of the same: what urgent ones take is taken from it too. None: as `room`
    num_context   tokens whose KV `decodes` read, in sum
    pace          None: the budget alone bounds the step
    """
    taken = decodes[: min(budget, max_seqs)]
    step = _Step(
        num_tokens=budget - len(taken),
        num_seqs=max_seqs - len(taken),
        work=StepWorkload(decodes=len(taken), context=num_context),
        pace=pace,
    )
    queue = _Queue(prompts, waiting)
    chunks: list[Chunk[T]] = []
    admitted: list[Waiting[T]] = []
    queue.fill(step, chunks, admitted, below=RequestClass.BATCH, room=room)
    filling = [filler.item for filler in fillers if step.add_decode(filler.num_context)]
    queue.fill(step, chunks, admitted, below=RequestClass.BATCH + 1, room=room if gap_room is None else gap_room)
    return StepPlan(decodes=[*taken, *filling] if filling else taken, prompts=chunks, admitted=admitted, short=queue.short)


class _Step:
    """What is in the step so far, and what it has room for."""

    def __init__(self, *, num_tokens: int, num_seqs: int, work: StepWorkload, pace: Pace | None) -> None:
        self.num_tokens = num_tokens
        self.num_seqs = num_seqs
        self._work = work
        self._pace = pace
        # Nothing more fits in time.
        self._out_of_time = False

    @property
    def is_open(self) -> bool:
        return self.num_tokens > 0 and self.num_seqs > 0 and not self._out_of_time

    def add_decode(self, context: int) -> bool:
        if not self.is_open:
            return False
        work = replace(self._work, decodes=self._work.decodes + 1, context=self._work.context + context)
        if self._pace is not None and self._pace.curve.step_s(work) > self._pace.max_step_s:
            self._out_of_time = True
            return False
        self._add(work, 1)
        return True

    def add_prompt(self, num_remaining: int, num_before: int, *, rank: int) -> int:
        """Of a prompt's tokens, how many are in the step now."""
        count = min(num_remaining, self.num_tokens)
        if self._pace is not None and (fits := self._num_in_time(self._pace, num_remaining, num_before)) < num_remaining:
            self._out_of_time = True
            least = min(self._pace.min_chunk, num_remaining)
            if fits < least:
                if self._work.prompt_tokens or rank >= RequestClass.BATCH:
                    return 0
                fits = least
            count = min(count, fits)
        self._add(self._with_chunk(count, num_before), count)
        return count

    def _num_in_time(self, pace: Pace, num_remaining: int, num_before: int) -> int:
        def seconds(count: int) -> float:
            return pace.curve.step_s(self._with_chunk(count, num_before))

        if seconds(num_remaining) <= pace.max_step_s:
            return num_remaining
        return bisect_right(range(1, num_remaining), pace.max_step_s, key=seconds)

    def _with_chunk(self, count: int, num_before: int) -> StepWorkload:
        pairs = self._work.pairs + chunk_pairs(count, num_before)
        return replace(self._work, prompt_tokens=self._work.prompt_tokens + count, pairs=pairs)

    def _add(self, work: StepWorkload, num_tokens: int) -> None:
        self._work = work
        self.num_tokens -= num_tokens
        self.num_seqs -= 1


class _Queue(Generic[T]):
    """Running and waiting prompts, merged by rank; on a tie the running ones first."""

    def __init__(self, prompts: Sequence[Running[T]], waiting: Iterable[Waiting[T]]) -> None:
        self.short: Waiting[T] | None = None
        self._prompts = iter(prompts)
        self._running = next(self._prompts, None)
        self._waiting: Iterator[Waiting[T]] = iter(waiting)
        self._candidate: Waiting[T] | None = None
        self._num_blocks = 0
        # Nobody is admitted any more.
        self._ended = False

    def fill(self, step: _Step, chunks: list[Chunk[T]], admitted: list[Waiting[T]], *, below: int, room: Room) -> None:
        """Puts prompts of ranks under `below` in the step while it is open."""
        while step.is_open:
            running, candidate = self._running, None
            if len(admitted) < room.seats and (running is None or running.rank > RequestClass.INTERACTIVE):
                candidate = self._peek()
            if running is not None and running.rank < below and (candidate is None or running.rank <= candidate.rank):
                count = step.add_prompt(running.num_remaining, running.num_before, rank=running.rank)
                if count:
                    chunks.append(Chunk(running.item, count))
                    self._running = next(self._prompts, None)
                continue
            if candidate is None or candidate.rank >= below:
                return
            if self._num_blocks + candidate.num_blocks > room.blocks:
                self.short, self._ended = candidate, True
                continue
            count = step.add_prompt(candidate.num_uncached, candidate.num_before, rank=candidate.rank)
            if count:
                self._num_blocks += candidate.num_blocks
                self._candidate = None
                admitted.append(candidate)
                chunks.append(Chunk(candidate.item, count))

    def _peek(self) -> Waiting[T] | None:
        if self._ended:
            return None
        if self._candidate is None:
            self._candidate = next(self._waiting, None)
            self._ended = self._candidate is None
        return self._candidate
