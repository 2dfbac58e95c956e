"""An engine without tokens: the scheduler, the seats and the blocks of twostep.engine on a clock that a simulation sets.

What is kept of the engine: `plan_step` and `time_limit_of` themselves, the token budget, sequences that take blocks as they grow and leave
a watermark to each other, who came last giving way when there are none (computed again), and, with `look_ahead`, a step planned while one
runs:

    clock    ─ n ──────────────┬─ n+1 ────────────┬─
    plans       ·   ·   n+1          ·   ·   n+2       `ahead_s` before the end; what arrives after that is in n+2

What is left out: which blocks hold which prefix (a sequence says how much of it is cached), the host's own time, tokens that end an answer
early. tests/plan/test_plan_engine.py compares every token's time with the engine's.

All sequences that decode get a token in every step, so a step costs the same however many they are: steps with decodes are numbered, and of
a sequence only the number at which it joined is kept. It is looked up by number in which step it needs a block, and in which it ends.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from twostep.engine.step_bound import Promise, StepTimeLimit, time_limit_of
from twostep.engine.step_plan import Capacity, Chunk, RunningPrompt, WaitingPrompt, plan_step, watermark
from twostep.step_curve import StepCurve, StepWorkload, chunk_pairs, promised_step_s

# Ends of steps that no sequence refers to any more are dropped when there are so many.
_MOST_STEP_ENDS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One worker's engine. `num_blocks` of `block_size` tokens, of which each sequence takes `num_state_blocks` for its states;
    `step_tokens` is the budget of a step, `max_num_seqs` those that run or are reserved at once. `mixed` is the curve of steps with prompts
    in them, where they are another matter than `curve` says: on a GPU, steps of decodes alone are replayed graphs. `tpot_s` and `gap_s` are
    promised to all its sequences (0: are not) and bound steps with prompts (twostep/engine/step_bound.py); without either, such a step
    takes `max_step_s` at most while sequences decode (0: any time), but computes `min_chunk` tokens in any case. With `look_ahead` a step
    is planned so long before the running one ends (twostep/engine/pacing.py), or at its beginning if it is shorter."""

    curve: StepCurve
    mixed: StepCurve | None = None
    step_tokens: int = 2048
    max_num_seqs: int = 256
    max_waiting: int = 256
    num_blocks: int = 1 << 30
    block_size: int = 16
    num_state_blocks: int = 0
    max_step_s: float = 0.0
    min_chunk: int = 32
    tpot_s: float = 0.0
    gap_s: float = 0.0
    look_ahead: bool = False
    ahead_s: float = math.inf

    @property
    def prompt_curve(self) -> StepCurve:
        return self.curve if self.mixed is None else self.mixed

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedSequence:
    """`num_prompt` tokens, of which `num_uncached` are to be computed, and `num_output` to come. `hold`: it ends with its first token and
    keeps its blocks until it is released. `times` are those of its sampled tokens, complete when it has left the engine. The rest is the
    engine's own."""

    num_prompt: int
    num_output: int
    num_uncached: int
    hold: bool = False
    owner: Any = None
    times: list[float] = field(default_factory=list)
    length: int = 0  # tokens there are, those being sampled included; while it decodes: when it joined
    max_length: int = 0
    planned: int = 0  # of a prompt: tokens whose KV is there or will be once the launched steps are over
    num_blocks: int = 0
    room: int = 0  # tokens that its blocks hold
    end_blocks: int = 0  # blocks that it has in the end
    arrival: int = 0
    joined: int = 0  # the number of its first decode step
    promise: Promise | None = None
    last_step: int = -1  # the number of its last one, once it has left
    grows_at: int = -1  # the number of the step for which it needs another block
    ends_at: int = 0  # the number of the step that gives its last token

    @property
    def remaining(self) -> int:
        return self.length - self.planned


@dataclass(slots=True, eq=False)
class SimulatedStep:
    """A launched step: over at `end_s`. `ended` have no more to come here."""

    end_s: float
    duration_s: float
    num_decodes: int
    num_prompt_tokens: int
    prompts: Sequence[SimulatedSequence]
    ended: Sequence[SimulatedSequence]


class SimulatedEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._max_num_seqs = min(spec.max_num_seqs, spec.step_tokens)
        self._decoding: dict[SimulatedSequence, None] = {}  # in the order in which they joined
        self._stalled: list[SimulatedSequence] = []  # they would decode, and wait for a block
        self._prompts: list[SimulatedSequence] = []
        self._waiting: deque[SimulatedSequence] = deque()
        self._preempted: list[SimulatedSequence] = []  # oldest first
        self._yielding: list[SimulatedSequence] = []  # to be preempted once the launched steps they are in are over
        self._launched: deque[SimulatedStep] = deque()
        self._next_step = 0  # the number of the next step with decodes
        self._step_ends = array("d")  # of the last ones before it
        self._ending: dict[int, list[SimulatedSequence]] = {}
        self._growing: dict[int, list[SimulatedSequence]] = {}
        self._num_arrived = 0
        self._num_waited = 0  # steps since prompts last got something, in which they waited
        self.free_blocks = spec.num_blocks
        self.num_running = 0  # those that end in a launched step included
        self.num_reserved = 0
        # Over the running and the reserved: blocks they will want yet, and how many of them want any.
        self._num_wanted = 0
        self._num_growing = 0
        self.queued_tokens = 0  # of prompts, not planned yet
        self.queued_pairs = 0.0
        self.context = 0  # tokens of the decoding sequences, those without a block for the next one left out
        # Over the whole run.
        self.busy_s = 0.0
        self.num_preemptions = 0
        self.most_blocks = 0
        self.most_decodes = 0
        self.num_tokens = 0  # computed of prompts, and sampled by decodes
        self.num_prompt_tokens = 0  # of prompts alone
        self.sequence_s = 0.0  # decodes × seconds: over busy_s, how many decode at once
        self.token_s = 0.0  # tokens whose KV decodes read × seconds

    # ---- work in ----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_prompts(self) -> int:
        """Prompts that wait or are being computed."""
        return len(self._prompts) + self.num_waiting

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens of prompts that no step is over with, as a worker's heartbeats have them."""
        return self.queued_tokens + sum(step.num_prompt_tokens for step in self._launched)

    @property
    def num_decoding(self) -> int:
        return len(self._decoding) + len(self._stalled)

    @property
    def num_handing_over(self) -> int:
        """Of the running ones, prompts that are computed for others."""
        return sum(s.hold for s in self._prompts) + sum(s.hold for step in self._launched for s in step.ended)

    @property
    def num_seqs(self) -> int:
        """All that are here or are to come."""
        return self.num_running + self.num_reserved + len(self._waiting) + len(self._preempted)

    @property
    def has_seat(self) -> bool:
        return self.num_running + self.num_reserved < self._max_num_seqs

    def fits(self, num_tokens: int) -> bool:
        """Returns whether an empty engine could hold a sequence that ends with so many tokens."""
        return self._blocks(num_tokens) <= self.spec.num_blocks

    def submit(self, sequence: SimulatedSequence) -> bool:
        """Queues a prompt; False: too many wait."""
        if len(self._waiting) >= self.spec.max_waiting:
            return False
        self._arrive(sequence, 1 if sequence.hold else sequence.num_output)
        self._waiting.append(sequence)
        self._queue(sequence, sequence.num_prompt - sequence.num_uncached)
        return True

    def reserve(self, sequence: SimulatedSequence) -> bool:
        """Blocks for a prompt that is computed elsewhere; False: there is no room now."""
        if not self.has_seat or self._preempted or self._yielding:
            return False
        num_blocks = self._blocks(sequence.num_prompt)
        end_blocks = self._blocks(max(sequence.num_prompt, sequence.num_prompt + sequence.num_output - 1))
        if num_blocks + (end_blocks > num_blocks) > self.free_blocks - self._watermark():
            return False
        self._arrive(sequence, sequence.num_output)
        self._enter(sequence, num_blocks)
        self.num_reserved += 1
        return True

    def commit(self, sequence: SimulatedSequence, now: float) -> None:
        """The reserved sequence's KV is there and its first token is known: it decodes from the next step planned on."""
        self.num_reserved -= 1
        self.num_running += 1
        sequence.length += 1
        self._begin(sequence, now)
        self._join(sequence)

    def cancel(self, sequence: SimulatedSequence) -> None:
        """A reservation is not needed: its first token was its last, or it goes elsewhere."""
        self.num_reserved -= 1
        self._free(sequence)

    def release(self, sequence: SimulatedSequence) -> None:
        """A held sequence's blocks are free."""
        self.free_blocks += sequence.num_blocks

    def times_until(self, sequence: SimulatedSequence, now: float) -> list[float]:
        """The times of the tokens that a sequence has had here by `now`."""
        times = sequence.times[:]
        if sequence in self._decoding:
            times += self._ends_of(sequence, self._next_step)
        return times[: bisect_right(times, now)]

    # ---- steps ------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._launched

    @property
    def oldest_end_s(self) -> float:
        """When the step is over that was launched first."""
        return self._launched[0].end_s

    @property
    def free_at_s(self) -> float:
        """When the last launched step is over; 0 without any."""
        return self._launched[-1].end_s if self._launched else 0.0

    @property
    def launches_ahead_s(self) -> float | None:
        """When a step is to be planned behind the only one that runs; None: it is not."""
        if not self.spec.look_ahead or len(self._launched) != 1:
            return None
        return self._launched[0].end_s - min(self.spec.ahead_s, self._launched[0].duration_s)

    @property
    def usual_step_s(self) -> float:
        """How long steps with prompts may take on the whole, as a worker tells it; 0: any time."""
        spec = self.spec
        if self._decoding or self._stalled:
            return promised_step_s(spec.tpot_s, spec.gap_s) if spec.tpot_s or spec.gap_s else spec.max_step_s
        return promised_step_s(0.0, spec.gap_s) if spec.gap_s and self.num_reserved else 0.0

    def time_limit(self, now: float) -> StepTimeLimit | None:
        """Of the next step, if it computes prompts."""
        spec, number = self.spec, self._next_step
        coming = bool(spec.gap_s and self.num_reserved)
        if not (coming or (self._decoding and (spec.tpot_s or spec.gap_s or spec.max_step_s))):
            return None
        num_decodes = len(self._decoding)
        return time_limit_of(
            [s.promise for s in self._decoding],
            [s.length - s.joined + number for s in self._decoding],
            begin_s=max(now, self.free_at_s),
            curve=spec.prompt_curve,
            decodes=StepWorkload(decodes=num_decodes, context=self.context),
            decode_step_s=spec.curve.decode_step_s(num_decodes, self.context),
            min_chunk=spec.min_chunk,
            num_waited=self._num_waited,
            max_step_s=spec.max_step_s,
            coming_gap_s=spec.gap_s if coming else math.inf,
        )

    def launch(self, now: float) -> bool:
        """Plans a step and launches it. False: there is nothing to do."""
        step = self._plan(now)
        if step is not None:
            self._launched.append(step)
        return step is not None

    def settle(self) -> SimulatedStep:
        """The oldest launched step is over: what ended in it is gone (or held)."""
        step = self._launched.popleft()
        for sequence in step.ended:
            self.num_running -= 1
            if sequence in self._yielding:
                self._yielding.remove(sequence)
            if sequence.hold:
                self._forget(sequence)
            else:
                self._free(sequence)
        if self._yielding:
            for sequence in [s for s in self._yielding if not self._in_flight(s)]:
                self._yielding.remove(sequence)
                self._preempt(sequence)
        return step

    def _plan(self, now: float) -> SimulatedStep | None:
        if self._stalled or self._next_step in self._growing:
            self._grow()
        num_decodes = len(self._decoding)
        open_ = not self._stalled and not self._yielding and bool(self._preempted or self._waiting)
        if not (open_ or self._prompts):
            self._num_waited = 0
            return self._launched_step(now, num_decodes, ()) if num_decodes else None  # nothing to choose
        plan = plan_step(
            decodes=list(self._decoding),  # all will be planned: there are no more than seats, and no more seats than the budget
            prompts=[RunningPrompt(s, s.remaining, s.planned) for s in self._prompts],
            waiting=self._candidates() if open_ else (),
            budget=self.spec.step_tokens,
            max_seqs=self._max_num_seqs,
            capacity=Capacity(
                self._max_num_seqs - self.num_running - self.num_reserved if open_ else 0,
                self.free_blocks - self._watermark() if open_ else 0,
            ),
            num_context=self.context,
            time_limit=self.time_limit(now),
        )
        self._num_waited = self._num_waited + 1 if plan.withheld else 0
        for candidate in plan.admitted:
            self._admit(candidate.item)
        if not num_decodes and not plan.prompts:
            return None
        return self._launched_step(now, num_decodes, plan.prompts)

    def _launched_step(self, now: float, num_decodes: int, chunks: Sequence[Chunk[Any]]) -> SimulatedStep:
        num_prompt_tokens, pairs = 0, 0.0
        completed: list[SimulatedSequence] = []
        resumed: list[SimulatedSequence] = []
        for chunk in chunks:
            sequence, count = chunk.item, chunk.num_tokens
            num_prompt_tokens += count
            pairs += chunk_pairs(count, sequence.planned)
            sequence.planned += count
            if not sequence.remaining:
                completed.append(sequence)
            elif sequence.remaining == 1 and sequence.length > sequence.num_prompt:
                resumed.append(sequence)
        work = StepWorkload(prompt_tokens=num_prompt_tokens, pairs=pairs, decodes=num_decodes, context=self.context)
        duration = (self.spec.prompt_curve if num_prompt_tokens else self.spec.curve).step_s(work)
        end_s = (max(now, self._launched[-1].end_s) if self._launched else now) + duration
        self.busy_s += duration
        self.num_tokens += num_prompt_tokens + num_decodes
        self.num_prompt_tokens += num_prompt_tokens
        self.sequence_s += duration * num_decodes
        self.token_s += duration * self.context
        if (num_blocks := self.spec.num_blocks - self.free_blocks) > self.most_blocks:
            self.most_blocks = num_blocks
        if num_decodes > self.most_decodes:
            self.most_decodes = num_decodes
        ended = self._decode_step(end_s) if num_decodes else []
        if completed:
            self._sampled_first(completed, end_s, ended)
        self.queued_tokens -= num_prompt_tokens
        self.queued_pairs -= pairs
        for sequence in resumed:
            self._resume(sequence, end_s)
        return SimulatedStep(end_s, duration, num_decodes, num_prompt_tokens, [chunk.item for chunk in chunks], ended)

    def _decode_step(self, end_s: float) -> list[SimulatedSequence]:
        """Every decoding sequence has a token more. Returns those for which it is the last."""
        number = self._next_step
        self._next_step += 1
        self._step_ends.append(end_s)
        self.context += len(self._decoding)
        ended = self._ending.pop(number, [])
        for sequence in ended:
            self._drop(sequence)
        if len(self._step_ends) > _MOST_STEP_ENDS:
            oldest = next((s.joined for s in self._decoding), self._next_step)
            del self._step_ends[: oldest - (self._next_step - len(self._step_ends))]
        return ended

    def _sampled_first(self, completed: Iterable[SimulatedSequence], end_s: float, ended: list[SimulatedSequence]) -> None:
        """Prompts that this step completes have a token, and decode from the next one on unless it is their last."""
        for sequence in completed:
            self._prompts.remove(sequence)
            sequence.times.append(end_s)
            sequence.length += 1
            if sequence.length >= sequence.max_length:
                ended.append(sequence)
            else:
                self._begin(sequence, end_s)
                self._join(sequence)

    def _resume(self, sequence: SimulatedSequence, end_s: float) -> None:
        """A sequence that gave way has all but its last token computed again: what is left is a decode."""
        self._unqueue(sequence)
        self._begin(sequence, end_s)
        self._join(sequence)

    def _begin(self, sequence: SimulatedSequence, now: float) -> None:
        """It has its first token here, or goes on: what it was promised counts from then on."""
        if self.spec.tpot_s or self.spec.gap_s:
            first, last = sequence.length - 1, sequence.max_length - 1
            sequence.promise = Promise(self.spec.tpot_s, self.spec.gap_s, now, first, last)

    def _unqueue(self, sequence: SimulatedSequence) -> None:
        self._prompts.remove(sequence)
        self.queued_tokens -= sequence.remaining
        self.queued_pairs -= chunk_pairs(sequence.remaining, sequence.planned)

    def _candidates(self) -> Iterator[WaitingPrompt[SimulatedSequence]]:
        for sequence in (*self._preempted, *self._waiting):
            num_blocks = self._blocks(sequence.length)
            uncached = self._uncached(sequence)
            yield WaitingPrompt(sequence, uncached, num_blocks + (sequence.end_blocks > num_blocks), sequence.length - uncached)

    def _uncached(self, sequence: SimulatedSequence) -> int:
        """Who gave way computes all of its tokens again."""
        return sequence.length if sequence.length > sequence.num_prompt else sequence.num_uncached

    def _admit(self, sequence: SimulatedSequence) -> None:
        sequence.planned = sequence.length - self._uncached(sequence)
        if self._preempted and self._preempted[0] is sequence:
            self._preempted.pop(0)
        else:
            self._waiting.popleft()
        self._enter(sequence, self._blocks(sequence.length))
        self.num_running += 1
        self._prompts.append(sequence)

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def _join(self, sequence: SimulatedSequence) -> None:
        """It gets a token in every step from the next one on."""
        sequence.joined = self._next_step
        sequence.ends_at = sequence.joined + sequence.max_length - sequence.length - 1
        sequence.grows_at = sequence.joined + sequence.room - sequence.length + 1
        self._decoding[sequence] = None
        self.context += sequence.length
        self._ending.setdefault(sequence.ends_at, []).append(sequence)
        self._watch_growth(sequence)

    def _leave(self, sequence: SimulatedSequence) -> None:
        """It decodes no more before its end, in the next step at least."""
        self._ending[sequence.ends_at].remove(sequence)
        if sequence in self._growing.get(sequence.grows_at, ()):
            self._growing[sequence.grows_at].remove(sequence)
        self._drop(sequence)

    def _drop(self, sequence: SimulatedSequence) -> None:
        """Takes a sequence out of those that decode; what it had in steps is its own from now on."""
        sequence.times += self._ends_of(sequence, self._next_step)
        if self._next_step > sequence.joined:
            sequence.last_step = self._next_step - 1
        sequence.length += self._next_step - sequence.joined
        del self._decoding[sequence]
        self.context -= sequence.length

    def _ends_of(self, sequence: SimulatedSequence, before: int) -> array[float]:
        first = self._next_step - len(self._step_ends)
        return self._step_ends[sequence.joined - first : before - first]

    def _in_flight(self, sequence: SimulatedSequence) -> bool:
        """Returns whether a launched step computes it. It does not decode any more."""
        oldest = self._next_step - sum(step.num_decodes > 0 for step in self._launched)
        return sequence.last_step >= oldest or any(sequence in step.prompts for step in self._launched)

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def _watch_growth(self, sequence: SimulatedSequence) -> None:
        if sequence.grows_at <= sequence.ends_at:
            self._growing.setdefault(sequence.grows_at, []).append(sequence)

    def _grow(self) -> None:
        """Who decodes in the next step owns blocks for all its tokens; the others give way, or wait for those that do."""
        short = [*self._growing.pop(self._next_step, ()), *self._stalled]
        enough = len(short) <= self.free_blocks
        for sequence in short if enough else ():
            self._extend(sequence)
        if not enough:
            self._make_room(short)

    def _make_room(self, short: Sequence[SimulatedSequence]) -> None:
        """Oldest first, each gets a block that those who came last give up, or is stalled."""
        coming = sum(s.num_blocks for s in self._yielding)
        spoken_for = 0
        for sequence in sorted(short, key=lambda s: s.arrival):
            if sequence not in self._decoding and sequence not in self._stalled:
                continue  # it gave way meanwhile
            while self.free_blocks + coming - spoken_for < 1 and (victim := self._last_after(sequence)) is not None:
                coming += self._give_way(victim)
            if self.free_blocks - spoken_for >= 1:
                self._extend(sequence)
                continue
            spoken_for += 1
            if sequence in self._decoding:
                self._leave(sequence)
                self._stalled.append(sequence)

    def _last_after(self, sequence: SimulatedSequence) -> SimulatedSequence | None:
        # Of one that ends in a launched step the engine does not know it yet; nothing is lost by its giving way.
        ending = [s for step in self._launched for s in step.ended if s not in self._yielding]
        later = [s for s in (*self._decoding, *self._stalled, *self._prompts, *ending) if s.arrival > sequence.arrival and not s.hold]
        return max(later, key=lambda s: s.arrival, default=None)

    def _give_way(self, sequence: SimulatedSequence) -> int:
        """Now, or when the launched step it is in is over. Returns the blocks that come free later than now."""
        if sequence in self._decoding:
            self._leave(sequence)
        elif sequence in self._stalled:
            self._stalled.remove(sequence)
        elif sequence in self._prompts:
            self._unqueue(sequence)
        if self._in_flight(sequence):
            self._yielding.append(sequence)
            return sequence.num_blocks
        self._preempt(sequence)
        return 0

    def _preempt(self, sequence: SimulatedSequence) -> None:
        self.num_preemptions += 1
        self.num_running -= 1
        self._free(sequence)
        self._preempted.append(sequence)
        self._preempted.sort(key=lambda s: s.arrival)
        self._queue(sequence, sequence.length - self._uncached(sequence))

    def _watermark(self) -> int:
        return watermark(num_blocks=self.spec.num_blocks, num_growing=self._num_growing, num_wanted=self._num_wanted)

    def _blocks(self, num_tokens: int) -> int:
        """Returns the blocks of a sequence of so many tokens, its state's included."""
        return -(-num_tokens // self.spec.block_size) + self.spec.num_state_blocks

    def _arrive(self, sequence: SimulatedSequence, num_output: int) -> None:
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        sequence.length = sequence.num_prompt
        sequence.max_length = sequence.num_prompt + num_output
        sequence.end_blocks = self._blocks(max(sequence.num_prompt, sequence.max_length - 1))

    def _queue(self, sequence: SimulatedSequence, num_before: int) -> None:
        self.queued_tokens += sequence.length - num_before
        self.queued_pairs += chunk_pairs(sequence.length - num_before, num_before)

    def _enter(self, sequence: SimulatedSequence, num_blocks: int) -> None:
        """It takes its first blocks and counts among those that will want more."""
        sequence.num_blocks = num_blocks
        sequence.room = (num_blocks - self.spec.num_state_blocks) * self.spec.block_size
        self.free_blocks -= num_blocks
        wanted = sequence.end_blocks - num_blocks
        self._num_wanted += wanted
        self._num_growing += wanted > 0

    def _extend(self, sequence: SimulatedSequence) -> None:
        sequence.num_blocks += 1
        sequence.room += self.spec.block_size
        self.free_blocks -= 1
        self._num_wanted -= 1
        self._num_growing -= sequence.end_blocks == sequence.num_blocks
        if sequence in self._decoding:
            sequence.grows_at += self.spec.block_size
            self._watch_growth(sequence)
        else:
            self._stalled.remove(sequence)
            self._join(sequence)

    def _forget(self, sequence: SimulatedSequence) -> None:
        """It wants no more blocks, and keeps those it has."""
        wanted = sequence.end_blocks - sequence.num_blocks
        self._num_wanted -= wanted
        self._num_growing -= wanted > 0

    def _free(self, sequence: SimulatedSequence) -> None:
        self._forget(sequence)
        self.free_blocks += sequence.num_blocks
        sequence.num_blocks = sequence.room = 0
