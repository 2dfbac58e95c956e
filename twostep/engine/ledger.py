"""Who is where in the engine, and which blocks they own: waiting, reserved, running, held. Settles what planned steps (step_planner.py)
computed.

    submit ──▶ WAITING ──plan──▶ RUNNING ──settle──▶ gone, or HELD (submitted with `hold`) ──end──▶ gone
    reserve ─▶ RESERVED ─commit─▶ RUNNING ◀─▶ PREEMPTED (see preemptor.py)
                      end, from any state ──▶ gone, or ENDED until the last step it is in is settled

Blocks are owned for the tokens there are, and one more is taken whenever the last one is full. Admission leaves room for that, the
watermark; where it does not suffice, who is least urgent and came last gives way.

A step may be planned while the one before it is in flight. What a sequence samples there is then not known yet:

    step n     … sample a: row 0    sample b: row 1      sample c: row 2
    step n+1   a: carries row 0     b: carries row 1     c is not planned: its last token by length, or submitted with `hold`
    settle n   a goes on            b sampled a stop id: it ends, and what n+1 makes of it is dropped

Whatever a planned step may read or write keeps an owner until that step is settled. No lock, no clock, no device: the engine adds those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import numpy as np

from twostep.engine.admission import Admission, num_blocks_in_the_end, num_blocks_now
from twostep.engine.batch import Sampled
from twostep.engine.block_pool import BlockPool
from twostep.engine.config import EngineConfig
from twostep.engine.constrained import ConstrainedSequences
from twostep.engine.constraint import Advanced
from twostep.engine.host_blocks import HostRows
from twostep.engine.host_tier import HostLoad, HostTier
from twostep.engine.ledger_check import check_sequences
from twostep.engine.preemptor import Preemptor
from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.step_planner import StepPlanner
from twostep.engine.step_work import BlockSave, StepResult, StepWork
from twostep.engine.types import FailureKind, PrefillProgress, Reservation, SequenceFailure, TokenOutput
from twostep.errors import InvalidRequest, NotFound, ResourceExhausted
from twostep.request_class import RequestClass


def no_token_message(position: int) -> str:
    """Of a row without a token; `position` counts the answer's tokens."""
    return (
        f"the model's logits for token {position} of the answer are not finite, so that there is no next token; repeating the request does "
        "not help. Some token of it has broken weights, or values too large for this dtype (another --dtype may help)"
    )


class SequenceLedger:
    """Not thread-safe: the engine's lock guards it. At most two steps are planned and not yet settled or failed, which happens in the
    order they were planned."""

    def __init__(self, pool: BlockPool, *, config: EngineConfig, block_size: int, block_bytes: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._max_waiting = config.max_waiting
        self._sequences: dict[str, EngineSequence] = {}
        self._running: dict[str, EngineSequence] = {}
        self.num_reserved = 0
        self.num_held = 0
        self.preemptor = Preemptor(
            pool,
            self._running,
            block_size=block_size,
            block_bytes=block_bytes,
            mode=config.preemption_mode,
            host=HostRows(config.swap_bytes // block_bytes),
        )
        self.tier = HostTier(pool, config.host_cache_bytes // block_bytes)
        self._admission = Admission(pool, self.tier, self.preemptor, self._running, block_size=block_size)
        self.constrained = ConstrainedSequences()
        self.planner = StepPlanner(
            pool, self.preemptor, self._admission, self.constrained, self._sequences, self._running, config=config, block_size=block_size
        )
        self._num_arrived = 0
        # Nothing could be planned, and nothing has changed since.
        self._blocked = False
        self._planned: deque[StepWork] = deque()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Those preempted included."""
        return len(self._admission.waiting) + self.preemptor.num_preempted

    @property
    def num_queried_tokens(self) -> int:
        return self._admission.num_queried_tokens

    @property
    def num_hit_tokens(self) -> int:
        return self._admission.num_hit_tokens

    @property
    def num_host_hit_tokens(self) -> int:
        return self._admission.num_host_hit_tokens

    def num_queued_tokens(self, least: RequestClass = RequestClass.INTERACTIVE) -> int:
        """Tokens that are here and not computed, neither found nor saved, but for those that decoding adds: of requests no more urgent than
        `least`."""
        waiting = (s for s in chain(self._admission.waiting.values(), self.preemptor.waiting.values()) if s.request.request_class >= least)
        running = (s for s in self._running.values() if not s.decodes and s.request.request_class >= least)
        return sum(len(s.tokens) - s.num_matched for s in waiting) + sum(len(s.tokens) - s.num_computed for s in running)

    @property
    def num_context_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._running.values() if sequence.decodes)

    @property
    def has_work(self) -> bool:
        """Whether `plan` may find something to do, a planned step is to be settled, blocks are to be copied out, or somebody is over."""
        return bool(self._planned or self.preemptor.busy or self.constrained.failed) or (
            bool(self._running or self.num_waiting) and not self._blocked
        )

    @property
    def idle(self) -> bool:
        """Nothing is here, not even in a planned step."""
        return not (self._sequences or self._planned or self.preemptor.busy)

    def reconfigure(self, config: EngineConfig) -> None:
        """Other bounds, as for a new one. Only while idle; what is findable in the pool stays."""
        assert self.idle
        self._max_waiting = config.max_waiting
        self.planner.reconfigure(config)
        self.preemptor.resize(config.swap_bytes // self._block_bytes)

    def live(self, seq_id: str) -> EngineSequence | None:
        """The sequence, unless it has ended."""
        sequence = self._sequences.get(seq_id)
        return None if sequence is None or sequence.state is SequenceState.ENDED else sequence

    # ---- in and out -------------------------------------------------------------------------------------------------

    def submit(self, sequence: EngineSequence, now: float, *, first: bool = False) -> None:
        """A new WAITING sequence. `first`: before all others of its class, and however many they are. Raises ResourceExhausted,
        InvalidRequest."""
        self._refuse(sequence)
        # An urgent prompt is not refused for batch ones that wait.
        urgent = sequence.request.request_class < RequestClass.BATCH
        others = (s for s in self._admission.waiting.values() if not urgent or s.request.request_class < RequestClass.BATCH)
        if not first and (num_waiting := sum(1 for _ in others)) >= self._max_waiting:
            raise ResourceExhausted(f"{num_waiting} prompts are waiting here already; try another worker, or later")
        self._arrive(sequence)
        hashes = sequence.block_hashes()
        num_found = len(self._pool.lookup(hashes))
        num_cached = (num_found + len(self.tier.lookup(hashes, num_found))) * self._block_size
        sequence.num_matched = min(num_cached, len(sequence.tokens) - 1)
        sequence.patience.pause(now)
        later = dict(self._admission.waiting) if first else {}
        if first:
            self._admission.waiting.clear()
        self._admission.waiting[sequence.seq_id] = sequence
        self._admission.waiting.update(later)
        self._blocked = False

    def reserve(self, sequence: EngineSequence, now: float) -> Reservation:
        """A new RESERVED sequence, with blocks for its tokens. Raises ResourceExhausted, InvalidRequest."""
        self._refuse(sequence)
        try:
            cached = self.planner.take_room(sequence, now)
        finally:
            self._blocked = False  # somebody may have given way
        self._pool.share(cached)
        num_new = num_blocks_now(sequence, self._block_size) - len(cached)
        sequence.blocks = np.array(cached + self._pool.allocate(num_new), np.int32)
        sequence.num_registered = len(cached)
        in_host = self.tier.lookup(sequence.block_hashes(), len(cached))
        self.tier.load(sequence, len(cached), in_host, is_new=True)
        num_in_host = len(in_host) * self._block_size
        self._admission.found(sequence, len(cached) * self._block_size + num_in_host, num_in_host=num_in_host)
        self._arrive(sequence)
        self.num_reserved += 1
        return Reservation(seq_id=sequence.seq_id, block_ids=sequence.blocks.tolist(), num_cached_tokens=sequence.num_cached)

    def commit(self, seq_id: str, output_ids: Sequence[int], *, exact: bool = True, confirmed: bool = True) -> None:
        """RESERVED to RUNNING: the KV of all given tokens is there, `output_ids` come after them. Not `exact`: nothing of the sequence is
        made findable, now or later; not `confirmed`: not before `confirm`. Raises NotFound, InvalidRequest."""
        sequence = self.live(seq_id)
        if sequence is None or sequence.state is not SequenceState.RESERVED:
            raise NotFound(f"{seq_id} has no reservation here: it was cancelled, or committed before")
        if not output_ids:
            raise InvalidRequest(f"output_ids of {seq_id} are empty; commit with the first sampled token at least")
        if any(sequence.finish_reason(token, sequence.position + i) for i, token in enumerate(output_ids)):
            raise InvalidRequest(f"output_ids end {seq_id}: nothing is left to decode, cancel the reservation")
        sequence.num_reported = len(sequence.tokens)
        sequence.num_computed = sequence.num_planned = len(sequence.tokens) if sequence.num_intact is None else sequence.num_intact
        if not exact:
            sequence.hasher = None
        sequence.confirmed = confirmed
        self._register(sequence)
        sequence.tokens.extend(output_ids)
        self.constrained.advance(sequence, output_ids)
        self.num_reserved -= 1
        sequence.state = SequenceState.RUNNING
        self._running[seq_id] = sequence
        self._blocked = False

    def confirm(self, seq_id: str) -> None:
        """What was committed is what it should be. Of a sequence that has ended meanwhile it says nothing."""
        sequence = self.live(seq_id)
        if sequence is not None:
            sequence.confirmed = True
            # Else with its next step.
            if sequence.is_plannable:
                self._register(sequence)

    def end(self, sequence: EngineSequence) -> None:
        """Takes a live sequence off its list and frees its blocks, now or after the steps it is in."""
        if sequence.state is SequenceState.RESERVED:
            self.num_reserved -= 1
        elif sequence.state is SequenceState.HELD:
            self.num_held -= 1
        self._admission.waiting.pop(sequence.seq_id, None)
        self.planner.forget(sequence.seq_id)
        self._leave(sequence)

    def saved(self, save: BlockSave, seconds: float | None) -> None:
        """What Preemptor.take_saves asked for is done in so many seconds; None: it failed."""
        self.preemptor.saved(save, seconds)
        self._blocked = False
        if save.sequence.state is SequenceState.ENDED:
            self._forget(save.sequence)

    def loaded(self, load: HostLoad, *, ok: bool) -> None:
        """What the host tier was asked for is in the sequence's blocks. Not `ok`: it is not, and is computed."""
        sequence = load.sequence
        self.tier.loaded(load, ok=ok)
        if ok:
            self._admission.loaded(load)
        self._blocked = False
        if sequence.state is SequenceState.ENDED:
            self._forget(sequence)
            return
        running = sequence.state is SequenceState.RUNNING
        if not ok:
            num_intact = load.first * self._block_size
            if running:
                sequence.num_computed = sequence.num_planned = num_intact
            else:
                sequence.num_intact = num_intact
            sequence.num_cached = min(sequence.num_cached, num_intact)
        if running:
            self._register(sequence)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepWork | None:
        """The next step, or None if nothing can be computed now. What it reads and writes stays untouched until it is settled or failed."""
        assert len(self._planned) < 2
        work = self.planner.plan(now)
        self._blocked = work is None
        if work is not None:
            self._planned.append(work)
        return work

    def settle(self, work: StepWork, sampled: Sampled) -> StepResult:
        """The step planned first ran: counts what was computed, makes full blocks findable, appends tokens, frees what ended."""
        self._take_off(work)
        tokens: list[TokenOutput] = []
        progress: list[PrefillProgress] = []
        failures: list[SequenceFailure] = []
        row = -1
        for sequence, count, complete in zip(work.sequences, work.num_tokens, work.sampled, strict=True):
            row += complete
            sequence.num_steps -= 1
            sequence.num_pending -= complete
            if sequence.state is SequenceState.ENDED:
                if not sequence.num_steps:
                    self._forget(sequence)
                continue
            if complete and sampled.token_ids[row] < 0:
                failures.append(self._fail_row(sequence))
                continue
            sequence.num_computed += count
            self._register(sequence)
            # After a preemption, what was reported before is not reported again.
            if (num_given := min(sequence.num_computed, len(sequence.given))) > sequence.num_reported:
                progress.append(
                    PrefillProgress(
                        seq_id=sequence.seq_id,
                        num_computed_tokens=num_given,
                        num_cached_tokens=sequence.num_cached,
                        first_scheduled=not sequence.num_reported,
                    )
                )
                sequence.num_reported = num_given
            if complete:
                tokens.append(self._append(sequence, sampled, row))
            if sequence.gives_way and not sequence.num_steps:
                self.preemptor.preempt(sequence)
        if work.masks:
            self.constrained.follow(work)
        return StepResult(tokens=tokens, progress=progress, failures=failures)

    def _fail_row(self, sequence: EngineSequence) -> SequenceFailure:
        """Its row has no token, so that its KV is likely not finite either: nobody else is to find that."""
        hashes = sequence.block_hashes()
        self._pool.withdraw(hashes)
        self.tier.withdraw(hashes)
        self._leave(sequence)
        return SequenceFailure(seq_id=sequence.seq_id, message=no_token_message(sequence.position), kind=FailureKind.NO_TOKEN)

    def fail(self, work: StepWork, message: str) -> StepResult:
        """The step planned first did not run to its end: all its sequences are over."""
        self._take_off(work)
        failures = []
        for sequence in work.sequences:
            sequence.num_steps -= 1
            if sequence.state is not SequenceState.ENDED:
                failures.append(SequenceFailure(seq_id=sequence.seq_id, message=message))
                self._leave(sequence)
            elif not sequence.num_steps:
                self._forget(sequence)
        return StepResult(failures=failures)

    def advanced(self, sequences: Sequence[EngineSequence], results: Sequence[Advanced]) -> None:
        """The masks of constrained sequences are made, or cannot be."""
        self._blocked = False
        self.constrained.advanced(sequences, results, self.end)

    def _take_off(self, work: StepWork) -> None:
        assert self._planned[0] is work
        self._planned.popleft()
        self._pool.free([copy.source for copy in work.copies])
        self._pool.free(work.exchanged)
        for load in work.loads:
            self.preemptor.release(load.saved)
        self._blocked = False

    def _register(self, sequence: EngineSequence) -> None:
        """Makes blocks that have become full findable."""
        num_full = sequence.num_computed // self._block_size
        if sequence.hasher is None or sequence.loading or not sequence.confirmed or num_full == sequence.num_registered:
            return
        hashes = sequence.block_hashes()
        for i, block in enumerate(sequence.blocks[sequence.num_registered : num_full].tolist(), sequence.num_registered):
            if sequence.num_steps:
                self._pool.share((block,))  # a launched step reads it, whatever the sequence owns from now on
            found = self._pool.register(block, hashes[i], i, exchange=not sequence.leaves_early)
            if sequence.num_steps and found == block:
                self._pool.free((block,))
            elif sequence.num_steps:
                self._planned[-1].exchanged.append(block)
            if found != block:
                sequence.blocks[i] = found
        sequence.num_registered = num_full

    def _append(self, sequence: EngineSequence, sampled: Sampled, row: int) -> TokenOutput:
        """A sampled token joins its sequence, which goes on, is held, or has ended."""
        token_id, position = int(sampled.token_ids[row]), sequence.position
        reason = sequence.finish_reason(token_id, position)
        sequence.tokens.append(token_id)
        if sequence.hold:
            del self._running[sequence.seq_id]
            sequence.state = SequenceState.HELD
            self.num_held += 1
        elif reason is not None:
            self._leave(sequence)
        return TokenOutput(
            seq_id=sequence.seq_id,
            token_id=token_id,
            position=position,
            logprob=sampled.logprobs[row],
            top_logprobs=sampled.top_logprobs[row],
            finish_reason=reason,
        )

    def _leave(self, sequence: EngineSequence) -> None:
        """It is over: its blocks are free now, or after the last step it is in."""
        self._running.pop(sequence.seq_id, None)
        self.preemptor.drop(sequence)
        self.constrained.unready.discard(sequence)
        sequence.state = SequenceState.ENDED
        self._blocked = False
        if not sequence.num_steps:
            self._forget(sequence)

    def _forget(self, sequence: EngineSequence) -> None:
        self._pool.free(sequence.blocks.tolist())
        del self._sequences[sequence.seq_id]
        self.constrained.count -= sequence.constraint is not None

    def _arrive(self, sequence: EngineSequence) -> None:
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        self.constrained.count += sequence.constraint is not None
        self._sequences[sequence.seq_id] = sequence

    def _refuse(self, sequence: EngineSequence) -> None:
        if sequence.seq_id in self._sequences:
            raise InvalidRequest(f"{sequence.seq_id} is here already; give every attempt of a request an id of its own")
        num_blocks = num_blocks_in_the_end(sequence, self._block_size)
        if num_blocks > self._pool.num_blocks:
            raise InvalidRequest(
                f"the prompt and its answer need up to {num_blocks} KV blocks and this worker has {self._pool.num_blocks} in all; "
                "shorten the prompt, ask for fewer new tokens (max_tokens), or start the worker with more blocks"
            )

    # ---- proof ------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises InternalError if pool, lists and counts disagree."""
        used = [[*(copy.source for copy in work.copies), *work.exchanged] for work in self._planned]
        self._pool.check_integrity([*(sequence.blocks for sequence in self._sequences.values()), *used])
        self.tier.check_integrity([sequence for sequence in self._sequences.values() if sequence.loading])
        listed = {
            SequenceState.WAITING: len(self._admission.waiting),
            SequenceState.RESERVED: self.num_reserved,
            SequenceState.RUNNING: len(self._running),
            SequenceState.HELD: self.num_held,
            SequenceState.PREEMPTED: self.num_waiting - len(self._admission.waiting),
        }
        check_sequences(self._sequences.values(), self._planned, self.preemptor.saving, listed)
