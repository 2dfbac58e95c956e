"""Who runs next: the queues of sequences, the steps that are made of them, and what comes of a sequence in the end.

    submit ──▶ WAITING ──plan──▶ RUNNING ──settle──▶ gone, or HELD (submitted with `hold`) ──end──▶ gone
    reserve ─▶ RESERVED ─commit─▶ RUNNING ◀─▶ PREEMPTED
                      end, from any state ──▶ gone, or ENDED until the last step it is in is settled

A step is planned from the running sequences, which take blocks as they grow, the preempted and the waiting ones:

    running ──grow──▶ decodes │ batch decodes │ prompts ──┐
    preempted, waiting ──candidates, by rank──────────────┴─ plan_step ──▶ plan ──admit──▶ blocks of those admitted
                             ▲                                  │ an urgent prompt is short of blocks
                             └── batch sequences are preempted ◀─┘

Blocks are taken as sequences grow, not for prompt and max_tokens beforehand: most answers end early, so many more run at once. Where there
are too few, the sequence that is least urgent and arrived last gives way (as in Kwon et al.: Efficient memory management for large language
model serving with PagedAttention, 2023, section 4.5). Its full blocks stay findable, in the pool or the host tier; what is gone when it
comes back is computed again, as a prompt. The most urgent and oldest never gives way, so that all get done in
turn:

    RUNNING ──give way──▶ in launched steps still ──settle──▶ PREEMPTED: waits, oldest first
    RUNNING ◀──────── room for it: admitted before new ones of its rank ────┘

Batch work gives way to urgent work in three ways, from the cheapest on: it is passed over, left out of a step that others fill, its KV
staying where it is; those passed over take no seats from others; and the batch sequences that came last are preempted when an urgent prompt
or reservation lacks blocks. What urgent newcomers need beside the running ones is reckoned without the batch sequences' future needs:
those can give way again.

A step may be planned while the one before it is in flight. What a sequence samples there is then not known yet:

    step n     … sample a: row 0    sample b: row 1      sample c: row 2
    step n+1   a: carries row 0     b: carries row 1     c is not planned: its last token by length, or submitted with `hold`
    settle n   a goes on            b sampled a stop id: it ends, and what n+1 makes of it is dropped

No lock, no clock, no device: the engine adds those.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from heapq import merge
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import Sampled
from twostep.engine.block_manager import BlockManager
from twostep.engine.config import EngineConfig
from twostep.engine.constrained import ConstrainedSequences, NextMask
from twostep.engine.draft_choice import DraftBounds
from twostep.engine.drafts import Drafting, may_go_on, num_sampled
from twostep.engine.host_tier import HostLoad
from twostep.engine.proposer import WantedDrafts
from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.step_bound import StepTimeLimit, time_limit_of
from twostep.engine.step_plan import BatchDecode, Capacity, Chunk, RunningPrompt, StepPlan, WaitingPrompt, plan_step, watermark
from twostep.engine.step_work import LeftState, StepResult, StepWork, plan_chunks
from twostep.engine.types import (
    EngineStats,
    FailureKind,
    PooledPrompt,
    PrefillProgress,
    PromptScores,
    Reservation,
    SequenceFailure,
    StepTokens,
    TokenExtras,
)
from twostep.errors import InternalError, InvalidRequest, NotFound, ResourceExhausted
from twostep.pooling import Pooling
from twostep.request_class import RequestClass
from twostep.step_curve import FIRST_GAP_SHARE, StepCurve, StepWorkload, chunk_pairs, promised_step_s

# How long blocks that batch sequences gave up for a reservation are kept from other batch sequences.
_KEPT_S = 1.0
# When a reservation for which they give way is worth trying again.
_RETRY_S = 0.02
_BATCH = int(RequestClass.BATCH)
_ANY_RANK = _BATCH + 1
_NOT_FINITE = (
    "the model's hidden states of the input are not finite, so that there is no embedding; repeating the request does not help. Some token "
    "of it has broken weights, or values too large for this dtype (another --dtype may help)"
)


def no_token_message(position: int) -> str:
    """Returns why a row without a token failed; `position` counts the answer's tokens."""
    return (
        f"the model's logits for token {position} of the answer are not finite, so that there is no next token; repeating the request does "
        "not help. Some token of it has broken weights, or values too large for this dtype (another --dtype may help)"
    )


def _with_drafts_s(curve: StepCurve, work: StepWorkload, reads_once: bool, num_rows: int) -> float:
    """Returns how long a step takes with so many rows of drafts. `reads_once`: they read what lies before them with their decodes."""
    context = work.context + (num_rows if reads_once else num_rows * work.context // work.decodes)
    # `replace` would take longer than all else here.
    return curve.step_s(StepWorkload(prompt_tokens=work.prompt_tokens, pairs=work.pairs, decodes=work.decodes + num_rows, context=context))


def _entitlement(sequence: EngineSequence) -> tuple[int, int]:
    """Sorts the most entitled first."""
    return sequence.priority.rank, sequence.arrival


class Scheduler:
    """Owns the sequences and their queues. Not thread-safe: the engine's lock guards it. At most two steps are planned and not yet settled
    or failed, which happens in the order they were planned."""

    def __init__(
        self,
        blocks: BlockManager,
        constrained: ConstrainedSequences,
        config: EngineConfig,
        drafting: Drafting | None = None,
        *,
        reads_shared_once: bool = False,
    ) -> None:
        """`drafting` None: no token is drafted. `reads_shared_once`: the runner does."""
        # How long steps take; None: not known.
        self.curve: StepCurve | None = None
        self._constrained = constrained
        self._blocks = blocks
        self._drafting = drafting
        self._reads_once = reads_shared_once
        self._pool = blocks.pool
        self.reconfigure(config)
        self._sequences: dict[str, EngineSequence] = {}
        self._running: dict[str, EngineSequence] = {}
        # Prompts that were never admitted, in the order they came.
        self._waiting: dict[str, EngineSequence] = {}
        # Those that can be admitted again, oldest first.
        self._preempted: dict[str, EngineSequence] = {}
        # Running ones that are to give way once the launched steps that they are in are settled.
        self._yielding: dict[str, EngineSequence] = {}
        # Blocks kept for a sequence that is not here yet: how many, and until when.
        self._kept: dict[str, tuple[int, float]] = {}
        # Running ones left out of the step planned last, that could have gone on.
        self._passed_over: list[EngineSequence] = []
        # The prompt that waits for blocks, as of the last plan.
        self._short: EngineSequence | None = None
        self._planned: deque[StepWork] = deque()
        self._planned_at = self._begins_at = 0.0
        # Gaps that were promised to urgent sequences whose KV is to come.
        self._coming_gaps: dict[str, float] = {}
        # How many steps in a row prompts were left out for the sake of a promise.
        self._num_waited = 0
        # Nothing could be planned, and nothing has changed since.
        self._blocked = False
        self._num_arrived = 0
        self._num_preemptions = 0

    def reconfigure(self, config: EngineConfig) -> None:
        """Sets other bounds. Only while idle; what is findable in the pool stays."""
        self._config = config
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)

    # ---- looking in -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Returns whether nothing is here, not even in a planned step."""
        return not (self._sequences or self._planned)

    @property
    def has_work(self) -> bool:
        """Whether `plan` may find something to do, a planned step is to be settled, or a sequence is over."""
        return bool(self._planned or self._yielding or self._constrained.failed) or (
            bool(self._running or self._waiting or self._preempted) and not self._blocked
        )

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting or self._preempted)

    def live(self, seq_id: str) -> EngineSequence | None:
        """Returns the sequence, unless it has ended."""
        sequence = self._sequences.get(seq_id)
        return None if sequence is None or sequence.state is SequenceState.ENDED else sequence

    def stats(self, *, steps: int, stalled_s: float) -> EngineStats:
        """Returns this moment's figures. O(sequences). `steps` were launched; `stalled_s` as EngineStats has it."""
        # Few: nearly all run.
        others = [sequence.state for sequence in self._sequences.values() if sequence.state is not SequenceState.RUNNING]
        decoding: list[EngineSequence] = []
        prompts: list[EngineSequence] = []
        for sequence in self._running.values():
            (decoding if sequence.decodes else prompts).append(sequence)
        bound = self._usual_step_s([sequence for sequence in decoding if sequence.priority.rank < _BATCH])
        blocks, pool = self._blocks, self._pool
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._preempted),
            num_reserved=others.count(SequenceState.RESERVED),
            num_held=others.count(SequenceState.HELD),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            steps=steps,
            num_queued_tokens=self._num_queued_tokens(prompts, RequestClass.INTERACTIVE),
            num_queued_batch_tokens=self._num_queued_tokens(prompts, RequestClass.BATCH),
            max_step_s=0.0 if self.curve is None or bound == math.inf else bound,
            num_context_tokens=sum(len(sequence.tokens) for sequence in decoding),
            num_handing_over=sum(1 for sequence in self._running.values() if sequence.hold),
            tpot_s=min((s.request.tpot_s for s in decoding if s.request.tpot_s is not None), default=0.0),
            num_preemptions=self._num_preemptions,
            num_drafted=() if self._drafting is None else tuple(self._drafting.num_drafted),
            num_accepted=() if self._drafting is None else tuple(self._drafting.num_accepted),
            tokens_per_step=self._tokens_per_step,
            drafting_failed=self._drafting is not None and self._drafting.failed,
            swapped_bytes=blocks.tier.copied_bytes,
            num_queried_tokens=blocks.num_queried_tokens,
            num_hit_tokens=blocks.num_hit_tokens,
            num_host_blocks=blocks.tier.num_blocks,
            num_host_hit_tokens=blocks.num_host_hit_tokens,
            stalled_s=stalled_s,
        )

    def _num_queued_tokens(self, prompts: Sequence[EngineSequence], least: RequestClass) -> int:
        """Returns the tokens that are here and not computed, nor found, but for those that decoding adds: of requests no
        more urgent than `least`. `prompts`: those that run and do not decode."""
        waiting = (s for s in chain(self._waiting.values(), self._preempted.values()) if s.request.request_class >= least)
        running = (s for s in prompts if s.request.request_class >= least)
        return sum(len(s.tokens) - s.num_matched for s in waiting) + sum(len(s.tokens) - s.num_computed for s in running)

    # ---- in and out -------------------------------------------------------------------------------------------------

    def submit(self, sequence: EngineSequence, now: float, *, first: bool = False) -> None:
        """Queues a new WAITING sequence. `first`: before all others of its class, and however many they are. Raises ResourceExhausted,
        InvalidRequest."""
        self._check_new(sequence)
        # An urgent prompt is not refused for batch ones that wait.
        urgent = sequence.request.request_class < RequestClass.BATCH
        num_waiting = sum(1 for s in self._waiting.values() if not urgent or s.request.request_class < RequestClass.BATCH)
        if num_waiting >= self._config.max_waiting and not first:
            raise ResourceExhausted(f"{num_waiting} prompts are waiting here already; try another worker, or later")
        self._arrive(sequence)
        self._blocks.match(sequence)
        sequence.priority.pause(now)
        if first:
            self._waiting = {sequence.seq_id: sequence} | self._waiting
        else:
            self._waiting[sequence.seq_id] = sequence
        self._blocked = False

    def reserve(self, sequence: EngineSequence, now: float) -> Reservation:
        """Takes in a new RESERVED sequence, with blocks for its tokens. Raises ResourceExhausted, InvalidRequest."""
        self._check_new(sequence)
        self._blocked = False  # some may give way
        self._blocks.reserve(sequence, *self._room_for(sequence, now))
        self._arrive(sequence)
        if sequence.promise is not None and sequence.promise.gap_s and sequence.priority.rank < _BATCH:
            self._coming_gaps[sequence.seq_id] = sequence.promise.gap_s
        block_ids = self._blocks.handed_over(sequence)
        return Reservation(seq_id=sequence.seq_id, block_ids=block_ids, num_cached_tokens=sequence.num_cached)

    def commit(self, seq_id: str, output_ids: Sequence[int], now: float, *, exact: bool, confirmed: bool) -> None:
        """Turns RESERVED to RUNNING: the KV of all given tokens is there, `output_ids` come after them. Not `exact`: nothing of the
        sequence is made findable, now or later; not `confirmed`: not before `confirm`. Raises NotFound, InvalidRequest."""
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
        self._constrained.ask(sequence, output_ids)
        self._coming_gaps.pop(seq_id, None)
        sequence.begin_pace(now)
        self._run(sequence)
        self._blocked = False

    def confirm(self, seq_id: str) -> None:
        """Notes that what was committed is what it should be. Of a sequence that has ended meanwhile it says nothing."""
        sequence = self.live(seq_id)
        if sequence is not None:
            sequence.confirmed = True
            # Else with its next step.
            if sequence.is_plannable:
                self._register(sequence)

    def end(self, sequence: EngineSequence) -> None:
        """Takes a live sequence off its queue and frees its blocks, now or after the steps it is in."""
        seq_id = sequence.seq_id
        for queue in (self._running, self._waiting, self._preempted, self._yielding):
            queue.pop(seq_id, None)
        self._kept.pop(seq_id, None)
        self._coming_gaps.pop(seq_id, None)
        sequence.gives_way = False
        self._constrained.ended(sequence)
        sequence.state = SequenceState.ENDED
        self._blocked = False
        if not sequence.num_steps:
            self._forget(sequence)

    def _check_new(self, sequence: EngineSequence) -> None:
        if sequence.seq_id in self._sequences:
            raise InvalidRequest(f"{sequence.seq_id} is here already; give every attempt of a request an id of its own")
        if sequence.least_chunk > (room := self._config.prompt_room):
            raise InvalidRequest(
                f"the model reads the prompt's {sequence.least_chunk} tokens in one step, and steps of this worker have room for {room} of "
                "one prompt; shorten it, or start the worker with a higher --max-num-batched-tokens or a lower --max-num-seqs"
            )
        num_blocks = self._blocks.num_at_most(sequence)
        if num_blocks > self._pool.num_blocks:
            raise InvalidRequest(
                f"the prompt and its answer need up to {num_blocks} KV blocks and this worker has {self._pool.num_blocks} in all; "
                "shorten the prompt, ask for fewer new tokens (max_tokens), or start the worker with more blocks"
            )

    def _arrive(self, sequence: EngineSequence) -> None:
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        self._sequences[sequence.seq_id] = sequence

    def _run(self, sequence: EngineSequence) -> None:
        sequence.state = SequenceState.RUNNING
        self._running[sequence.seq_id] = sequence

    def _forget(self, sequence: EngineSequence) -> None:
        if self._drafting is not None:
            self._drafting.forget(sequence)
        self._blocks.free(sequence)
        del self._sequences[sequence.seq_id]

    def _register(self, sequence: EngineSequence) -> None:
        self._blocks.register(sequence, self._planned[-1].exchanged if self._planned else [])

    # ---- planning ---------------------------------------------------------------------------------------------------

    def drafts_next(self, wait_s: float) -> bool:
        """Returns whether the next step will likely be worth drafts for which those that are planned must have ended (drafts.py), though
        the device waits so long. Asked once for each step."""
        drafting = self._drafting
        if drafting is None or drafting.failed:
            return False

        def decodes() -> list[EngineSequence]:
            # Of a grammar's sequence the next mask follows the last token as drafts do: it is in no step that is planned ahead.
            return [
                sequence
                for sequence in self._running.values()
                if sequence.num_pending and not sequence.hold and sequence.constraint is None and sequence.request.pooling is None
            ]

        return drafting.waits(self._planned[-1] if self._planned else None, decodes, self._foretold_bounds, wait_s)

    def drafts_wanted(self, now: float) -> tuple[list[WantedDrafts], int]:
        """Returns what is worth drafting by a model before the next step is planned (see Drafting.wanted), as far as can be told by what is
        here: sequences that decode, and prompts that will likely fill what they leave of the step."""
        drafting = self._drafting
        if drafting is None or not drafting.computes:
            return [], 0
        self._begins_at = now
        decodes = [sequence for sequence in self._running.values() if sequence.is_plannable and sequence.decodes]
        del decodes[self._max_num_seqs :]
        return drafting.wanted(decodes, self._foretold_bounds(decodes))

    def _foretold_bounds(self, decodes: Sequence[EngineSequence]) -> DraftBounds:
        """Returns what bounds the drafts of a step of these decodes, beside prompts that will likely fill what they leave of it."""
        prompts = [sequence for sequence in self._running.values() if sequence.is_plannable and not sequence.decodes]
        num_prompts, left = len(prompts), sum(sequence.num_remaining for sequence in prompts)
        # Behind one that waits for blocks the others wait, too.
        enters = self._short is None and len(self._running) < self._max_num_seqs
        for sequence in chain(self._waiting.values(), self._preempted.values()) if enters else ():
            num_prompts, left = num_prompts + 1, left + len(sequence.tokens) - sequence.num_matched
        budget = self._config.max_num_batched_tokens - len(decodes)
        return self._draft_bounds(decodes, min(left, budget), min(num_prompts, self._max_num_seqs - len(decodes)), 0.0)

    def plan(self, now: float, free_at: float) -> StepWork | None:
        """Returns the next step, or None if nothing can be computed now. What it reads and writes stays untouched until it is settled or
        failed. `now`, and `free_at`, when the step that runs is likely over and this one begins: of any one clock, in seconds."""
        assert len(self._planned) < 2
        self._planned_at, self._begins_at = now, free_at
        active, short = self._plannable(now)
        ready = self._grow(active, short)
        if len(ready) < len(active):
            active = [sequence for sequence in active if sequence.is_plannable]
        plan = self._plan(active, ready, now)
        if plan.short is not None and plan.short.rank < _BATCH and self._preempt_for(plan, plan.short, now):
            # No sequence that gives way is in this step; what came free at once is for it.
            active, ready = ([sequence for sequence in some if sequence.is_plannable] for some in (active, ready))
            plan = self._plan(active, ready, now)
        if self._kept and not plan.decodes and not plan.prompts:
            # A device with nothing else to do keeps nothing for others.
            self._kept.clear()
            plan = self._plan(active, ready, now)
        self._num_waited = self._num_waited + 1 if plan.withheld else 0
        self._short = None if plan.short is None else plan.short.item
        work = self._work_of(plan, active, now)
        self._blocked = work is None
        if work is not None:
            self._planned.append(work)
            ends_at = free_at if self.curve is None else free_at + self.curve.step_s(work.workload)
            for sequence in work.sequences[work.num_decodes :]:
                if sequence.decodes:
                    sequence.begin_pace(ends_at)
        return work

    def _plannable(self, now: float) -> tuple[list[EngineSequence], list[tuple[EngineSequence, int]]]:
        """Returns the running sequences that may be in the next step, in order; and those of them whose tokens need more blocks, each with
        how many of each group of layers."""
        unready = self._constrained.unready
        active, short, num_spare = list[EngineSequence](), list[tuple[EngineSequence, int]](), None
        # Fields, not properties, in loops over all sequences: a call would cost as much as the rest of a turn.
        for sequence in self._running.values():
            if sequence.gives_way or sequence.loading or (unready and sequence in unready):
                continue
            num_tokens = len(sequence.tokens) + sequence.num_pending
            # The token in flight is the last one here, whatever it is.
            if sequence.num_pending and (sequence.hold or num_tokens >= sequence.max_len):
                continue
            if sequence.num_pending > 1:
                if not may_go_on(sequence):
                    continue
                if num_tokens > sequence.num_slots:
                    # It has room for what is sampled if no draft is accepted: for drafts nobody gives way.
                    num_spare = self._num_spare(now) if num_spare is None else num_spare
                    num_blocks = -(-(num_tokens - sequence.num_slots) // self._blocks.block_size)
                    if num_blocks > num_spare:
                        continue
                    self._blocks.extend(sequence, num_blocks)
                    num_spare -= num_blocks
            active.append(sequence)
            if num_tokens > sequence.num_slots:
                short.append((sequence, -(-(num_tokens - sequence.num_slots) // self._blocks.block_size)))
        return active, short

    def _plan(
        self, active: Sequence[EngineSequence], ready: Sequence[EngineSequence], now: float, *, unlimited: bool = False
    ) -> StepPlan[EngineSequence]:
        """Changes nothing but what BlockManager.match notes. `unlimited`: as if there were blocks enough, for urgent prompts alone."""
        decodes, batch_decodes, prompts = self._split(ready)
        limit, num_context = None, 0
        if self.curve is not None and (prompts or batch_decodes or self.has_waiting) and (decodes or self._coming_gaps):
            num_context = sum(len(sequence.tokens) + sequence.num_pending for sequence in decodes)
            limit = self._time_limit(self.curve, decodes, num_context)
        below = self._open_below(active, ready)
        capacity = batch_capacity = Capacity(0, 0)
        if below > RequestClass.INTERACTIVE:
            capacity = self._room(_BATCH, now)
            if unlimited:
                capacity = Capacity(capacity.seats, self._pool.num_blocks)
            else:
                batch_capacity = self._room(_ANY_RANK, now)
        return plan_step(
            decodes=decodes,
            batch_decodes=batch_decodes,
            prompts=prompts,
            waiting=self._candidates(now, below=below) if capacity.seats > 0 else (),
            budget=self._config.max_num_batched_tokens,
            max_seqs=self._max_num_seqs,
            capacity=capacity,
            batch_capacity=batch_capacity,
            num_context=num_context,
            time_limit=limit,
        )

    def _time_limit(
        self, curve: StepCurve, decodes: Sequence[EngineSequence], num_context: int, *, drafts: bool = False
    ) -> StepTimeLimit | None:
        """Returns how long a step may take that does more than these urgent decodes, which read so many tokens; None: any time. `drafts`:
        what it does more is drafts."""
        work = StepWorkload(decodes=len(decodes), context=num_context)
        return time_limit_of(
            [sequence.promise for sequence in decodes],
            # Of drafts in flight, perhaps none is accepted.
            [len(sequence.tokens) + (sequence.num_pending > 0) for sequence in decodes],
            begin_s=self._begins_at,
            curve=curve,
            decodes=work,
            decode_step_s=curve.step_s(work),
            min_chunk=self._config.min_chunk_tokens,
            num_waited=self._num_waited,
            max_step_s=self._config.max_step_s,
            coming_gap_s=min(self._coming_gaps.values(), default=math.inf),
            drafts=drafts,
        )

    @property
    def _tokens_per_step(self) -> float:
        return 1.0 if self._drafting is None else self._drafting.gain.tokens_per_step

    def _split(
        self, ready: Sequence[EngineSequence]
    ) -> tuple[list[EngineSequence], list[BatchDecode[EngineSequence]], list[RunningPrompt[EngineSequence]]]:
        """Returns urgent decodes, batch decodes, prompts by rank; each in the order of admission."""
        decodes: list[EngineSequence] = []
        batch_decodes: list[BatchDecode[EngineSequence]] = []
        prompts: list[RunningPrompt[EngineSequence]] = []
        for sequence in ready:
            num_tokens = len(sequence.tokens) + sequence.num_pending
            if num_tokens - sequence.num_planned != 1 or num_tokens <= len(sequence.given):
                num_remaining = self._blocks.num_to_stop(sequence, sequence.num_planned, sequence.num_remaining)
                prompts.append(RunningPrompt(sequence, num_remaining, sequence.num_planned, sequence.priority.rank, sequence.least_chunk))
            elif sequence.priority.rank < _BATCH:
                decodes.append(sequence)
            else:
                batch_decodes.append(BatchDecode(sequence, len(sequence.tokens)))
        prompts.sort(key=lambda prompt: prompt.rank)
        if len(decodes) > self._max_num_seqs:  # some have risen
            decodes.sort(key=_entitlement)
        return decodes, batch_decodes, prompts

    def _usual_step_s(self, decodes: Sequence[EngineSequence]) -> float:
        """Returns how long a step with prompts may take beside these urgent decodes, on the whole."""
        tokens_per_step = self._tokens_per_step
        bounds = [
            (self._config.max_step_s or math.inf)
            if s.promise is None
            else promised_step_s(s.promise.tpot_s * (tokens_per_step if s.request.sampling.speculate else 1.0), s.promise.gap_s)
            for s in decodes
        ]
        bound = min([*bounds, *(FIRST_GAP_SHARE * gap_s for gap_s in self._coming_gaps.values())], default=math.inf)
        # A step that takes so long anyway may as well compute what fits: smaller chunks would only make more such steps.
        return bound if self.curve is None else max(bound, self.curve.mixed_s)

    def _candidates(self, now: float, *, below: int) -> Iterator[WaitingPrompt[EngineSequence]]:
        """Yields those of ranks below `below`, by rank; of one rank, preempted sequences, then waiting prompts, in the order they came;
        with what is cached of them now. Lazy: a class waits in the order it came, so its first one has the lowest rank."""

        def place(sequence: EngineSequence) -> tuple[int, bool, int]:
            return sequence.priority.rank, sequence.state is SequenceState.WAITING, sequence.arrival

        def queue(request_class: RequestClass) -> Iterator[EngineSequence]:
            for sequence in self._waiting.values():
                if sequence.request.request_class is request_class:
                    sequence.priority.wait(now, self._config.ageing_s)
                    yield sequence

        # A sequence without its mask yet could not sample; it is a moment.
        preempted = [s for s in self._preempted.values() if s.constraint is None or s.constraint.next is not None]
        for sequence in preempted:
            sequence.priority.wait(now, self._config.ageing_s)
        for sequence in merge(sorted(preempted, key=place), *map(queue, RequestClass), key=place):
            if sequence.priority.rank >= below:
                return
            cost = self._blocks.match(sequence)
            num_matched = sequence.num_matched
            num_uncached = self._blocks.num_to_stop(sequence, num_matched, len(sequence.tokens) - num_matched)
            yield WaitingPrompt(sequence, num_uncached, cost, num_matched, sequence.priority.rank, sequence.least_chunk)

    def _work_of(self, plan: StepPlan[EngineSequence], active: Sequence[EngineSequence], now: float) -> StepWork | None:
        """Carries a plan out: admits, notes what is passed over, and counts what is planned of each sequence."""
        has_state = bool(self._blocks.num_state_blocks)
        finds_state = has_state and any(candidate.num_before for candidate in plan.admitted)
        spare = self._num_spare(now, plan.admitted) if finds_state else 0
        candidates = [candidate.item for candidate in plan.admitted]
        admitted = self._blocks.admit(candidates, spare)
        for sequence in admitted:
            sequence.priority.serve(now)
            del (self._preempted if sequence.state is SequenceState.PREEMPTED else self._waiting)[sequence.seq_id]
            self._run(sequence)
        self._pass_over(plan, active, now)
        # Those admitted whose blocks are on their way from the host tier come with a step after that.
        prompts = [chunk for chunk in plan.prompts if not chunk.item.loading]
        if len(admitted) < len(candidates):
            prompts = [chunk for chunk in prompts if chunk.item.state is SequenceState.RUNNING]
        sequences = [*plan.decodes, *(chunk.item for chunk in prompts)]
        if not sequences:
            return None
        left = self._leave_states(sequences, now) if has_state else []
        drafts = () if self._drafting is None else self._draft(self._drafting, plan.decodes, prompts, now)
        work = plan_chunks(
            sequences,
            [chunk.num_tokens for chunk in prompts],
            left_states=left,
            drafts=drafts,
            expected=None if self._drafting is None else self._drafting.expected,
            reads_once=self._reads_once,
        )
        self._constrained.planned(work)
        return work

    def _leave_states(self, sequences: Sequence[EngineSequence], now: float) -> list[LeftState]:
        """Lets those that have come to where it is worth it leave their states to their prefixes, as far as nobody wants the room."""
        leaving = [sequence for sequence in sequences if self._blocks.may_leave_state(sequence)]
        num_fitting = max(0, self._num_spare(now) // self._blocks.num_state_blocks) if leaving else 0
        return [self._blocks.leave_state(sequence) for sequence in leaving[:num_fitting]]

    def _num_spare(self, now: float, admitted: Sequence[WaitingPrompt[EngineSequence]] = ()) -> int:
        """Returns the blocks that can be away for a step, or two, so that nobody here waits for them or gives way meanwhile, beside those
        that the `admitted` are about to get."""
        coming = {candidate.item for candidate in admitted}
        waiting = (sequence for sequence in chain(self._preempted.values(), self._waiting.values()) if sequence not in coming)
        num_taken = sum(candidate.num_blocks for candidate in admitted) + max(map(self._blocks.num_to_admit, waiting), default=0)
        return self._room(_ANY_RANK, now).blocks - num_taken

    def _draft(
        self, drafting: Drafting, decodes: Sequence[EngineSequence], prompts: Sequence[Chunk[EngineSequence]], now: float
    ) -> Sequence[Sequence[int]]:
        """Returns the tokens drafted after each of a step's decodes; empty: after none. Their KV takes blocks that nobody waits for."""

        def bounds() -> DraftBounds:
            pairs = sum(chunk_pairs(chunk.num_tokens, chunk.item.num_planned) for chunk in prompts)
            return self._draft_bounds(decodes, sum(chunk.num_tokens for chunk in prompts), len(prompts), pairs)

        drafts = drafting.draft(decodes, bounds)
        num_spare = None
        for i, sequence in enumerate(decodes):
            num_tokens = len(sequence.tokens) + sequence.num_pending
            room = sequence.num_slots - num_tokens
            if len(drafts[i]) > room:
                num_blocks = -(-(len(drafts[i]) - room) // self._blocks.block_size)
                num_spare = self._num_spare(now) if num_spare is None else num_spare
                if num_blocks * self._blocks.num_groups <= num_spare:
                    self._blocks.extend(sequence, num_blocks)
                    num_spare -= num_blocks * self._blocks.num_groups
                drafts[i] = drafts[i][: sequence.num_slots - num_tokens]
        drafting.planned(drafts)
        return drafts if any(drafts) else ()

    def _draft_bounds(self, decodes: Sequence[EngineSequence], num_prompt_tokens: int, num_prompts: int, pairs: float) -> DraftBounds:
        """Returns what bounds the drafts of a step of these decodes, beside so much of prompts."""
        # A row of a draft takes a place in the step as a sequence does: runners have room for so many.
        most = min(self._config.max_num_batched_tokens - num_prompt_tokens, self._max_num_seqs - num_prompts) - len(decodes)
        if self.curve is None or not decodes:
            return DraftBounds(most=most, step_s=None, bound_s=math.inf)
        context = sum(len(sequence.tokens) for sequence in decodes)
        work = StepWorkload(prompt_tokens=num_prompt_tokens, pairs=pairs, decodes=len(decodes), context=context)
        urgent = [sequence for sequence in decodes if sequence.priority.rank < _BATCH]
        limit = self._time_limit(self.curve, urgent, sum(len(sequence.tokens) for sequence in urgent), drafts=True)
        bound_s = math.inf if limit is None else limit.max_step_s
        return DraftBounds(most=most, step_s=cache(partial(_with_drafts_s, self.curve, work, self._reads_once)), bound_s=bound_s)

    def _pass_over(self, plan: StepPlan[EngineSequence], active: Sequence[EngineSequence], now: float) -> None:
        """Notes that those that could have gone on and were left out wait, and the others do not."""
        if not self._passed_over and len(plan.decodes) + len(plan.prompts) - len(plan.admitted) == len(active):
            return
        planned = {*plan.decodes, *(chunk.item for chunk in plan.prompts)}
        for sequence in self._passed_over:
            if sequence in planned:
                sequence.priority.serve(now)
        self._passed_over = [sequence for sequence in active if sequence not in planned]
        for sequence in self._passed_over:
            sequence.priority.wait(now, self._config.ageing_s)

    # ---- room for newcomers -----------------------------------------------------------------------------------------

    def _room_for(self, sequence: EngineSequence, now: float) -> tuple[int, list[list[int]]]:
        """Returns what was found in the pool of a reservation's blocks (BlockManager.find_reserved), while the others that it needs are
        free. Raises ResourceExhausted; with `retry_after_s` if batch sequences give way meanwhile, and their blocks are kept for it for a
        moment."""
        rank = sequence.priority.rank
        below = _BATCH if rank < _BATCH else _ANY_RANK
        if self._room(below, now).seats <= 0:
            raise ResourceExhausted(f"all {self._max_num_seqs} seats are taken; try another worker, or later")
        if any(s.priority.rank <= rank for s in self._preempted.values()):
            raise ResourceExhausted(f"{len(self._preempted)} sequences wait here for room to go on; try another worker, or later")
        short = self._short
        if short is not None and short.state is SequenceState.WAITING and short.priority.rank <= rank:
            # Else small reservations would take one by one what comes free for it.
            raise ResourceExhausted("a prompt waits here for KV blocks; try another worker, or later")
        for may_preempt in (below == _BATCH, False):
            num_columns, found = self._blocks.find_reserved(sequence)
            cached = list(chain.from_iterable(found))
            room = self._room(below, now).blocks - self._pool.num_unowned(cached)
            needed = self._blocks.num_to_admit(sequence) - len(cached)
            missing = needed - room
            if missing <= 0:
                self._kept.pop(sequence.seq_id, None)
                return num_columns, found
            coming = self._num_coming
            if not may_preempt or not self._preempt_batch(missing - coming, missing - coming):
                break
        message = f"{needed} KV blocks are needed and {max(0, room)} are free"
        if below == _BATCH and missing <= self._num_coming:
            self._kept[sequence.seq_id] = missing + room, now + _KEPT_S
            raise ResourceExhausted(f"{message}; batch sequences give way, so try again after a step", retry_after_s=_RETRY_S)
        raise ResourceExhausted(f"{message}; try another worker, or later")

    def _open_below(self, active: Sequence[EngineSequence], ready: Sequence[EngineSequence]) -> int:
        """Returns the rank below which any may be admitted: what comes free is for those that run already, and for newcomers more urgent
        than they."""
        if not self._waiting and not self._preempted:
            return 0
        if len(ready) == len(active):
            return _ANY_RANK
        return min(sequence.priority.rank for sequence in {*active}.difference(ready))

    def _room(self, below: int, now: float) -> Capacity:
        """Returns what is left for newcomers of ranks below this: the seats that those of such ranks do not take which run or are to come,
        and the blocks beside what these will need. For the batch class, beside what is kept for others too."""
        seats, num_growing, num_wanted = self._max_num_seqs, 0, 0
        for sequence in self._sequences.values():
            if sequence.priority.rank < below and (sequence.state is SequenceState.RUNNING or sequence.state is SequenceState.RESERVED):
                more = self._blocks.num_to_grow(sequence)
                seats -= 1
                num_growing += (more > 0) * self._blocks.num_groups
                num_wanted += more
        left = watermark(num_blocks=self._pool.num_blocks, num_growing=num_growing, num_wanted=num_wanted)
        return Capacity(seats, self._pool.num_available - left - (self._num_kept(now) if below == _ANY_RANK else 0))

    def _num_kept(self, now: float) -> int:
        self._kept = {seq_id: kept for seq_id, kept in self._kept.items() if kept[1] > now}
        return sum(num_blocks for num_blocks, _ in self._kept.values())

    # ---- preemption -------------------------------------------------------------------------------------------------

    def _grow(self, sequences: Sequence[EngineSequence], short: Sequence[tuple[EngineSequence, int]]) -> Sequence[EngineSequence]:
        """Returns those of the running sequences, in the same order, that own blocks for all their tokens, the one in flight included: they
        can be planned. The others give way, or wait for the blocks of those that do. `short`: those of them that need more blocks, and how
        many of each group of layers."""
        if not short:
            return sequences
        num_groups = self._blocks.num_groups
        if sum(count for _, count in short) * num_groups <= self._pool.num_available:
            for sequence, count in short:
                self._blocks.extend(sequence, count)
            return sequences
        stalled: set[str] = set()
        coming = self._num_coming
        for sequence, count in sorted(short, key=lambda pair: _entitlement(pair[0])):
            if not sequence.is_plannable:
                continue
            need = count * num_groups
            while not stalled and self._pool.num_available + coming < need and (victim := self._last_after(sequence)) is not None:
                coming += self._give_way(victim)
            # Who comes after one that waits takes no block that is for that one.
            if stalled or self._pool.num_available < need:
                stalled.add(sequence.seq_id)
            else:
                self._blocks.extend(sequence, count)
        return [sequence for sequence in sequences if sequence.is_plannable and sequence.seq_id not in stalled]

    def _last_after(self, sequence: EngineSequence) -> EngineSequence | None:
        """Returns which one gives way to `sequence` next: among those after it the least urgent, and of these the last to have arrived, if
        possible one that frees blocks. Prompts held for a hand-over are being read by others and never give way."""
        later = [s for s in self._running.values() if _entitlement(s) > _entitlement(sequence) and not s.hold and s.is_plannable]
        later.sort(key=_entitlement, reverse=True)
        return next((s for s in later if self._blocks.num_exclusive(s)), later[0] if later else None)

    def _preempt_for(self, plan: StepPlan[EngineSequence], short: WaitingPrompt[EngineSequence], now: float) -> bool:
        """Makes batch sequences give way for the urgent prompt that is short of blocks, and for as many after it as would be in this step.
        False: none did."""
        free = self._room(_BATCH, now).blocks + self._num_coming
        least = sum(candidate.num_blocks for candidate in plan.admitted) + short.num_blocks
        active = [sequence for sequence in self._running.values() if sequence.is_plannable]
        wanted = sum(candidate.num_blocks for candidate in self._plan(active, active, now, unlimited=True).admitted)
        return self._preempt_batch(least - free, max(least, wanted) - free)

    def _preempt_batch(self, least: int, wanted: int) -> bool:
        """Makes the batch sequences that arrived last give way until `wanted` blocks come free, now or later; none, and False, if all of
        them together do not free `least`, or nothing is wanted."""
        batch = [s for s in self._running.values() if s.priority.rank >= _BATCH and not s.hold and s.is_plannable]
        victims, num_freed = self._blocks.first_to_free(sorted(batch, key=_entitlement, reverse=True), wanted)
        if num_freed < least:
            return False
        for sequence in victims:
            self._give_way(sequence)
        return bool(victims)

    def _give_way(self, sequence: EngineSequence) -> int:
        """Preempts it now, or when the steps it is in are settled. Returns how many blocks come free later than now."""
        if not sequence.num_steps:
            self._preempt(sequence)
            return 0
        sequence.gives_way = True
        self._yielding[sequence.seq_id] = sequence
        return self._blocks.num_exclusive(sequence)

    def _preempt(self, sequence: EngineSequence) -> None:
        """Takes a running sequence that is in no step out of the batch, and puts it among those that wait to go on, with no blocks."""
        assert not sequence.num_steps
        assert not sequence.num_pending
        del self._running[sequence.seq_id]
        self._yielding.pop(sequence.seq_id, None)
        sequence.gives_way = False
        sequence.state = SequenceState.PREEMPTED
        self._num_preemptions += 1
        self._blocks.free(sequence)
        sequence.priority.pause(self._planned_at)
        self._preempted[sequence.seq_id] = sequence
        self._preempted = dict(sorted(self._preempted.items(), key=lambda item: item[1].arrival))

    @property
    def _num_coming(self) -> int:
        """Blocks that are about to be given back."""
        return sum(self._blocks.num_exclusive(sequence) for sequence in self._yielding.values())

    # ---- what others have done --------------------------------------------------------------------------------------

    def loaded(self, load: HostLoad, *, ok: bool) -> None:
        """Notes that what the host tier was asked for is in the sequence's blocks. Not `ok`: it is not, and is computed."""
        self._blocks.loaded(load, ok=ok)
        self._blocked = False
        if load.sequence.state is SequenceState.ENDED:
            self._forget(load.sequence)
        elif load.sequence.state is SequenceState.RUNNING:
            self._register(load.sequence)

    def take_masks(self, sequences: Sequence[EngineSequence], results: Sequence[NextMask]) -> None:
        """Takes the masks of constrained sequences, or why there are none."""
        self._blocked = False
        self._constrained.take_masks(sequences, results, self.end)

    # ---- settling ---------------------------------------------------------------------------------------------------

    def settle(self, work: StepWork, sampled: Sampled) -> StepResult:
        """Ends the step planned first, which ran: counts what was computed, makes full blocks findable, appends tokens, frees what
        ended."""
        for left in work.left_states:
            self._blocks.keep_state(left)
        self._take_off(work)
        tokens = StepTokens()
        progress: list[PrefillProgress] = []
        failures: list[SequenceFailure] = []
        scores: list[PromptScores] = []
        pooled: list[PooledPrompt] = []
        exchanged = self._planned[-1].exchanged if self._planned else []
        asked = [(row, value) for row, value in enumerate(sampled.logprobs) if value is not None]
        extras = {row: TokenExtras(logprob=value, top_logprobs=sampled.top_logprobs[row]) for row, value in asked}
        block_size, reach = self._blocks.block_size, self._blocks.reach
        row, scored_end, pooled_row, ended = 0, 0, -1, SequenceState.ENDED
        # Of each token of each step: what it costs here, it costs some ten thousand times a second.
        for sequence, start, count, num_rows, num_scored, num_pooled, drafted in zip(
            work.sequences,
            work.starts,
            work.num_tokens,
            work.sampled,
            work.scored,
            work.pooled,
            chain(work.drafts, repeat(())),
            strict=False,
        ):
            first_row = row
            row += num_rows
            scored_end += num_scored
            pooled_row += num_pooled > 0
            sequence.num_steps -= 1
            sequence.num_pending -= num_rows
            if sequence.state is ended:
                if not sequence.num_steps:
                    self._forget(sequence)
                continue
            if num_rows > 1:
                count = self._take_drafts(sequence, drafted, sampled.token_ids[first_row:row], first_row, extras, tokens)
                first_row += count - 1
            if num_rows and sampled.token_ids[first_row] < 0:
                failures.append(self._fail_row(sequence, no_token_message(sequence.position)))
                continue
            sequence.num_computed += count
            if num_scored and sampled.scores is not None:
                scores += self._score(sequence, start, sampled.scores[scored_end - num_scored : scored_end])
            if sequence.num_computed >= (sequence.num_registered + 1) * block_size:
                self._blocks.register(sequence, exchanged)
            if reach and sequence.num_computed + 1 - reach >= (sequence.num_left + 1) * block_size:
                self._blocks.leave(sequence)
            # After a preemption, what was reported before is not reported again.
            if sequence.num_reported < len(sequence.given) and sequence.num_reported < sequence.num_computed:
                progress.append(self._progress(sequence))
            if num_rows:
                self._append(sequence, sampled.token_ids[first_row], extras.get(first_row) if extras else None, tokens)
            elif num_pooled and sampled.pooled is not None:
                match self._pool_rows(sequence, sampled.pooled[pooled_row]):
                    case PooledPrompt() as prompt:
                        pooled.append(prompt)
                    case SequenceFailure() as failure:
                        failures.append(failure)
            if sequence.gives_way and not sequence.num_steps:
                self._preempt(sequence)
        if self._drafting is not None and work.num_decodes:
            self._drafting.settled(work, self.curve)
        self._constrained.settled(work)
        return StepResult(tokens=tokens, progress=progress, failures=failures, scores=scores, pooled=pooled)

    def _take_drafts(
        self,
        sequence: EngineSequence,
        drafted: Sequence[int],
        token_ids: Sequence[int],
        first_row: int,
        extras: Mapping[int, TokenExtras],
        output: StepTokens,
    ) -> int:
        """Appends the drafts that are what was sampled, in rows from `first_row` on. Returns how many tokens of the sequence the step has
        computed: after the last of these comes another one."""
        count = num_sampled(sequence, drafted, token_ids)
        for i in range(count - 1):
            self._append(sequence, token_ids[i], extras.get(first_row + i), output)
        # The others' KV is written over by what comes instead.
        sequence.num_planned -= len(token_ids) - count
        if self._planned:
            self._planned[0].accept(sequence, count - 1)
        if self._drafting is not None:
            self._drafting.count(len(drafted), count - 1)
        return count

    def _progress(self, sequence: EngineSequence) -> PrefillProgress:
        """Returns what is new of its given tokens."""
        first_scheduled = not sequence.num_reported
        sequence.num_reported = min(sequence.num_computed, len(sequence.given))
        return PrefillProgress(
            seq_id=sequence.seq_id,
            num_computed_tokens=sequence.num_reported,
            num_cached_tokens=sequence.num_cached,
            first_scheduled=first_scheduled,
        )

    def _score(self, sequence: EngineSequence, start: int, values: npt.NDArray[np.float64]) -> list[PromptScores]:
        """Returns what is new of the log probabilities of the tokens after `start`, with as many of the likeliest as were asked for: after
        a preemption, some come again."""
        new = values[max(0, sequence.num_scored - start) :]
        if not len(new):
            return []
        first = start + 1 + len(values) - len(new)
        sequence.num_scored += len(new)
        num_top, asked = values.shape[1] // 2 - 1, sequence.request.sampling.prompt_logprobs or 0
        asked = min(asked, num_top)
        columns = (new[:, : 2 + asked], new[:, 2 + num_top : 2 + num_top + asked])
        return [PromptScores(seq_id=sequence.seq_id, first=first, values=np.concatenate(columns, axis=1))]

    def _pool_rows(self, sequence: EngineSequence, states: npt.NDArray[np.float32]) -> PooledPrompt | SequenceFailure | None:
        """Adds what a step has of a sequence's states; what all of them come to ends it."""
        total = states.astype(np.float64) if sequence.pooled is None else sequence.pooled + states
        num_tokens = len(sequence.tokens)
        if sequence.num_computed < num_tokens:
            sequence.pooled = total
            return None
        vector = (total / num_tokens if sequence.request.pooling is Pooling.MEAN else total).astype(np.float32)
        if not np.isfinite(vector).all():
            return self._fail_row(sequence, _NOT_FINITE)
        self.end(sequence)
        return PooledPrompt(seq_id=sequence.seq_id, vector=vector)

    def fail(self, work: StepWork, message: str) -> StepResult:
        """Ends the step planned first, which did not run to its end: all its sequences are over."""
        self._take_off(work)
        failures = []
        for sequence in work.sequences:
            sequence.num_steps -= 1
            if sequence.state is not SequenceState.ENDED:
                failures.append(SequenceFailure(seq_id=sequence.seq_id, message=message))
                self.end(sequence)
            elif not sequence.num_steps:
                self._forget(sequence)
        return StepResult(failures=failures)

    def _take_off(self, work: StepWork) -> None:
        assert self._planned[0] is work
        self._planned.popleft()
        self._pool.free(work.exchanged)
        self._blocked = False

    def _fail_row(self, sequence: EngineSequence, message: str) -> SequenceFailure:
        """Ends a sequence whose row has no token, or no vector. Its KV is likely not finite either: it is kept from others."""
        self._blocks.withdraw(sequence)
        self.end(sequence)
        return SequenceFailure(seq_id=sequence.seq_id, message=message, kind=FailureKind.NO_TOKEN)

    def _append(self, sequence: EngineSequence, token_id: int, extras: TokenExtras | None, output: StepTokens) -> None:
        """Adds a sampled token to its sequence, which goes on, is held, or has ended, and to what the step tells."""
        request, tokens = sequence.request, sequence.tokens
        position = len(tokens) - request.num_prompt_tokens
        tokens.append(token_id)
        if token_id in sequence.stop_ids or len(tokens) >= sequence.max_len:
            reason = sequence.finish_reason(token_id, position)
            if reason is not None:
                extras = (extras or TokenExtras())._replace(finish_reason=reason)
                if not sequence.hold:
                    self.end(sequence)
        if sequence.hold:
            del self._running[sequence.seq_id]
            sequence.state = SequenceState.HELD
        if extras is not None:
            output.extras[len(output.seq_ids)] = extras
        output.seq_ids.append(request.seq_id)
        output.token_ids.append(token_id)
        output.positions.append(position)

    # ---- proof ------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises InternalError if pool, queues and counts disagree."""
        sequences = self._sequences.values()
        self._pool.check_integrity([*(self._blocks.owned(sequence) for sequence in sequences), *(work.exchanged for work in self._planned)])
        self._blocks.tier.check_integrity([sequence for sequence in sequences if sequence.loading])
        for sequence in sequences:
            num_uses = sum(sequence in work.sequences for work in self._planned) + sequence.loading
            if sequence.num_steps != num_uses:
                raise InternalError(f"{sequence.seq_id} counts {sequence.num_steps} uses and has {num_uses}")
            if sequence.state is SequenceState.ENDED and not num_uses:
                raise InternalError(f"{sequence.seq_id} has ended, is in no step and still owns blocks")
        counted = Counter(sequence.state for sequence in sequences)
        listed = {
            SequenceState.WAITING: len(self._waiting),
            SequenceState.RUNNING: len(self._running),
            SequenceState.PREEMPTED: len(self._preempted),
        }
        for state, count in listed.items():
            if counted[state] != count:
                raise InternalError(f"{counted[state]} sequences are {state.value} and {count} are listed so")
