"""Who is where in the engine, and which blocks they own: waiting, reserved, running, held. Plans steps and settles their results.

    submit ──▶ WAITING ──plan──▶ RUNNING ──settle──▶ gone, or HELD (submitted with `hold`) ──end──▶ gone
    reserve ─▶ RESERVED ─commit─▶ RUNNING
                      end, from any state ──▶ gone, or ENDED until the step it is in is settled

No lock, no clock, no device: the engine adds those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from twostep.engine.batch import Sampled
from twostep.engine.block_pool import BlockCopy, BlockPool
from twostep.engine.scheduler import Chunk, Running, Waiting, plan_step
from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.types import PrefillProgress, Reservation, SequenceFailure, TokenOutput
from twostep.errors import InternalError, InvalidRequest, NotFound, ResourceExhausted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One planned step: its first `num_decodes` chunks are decodes, then come prompts. `copies` are made before it runs."""

    chunks: Sequence[Chunk[EngineSequence]]
    num_decodes: int
    copies: Sequence[BlockCopy]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    tokens: Sequence[TokenOutput] = ()
    progress: Sequence[PrefillProgress] = ()
    failures: Sequence[SequenceFailure] = ()


class SequenceLedger:
    """Not thread-safe: the engine's lock guards it. At most one step is planned and not yet settled or failed."""

    def __init__(self, pool: BlockPool, *, block_size: int, budget: int, max_num_seqs: int, max_waiting: int) -> None:
        """`budget`: tokens of a step. At most `max_num_seqs` sequences run or are reserved, and never more than the budget."""
        self._pool = pool
        self._block_size = block_size
        self._budget = budget
        self._max_num_seqs = min(max_num_seqs, budget)
        self._max_waiting = max_waiting
        self._sequences: dict[str, EngineSequence] = {}
        # Insertion-ordered sets: first in, first out.
        self._waiting: dict[str, EngineSequence] = {}
        self._running: dict[str, EngineSequence] = {}
        self.num_reserved = 0
        self.num_held = 0
        # The first waiting prompt did not fit, and nothing was freed since.
        self._blocked = False
        # Sources of the planned step's copies: owned until they are made.
        self._copying: list[int] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether `plan` may find something to do."""
        return bool(self._running) or (bool(self._waiting) and not self._blocked)

    def live(self, seq_id: str) -> EngineSequence | None:
        """The sequence, unless it has ended."""
        sequence = self._sequences.get(seq_id)
        return None if sequence is None or sequence.state is SequenceState.ENDED else sequence

    # ---- in and out -------------------------------------------------------------------------------------------------

    def submit(self, sequence: EngineSequence) -> None:
        """A new WAITING sequence. Raises ResourceExhausted, InvalidRequest."""
        self._refuse(sequence)
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhausted(f"{len(self._waiting)} prompts are waiting here already; try another worker, or later")
        self._sequences[sequence.seq_id] = sequence
        self._waiting[sequence.seq_id] = sequence

    def reserve(self, sequence: EngineSequence) -> Reservation:
        """A new RESERVED sequence, with all its blocks. Raises ResourceExhausted, InvalidRequest."""
        self._refuse(sequence)
        if len(self._running) + self.num_reserved >= self._max_num_seqs:
            raise ResourceExhausted(f"all {self._max_num_seqs} seats are taken; try another worker, or later")
        cached = self._pool.lookup(sequence.block_hashes())
        num_new = self._blocks_for(sequence) - len(cached)
        room = self._pool.num_available - self._pool.num_unowned(cached)
        if num_new > room:
            raise ResourceExhausted(f"{num_new} KV blocks are needed and {room} are free; try another worker, or later")
        self._pool.share(cached)
        sequence.blocks = np.array(cached + self._pool.allocate(num_new), np.int32)
        sequence.num_registered = len(cached)
        sequence.num_cached = len(cached) * self._block_size
        self._sequences[sequence.seq_id] = sequence
        self.num_reserved += 1
        return Reservation(seq_id=sequence.seq_id, block_ids=sequence.blocks.tolist(), num_cached_tokens=sequence.num_cached)

    def commit(self, seq_id: str, output_ids: Sequence[int]) -> None:
        """RESERVED to RUNNING: the KV of all given tokens is there, `output_ids` come after them. Raises NotFound, InvalidRequest."""
        sequence = self.live(seq_id)
        if sequence is None or sequence.state is not SequenceState.RESERVED:
            raise NotFound(f"{seq_id} has no reservation here: it was cancelled, or committed before")
        if not output_ids:
            raise InvalidRequest(f"output_ids of {seq_id} are empty; commit with the first sampled token at least")
        if any(sequence.finish_reason(token, sequence.position + i) for i, token in enumerate(output_ids)):
            raise InvalidRequest(f"output_ids end {seq_id}: nothing is left to decode, cancel the reservation")
        sequence.num_computed = len(sequence.tokens)
        self._register(sequence)
        sequence.tokens.extend(output_ids)
        self.num_reserved -= 1
        sequence.state = SequenceState.RUNNING
        self._running[seq_id] = sequence

    def end(self, sequence: EngineSequence) -> None:
        """Takes a live sequence off its list and frees its blocks, now or after the step it is in."""
        if sequence.state is SequenceState.RESERVED:
            self.num_reserved -= 1
        elif sequence.state is SequenceState.HELD:
            self.num_held -= 1
        self._waiting.pop(sequence.seq_id, None)
        self._running.pop(sequence.seq_id, None)
        sequence.state = SequenceState.ENDED
        self._blocked = False
        if not sequence.in_step:
            self._forget(sequence)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def plan(self) -> StepWork | None:
        """The next step, or None if nothing can be computed now. Its sequences stay untouched until it is settled or failed."""
        decodes: list[EngineSequence] = []
        prompts: list[Running[EngineSequence]] = []
        for sequence in self._running.values():
            remaining = sequence.num_remaining
            if remaining == 1 and len(sequence.tokens) > len(sequence.given):
                decodes.append(sequence)
            else:
                prompts.append(Running(sequence, remaining))
        plan = plan_step(
            decodes=decodes,
            prompts=prompts,
            waiting=self._candidates(),
            budget=self._budget,
            num_seats=self._max_num_seqs - len(self._running) - self.num_reserved,
            num_free_blocks=self._pool.num_available,
        )
        copies = self._admit([candidate.item for candidate in plan.admitted])
        chunks = [*plan.decodes, *plan.prompts]
        for chunk in chunks:
            chunk.item.in_step = True
        self._blocked = not chunks
        return StepWork(chunks=chunks, num_decodes=len(plan.decodes), copies=copies) if chunks else None

    def settle(self, work: StepWork, sampled: Sampled) -> StepResult:
        """The planned step ran: counts what was computed, makes full blocks findable, appends tokens, frees what ended."""
        self._free_copied()
        tokens: list[TokenOutput] = []
        progress: list[PrefillProgress] = []
        row = -1
        for chunk in work.chunks:
            sequence = chunk.item
            sequence.in_step = False
            is_prompt = sequence.num_computed < len(sequence.given)
            sequence.num_computed += chunk.num_tokens
            complete = sequence.num_remaining == 0
            row += complete
            if sequence.state is SequenceState.ENDED:
                self._forget(sequence)
                continue
            self._register(sequence)
            if is_prompt:
                progress.append(
                    PrefillProgress(
                        seq_id=sequence.seq_id,
                        num_computed_tokens=sequence.num_computed,
                        num_cached_tokens=sequence.num_cached,
                        first_scheduled=not sequence.scheduled,
                    )
                )
                sequence.scheduled = True
            if complete:
                tokens.append(self._append(sequence, sampled, row))
        return StepResult(tokens=tokens, progress=progress)

    def fail(self, work: StepWork, message: str) -> StepResult:
        """The planned step did not run to its end: all its sequences are over."""
        self._free_copied()
        failures = []
        for chunk in work.chunks:
            sequence = chunk.item
            sequence.in_step = False
            if sequence.state is not SequenceState.ENDED:
                failures.append(SequenceFailure(seq_id=sequence.seq_id, message=message))
                del self._running[sequence.seq_id]
            self._forget(sequence)
        return StepResult(failures=failures)

    def _candidates(self) -> Iterator[Waiting[EngineSequence]]:
        """Waiting prompts with what is cached of them now. One token at least is computed, for its logits: if all blocks are cached, the
        last one is copied to be written to, or left out where there is no room for both."""
        size = self._block_size
        for sequence in self._waiting.values():
            num_blocks = self._blocks_for(sequence)
            cached = self._pool.lookup(sequence.block_hashes())
            num_cached = min(len(cached) * size, len(sequence.tokens) - 1)
            cost = num_blocks - num_cached // size + self._pool.num_unowned(cached)
            if num_cached < len(cached) * size and (num_cached % size == 0 or cost > self._pool.num_available):
                cached.pop()
                num_cached = len(cached) * size
                cost = num_blocks - len(cached) + self._pool.num_unowned(cached)
            sequence.matched = cached
            sequence.num_cached = num_cached
            yield Waiting(sequence, len(sequence.tokens) - num_cached, cost)

    def _admit(self, admitted: Sequence[EngineSequence]) -> list[BlockCopy]:
        """Moves waiting prompts to the running ones, with all the blocks they will ever need."""
        # All shares first: no allocation may evict what another one found.
        for sequence in admitted:
            self._pool.share(sequence.matched)
        copies: list[BlockCopy] = []
        for sequence in admitted:
            blocks = sequence.matched
            sequence.num_computed = sequence.num_cached
            sequence.num_registered = sequence.num_cached // self._block_size
            if sequence.num_registered < len(blocks):
                copy = self._pool.copy_on_write(blocks[-1])
                assert copy is not None, "a cached block is never written to"
                copies.append(copy)
                self._copying.append(copy.source)
                blocks[-1] = copy.target
            blocks.extend(self._pool.allocate(self._blocks_for(sequence) - len(blocks)))
            sequence.blocks = np.array(blocks, np.int32)
            sequence.matched = []
            sequence.state = SequenceState.RUNNING
            del self._waiting[sequence.seq_id]
            self._running[sequence.seq_id] = sequence
        return copies

    def _register(self, sequence: EngineSequence) -> None:
        """Makes blocks that have become full findable."""
        num_full = sequence.num_computed // self._block_size
        if sequence.hasher is None or num_full == sequence.num_registered:
            return
        hashes = sequence.block_hashes()
        for i in range(sequence.num_registered, num_full):
            sequence.blocks[i] = self._pool.register(int(sequence.blocks[i]), hashes[i], i)
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
            del self._running[sequence.seq_id]
            self._forget(sequence)
        return TokenOutput(
            seq_id=sequence.seq_id,
            token_id=token_id,
            position=position,
            logprob=sampled.logprobs[row],
            top_logprobs=sampled.top_logprobs[row],
            finish_reason=reason,
        )

    def _free_copied(self) -> None:
        self._pool.free(self._copying)
        self._copying = []

    def _forget(self, sequence: EngineSequence) -> None:
        self._pool.free(sequence.blocks.tolist())
        del self._sequences[sequence.seq_id]

    def _blocks_for(self, sequence: EngineSequence) -> int:
        return -(-sequence.num_kv_tokens() // self._block_size)

    def _refuse(self, sequence: EngineSequence) -> None:
        if sequence.seq_id in self._sequences:
            raise InvalidRequest(f"{sequence.seq_id} is here already; give every attempt of a request an id of its own")
        if self._blocks_for(sequence) > self._pool.num_blocks:
            raise InvalidRequest(
                f"prompt and max_tokens need {self._blocks_for(sequence)} KV blocks and this worker has {self._pool.num_blocks} in all; "
                "lower max_tokens, shorten the prompt, or start the worker with more blocks"
            )

    # ---- proof ------------------------------------------------------------------------------------------------------

    def check_integrity(self, *, stepping: bool) -> None:
        """Raises InternalError if pool, lists and counts disagree. `stepping`: a planned step is not settled yet."""
        self._pool.check_integrity([*(sequence.blocks for sequence in self._sequences.values()), self._copying])
        counted = dict.fromkeys(SequenceState, 0)
        for sequence in self._sequences.values():
            counted[sequence.state] += 1
        listed = {
            SequenceState.WAITING: len(self._waiting),
            SequenceState.RESERVED: self.num_reserved,
            SequenceState.RUNNING: len(self._running),
            SequenceState.HELD: self.num_held,
        }
        for state, count in listed.items():
            if counted[state] != count:
                raise InternalError(f"{counted[state]} sequences are {state.value} and {count} are listed so")
        if not stepping and (counted[SequenceState.ENDED] or self._copying):
            raise InternalError("an ended sequence or a copied block is still owned between steps")
