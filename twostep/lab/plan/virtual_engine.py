"""An engine without tokens: the scheduler, the seats and the blocks of twostep.engine on a clock that a simulation sets.

What is kept of the engine: `plan_step` itself, the token budget, sequences that take blocks as they grow and leave a watermark to each
other, who came last giving way when there are none (computed again, never swapped), and, with `look_ahead`, a step planned while one runs:

    clock    ─ n ──────────────┬─ n+1 ────────────┬─
    plans       ·   ·   n+1          ·   ·   n+2       `ahead_s` before the end; what arrives after that is in n+2

What is left out: which blocks hold which prefix (a request says how much of it is cached), the host's own time, tokens that end an answer
early.
tests/plan/test_plan_engine.py compares every token's time with the engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from twostep.engine.preemption import watermark
from twostep.engine.step_plan import Capacity, Chunk, RunningPrompt, StepTimeLimit, WaitingPrompt, plan_step
from twostep.lab.plan.virtual_sequence import EngineSpec, Step, VirtualSequence
from twostep.lab.plan.workload import Request
from twostep.step_curve import StepWorkload, chunk_pairs


class VirtualEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._budget = spec.step_tokens
        self._pace: StepTimeLimit | None = None
        if spec.max_step_s:
            self._pace = StepTimeLimit(curve=spec.prompt_curve, max_step_s=spec.max_step_s, min_chunk=spec.min_chunk_tokens)
        self._max_num_seqs = min(spec.max_num_seqs, spec.step_tokens)
        self._decoding: list[VirtualSequence] = []
        self._prompts: list[VirtualSequence] = []
        self._waiting: deque[VirtualSequence] = deque()
        self._preempted: list[VirtualSequence] = []  # oldest first
        self._yielding: list[VirtualSequence] = []  # told to give way, and in a launched step still
        self._launched: deque[Step] = deque()
        self._num_arrived = 0
        self.free_blocks = spec.num_blocks
        self.num_running = 0  # those that end in a launched step included
        self.num_reserved = 0
        # Over the running and the reserved: blocks they will want yet, and how many of them want any.
        self._num_wanted = 0
        self._num_growing = 0
        self.queued_tokens = 0  # of prompts, not planned yet
        self.queued_pairs = 0.0
        self.context = 0  # tokens of the decoding sequences
        # Over the whole run.
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_preemptions = 0
        self.most_blocks = 0
        self.most_decodes = 0
        self.sequence_s = 0.0  # decodes × seconds: over busy_s, how many decode at once

    # ---- work in ----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    @property
    def num_seqs(self) -> int:
        """All that are here or are to come."""
        return self.num_running + self.num_reserved + self.num_waiting

    def fits(self, request: Request) -> bool:
        """Whether an empty engine could hold it to its end."""
        return self._blocks(request.num_prompt + request.num_output) <= self.spec.num_blocks

    def submit(self, sequence: VirtualSequence) -> bool:
        """Queues a prompt; False: too many wait."""
        if len(self._waiting) >= self.spec.max_waiting:
            return False
        request = sequence.request
        sequence.length = request.num_prompt
        sequence.max_length = request.num_prompt + (1 if sequence.hold else request.num_output)
        sequence.end_blocks = self._blocks(request.num_prompt if sequence.hold else max(request.num_prompt, sequence.max_length - 1))
        self._arrive(sequence)
        self._waiting.append(sequence)
        self._queue(sequence, request.num_prompt - request.num_uncached)
        return True

    def reserve(self, sequence: VirtualSequence) -> bool:
        """Blocks for a prompt that is computed elsewhere; False: there is no room now."""
        request = sequence.request
        num_blocks = self._blocks(request.num_prompt)
        sequence.length = request.num_prompt
        sequence.max_length = request.num_prompt + request.num_output
        sequence.end_blocks = self._blocks(max(request.num_prompt, sequence.max_length - 1))
        room = self.free_blocks - self._watermark()
        if self.num_running + self.num_reserved >= self._max_num_seqs or self._preempted or self._yielding:
            return False
        if num_blocks + (sequence.end_blocks > num_blocks) > room:
            return False
        self._arrive(sequence)
        self._enter(sequence, num_blocks)
        self.num_reserved += 1
        return True

    def commit(self, sequence: VirtualSequence) -> None:
        """The reserved sequence's KV is there and its first token is known: it decodes from the next step planned on."""
        self.num_reserved -= 1
        self.num_running += 1
        sequence.planned = sequence.length
        sequence.length += 1
        self._decodes(sequence)

    def cancel(self, sequence: VirtualSequence) -> None:
        """A reservation is not needed: its first token was its last."""
        self.num_reserved -= 1
        self._free(sequence)

    def release(self, sequence: VirtualSequence) -> None:
        """A held sequence's blocks are free."""
        self.free_blocks += sequence.num_blocks

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

    def launch(self, now: float) -> Step | None:
        """Plans a step and launches it. None: there is nothing to do."""
        step = self._plan(now)
        if step is not None:
            self._launched.append(step)
        return step

    def settle(self) -> Step:
        """The oldest launched step is over: its tokens are there, and what ended is gone (or held)."""
        step = self._launched.popleft()
        now = step.end_s
        for sequence in step.decodes:
            sequence.times.append(now)
        for sequence in step.completed:
            sequence.times.append(now)
        for sequence in step.ended:
            self.num_running -= 1
            if sequence.hold:
                self._forget(sequence)
            else:
                self._free(sequence)
        if self._yielding:
            in_flight = self._in_flight()
            for sequence in [s for s in self._yielding if id(s) not in in_flight]:
                self._yielding.remove(sequence)
                self._preempt(sequence)
        return step

    def _plan(self, now: float) -> Step | None:
        ready = self._grow()
        open_ = len(ready) == len(self._decoding) and not self._yielding and bool(self._preempted or self._waiting)
        if not (open_ or self._prompts) and len(ready) <= self._max_num_seqs:
            return self._launched_step(now, list(ready), ()) if ready else None  # nothing to choose
        plan = plan_step(
            decodes=ready,
            prompts=[RunningPrompt(s, s.remaining, s.planned) for s in self._prompts],
            waiting=self._candidates() if open_ else (),
            budget=self._budget,
            max_seqs=self._max_num_seqs,
            capacity=Capacity(
                self._max_num_seqs - self.num_running - self.num_reserved if open_ else 0,
                self.free_blocks - self._watermark() if open_ else 0,
            ),
            num_context=self.context,
            time_limit=self._pace if ready else None,
        )
        for candidate in plan.admitted:
            self._admit(candidate.item)
        if not plan.decodes and not plan.prompts:
            return None
        return self._launched_step(now, list(plan.decodes), plan.prompts)

    def _launched_step(self, now: float, decodes: list[VirtualSequence], chunks: Sequence[Chunk[VirtualSequence]]) -> Step:
        """Counts what is planned. `decodes` is the step's own list: the table changes while it runs."""
        context = self.context if len(decodes) == len(self._decoding) else sum(s.length for s in decodes)
        ended: list[VirtualSequence] = []
        for sequence in decodes:
            sequence.planned = sequence.length
            sequence.length += 1
            if sequence.length >= sequence.max_length:
                ended.append(sequence)
        self.context += len(decodes)
        for sequence in ended:
            self._decoding.remove(sequence)
            self.context -= sequence.length
        num_prompt_tokens, pairs = 0, 0.0
        completed: list[VirtualSequence] = []
        for chunk in chunks:
            sequence, count = chunk.item, chunk.num_tokens
            num_prompt_tokens += count
            pairs += chunk_pairs(count, sequence.planned)
            sequence.planned += count
            if not sequence.remaining:
                completed.append(sequence)
        self.queued_tokens -= num_prompt_tokens
        self.queued_pairs -= pairs
        for sequence in completed:
            self._prompts.remove(sequence)
            sequence.length += 1
            if sequence.length >= sequence.max_length:
                ended.append(sequence)
            else:
                self._decodes(sequence)
        work = StepWorkload(prompt_tokens=num_prompt_tokens, pairs=pairs, decodes=len(decodes), context=context)
        duration = (self.spec.prompt_curve if num_prompt_tokens else self.spec.curve).step_s(work)
        self.busy_s += duration
        self.num_steps += 1
        self.sequence_s += duration * len(decodes)
        self.most_blocks = max(self.most_blocks, self.spec.num_blocks - self.free_blocks)
        self.most_decodes = max(self.most_decodes, len(decodes))
        return Step(
            max(now, self.free_at_s) + duration, duration, decodes, [chunk.item for chunk in chunks], completed, ended, num_prompt_tokens
        )

    def _candidates(self) -> Iterator[WaitingPrompt[VirtualSequence]]:
        for sequence in (*self._preempted, *self._waiting):
            num_blocks = self._blocks(sequence.length)
            uncached = self._uncached(sequence)
            yield WaitingPrompt(sequence, uncached, num_blocks + (sequence.end_blocks > num_blocks), sequence.length - uncached)

    def _uncached(self, sequence: VirtualSequence) -> int:
        """Who gave way computes all of its tokens again."""
        return sequence.length if sequence.times else sequence.request.num_uncached

    def _admit(self, sequence: VirtualSequence) -> None:
        sequence.planned = sequence.length - self._uncached(sequence)
        if self._preempted and self._preempted[0] is sequence:
            self._preempted.pop(0)
        else:
            self._waiting.popleft()
        self._enter(sequence, self._blocks(sequence.length))
        self.num_running += 1
        self._prompts.append(sequence)

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def _grow(self) -> Sequence[VirtualSequence]:
        """Those that decode and own blocks for all their tokens; the others give way, or wait for those that do."""
        short = [s for s in self._decoding if s.length > s.room]
        if not short:
            return self._decoding
        if len(short) > self.free_blocks:
            stalled = self._make_room(short)
            return [s for s in self._decoding if id(s) not in stalled]
        for sequence in short:
            self._extend(sequence)
        return self._decoding

    def _make_room(self, short: Sequence[VirtualSequence]) -> set[int]:
        """Oldest first, each gets a block that those who came last give up. Returns who must wait."""
        stalled: set[int] = set()
        coming = sum(s.num_blocks for s in self._yielding)
        spoken_for = 0
        for sequence in sorted(short, key=lambda s: s.arrival):
            if sequence not in self._decoding:
                continue  # it gave way meanwhile
            while self.free_blocks + coming - spoken_for < 1 and (victim := self._last_after(sequence)) is not None:
                coming += self._give_way(victim)
            if self.free_blocks - spoken_for >= 1:
                self._extend(sequence)
            else:
                spoken_for += 1
                stalled.add(id(sequence))
        return stalled

    def _last_after(self, sequence: VirtualSequence) -> VirtualSequence | None:
        later = [s for s in (*self._decoding, *self._prompts) if s.arrival > sequence.arrival and not s.hold]
        return max(later, key=lambda s: s.arrival, default=None)

    def _give_way(self, sequence: VirtualSequence) -> int:
        """Now, or when the launched step it is in is over. Returns the blocks that come free later than now."""
        if sequence in self._decoding:
            self._decoding.remove(sequence)
            self.context -= sequence.length
        else:
            self._prompts.remove(sequence)
            self.queued_tokens -= sequence.remaining
            self.queued_pairs -= chunk_pairs(sequence.remaining, sequence.planned)
        if id(sequence) in self._in_flight():
            self._yielding.append(sequence)
            return sequence.num_blocks
        self._preempt(sequence)
        return 0

    def _preempt(self, sequence: VirtualSequence) -> None:
        self.num_preemptions += 1
        self.num_running -= 1
        self._free(sequence)
        self._preempted.append(sequence)
        self._preempted.sort(key=lambda s: s.arrival)
        self._queue(sequence, sequence.length - self._uncached(sequence))

    def _in_flight(self) -> set[int]:
        return {id(s) for step in self._launched for s in (*step.decodes, *step.prompts)}

    def _watermark(self) -> int:
        return watermark(num_blocks=self.spec.num_blocks, num_growing=self._num_growing, num_wanted=self._num_wanted)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)

    def _arrive(self, sequence: VirtualSequence) -> None:
        self._num_arrived += 1
        sequence.arrival = self._num_arrived

    def _queue(self, sequence: VirtualSequence, num_before: int) -> None:
        self.queued_tokens += sequence.length - num_before
        self.queued_pairs += chunk_pairs(sequence.length - num_before, num_before)

    def _decodes(self, sequence: VirtualSequence) -> None:
        self._decoding.append(sequence)
        self.context += sequence.length

    def _enter(self, sequence: VirtualSequence, num_blocks: int) -> None:
        """It takes its first blocks and counts among those that will want more."""
        sequence.num_blocks = num_blocks
        sequence.room = num_blocks * self.spec.block_size
        self.free_blocks -= num_blocks
        wanted = sequence.end_blocks - num_blocks
        self._num_wanted += wanted
        self._num_growing += wanted > 0

    def _extend(self, sequence: VirtualSequence) -> None:
        sequence.num_blocks += 1
        sequence.room += self.spec.block_size
        self.free_blocks -= 1
        self._num_wanted -= 1
        self._num_growing -= sequence.end_blocks == sequence.num_blocks

    def _forget(self, sequence: VirtualSequence) -> None:
        """It wants no more blocks, and keeps those it has."""
        wanted = sequence.end_blocks - sequence.num_blocks
        self._num_wanted -= wanted
        self._num_growing -= wanted > 0

    def _free(self, sequence: VirtualSequence) -> None:
        self._forget(sequence)
        self.free_blocks += sequence.num_blocks
        sequence.num_blocks = sequence.room = 0
