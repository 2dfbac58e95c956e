"""Plans steps from the ledger's lists: who decodes, whose prompt goes on, who is admitted, and which batch sequences give way for that.

    running ──grow──▶ decodes │ batch decodes │ prompts ──┐
    preempted, waiting ──candidates, by rank──────────────┴─ plan_step ──▶ plan ──admit──▶ blocks of those admitted
                             ▲                                  │ an urgent prompt is short of blocks
                             └────── batch sequences give way ◀─┘

Batch work gives way in three ways, from the cheapest on:

    it is passed over   its decodes and chunks are left out of a step that others fill; its KV stays where it is
    its seats           those passed over take none from others
    its blocks          the batch sequences that came last are preempted (preemptor.py) when an urgent prompt or reservation lacks blocks

What urgent newcomers need beside the running ones is reckoned without the batch sequences' future needs: those can give way again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twostep.engine.admission import Admission, grows, num_blocks_in_the_end, num_blocks_now
from twostep.engine.block_pool import BlockPool
from twostep.engine.config import EngineConfig
from twostep.engine.constrained import ConstrainedSequences
from twostep.engine.preemption import watermark
from twostep.engine.preemptor import Preemptor
from twostep.engine.scheduler import Filler, Pace, Room, Running, StepPlan, Waiting, plan_step
from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.step_work import StepWork, plan_chunks
from twostep.errors import ResourceExhausted
from twostep.request_class import RequestClass
from twostep.step_curve import StepCurve

# Of the tightest TPOT of those that decode: the rest is the host's, and the steps that last longer than foretold.
_TPOT_SHARE = 0.9
# How long blocks that batch sequences gave up for a reservation are kept from other batch sequences.
_CLAIM_S = 1.0
# When a reservation for which they give way is worth trying again.
_RETRY_S = 0.02
_BATCH = int(RequestClass.BATCH)
_ANY_RANK = RequestClass.BATCH + 1


@dataclass(frozen=True, slots=True)
class _Claim:
    """Blocks that somebody comes back for."""

    num_blocks: int
    until: float


class StepPlanner:
    """Part of the ledger: the engine's lock guards it."""

    def __init__(
        self,
        pool: BlockPool,
        preemptor: Preemptor,
        admission: Admission,
        constrained: ConstrainedSequences,
        sequences: dict[str, EngineSequence],
        running: dict[str, EngineSequence],
        *,
        config: EngineConfig,
        block_size: int,
    ) -> None:
        """`sequences` and `running` are the ledger's own tables."""
        # How long steps take; None: not known.
        self.curve: StepCurve | None = None
        self._pool = pool
        self._preemptor = preemptor
        self._admission = admission
        self._constrained = constrained
        self._sequences = sequences
        self._running = running
        self._block_size = block_size
        self.reconfigure(config)
        # By sequence that is not here yet, or waits.
        self._claims: dict[str, _Claim] = {}
        # Running ones left out of the step planned last, that could have gone on.
        self._passed_over: list[EngineSequence] = []
        # The prompt that waits for blocks, as of the last plan.
        self._short: EngineSequence | None = None

    def reconfigure(self, config: EngineConfig) -> None:
        self._config = config
        self._max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepWork | None:
        """The next step, or None if nothing can be computed now. `now`: of any one clock, in seconds."""
        self._preemptor.now = now
        active = [
            sequence
            for sequence in self._running.values()
            if not sequence.gives_way and not sequence.loading and not (sequence.num_pending and sequence.ends_in_flight)
        ]
        if unready := self._constrained.unready:
            active = [sequence for sequence in active if sequence not in unready]
        ready = self._preemptor.grow(active)
        if len(ready) < len(active):
            active = [sequence for sequence in active if sequence.is_plannable]
        plan = self._plan(active, ready, now)
        if plan.short is not None and self._make_room(plan, plan.short, now):
            # Nobody that gives way is in this step; what came free at once is for it.
            active, ready = ([sequence for sequence in some if sequence.is_plannable] for some in (active, ready))
            plan = self._plan(active, ready, now)
        if self._claims and not plan.decodes and not plan.prompts:
            # A device with nothing else to do waits for nobody.
            self._claims.clear()
            plan = self._plan(active, ready, now)
        self._short = None if plan.short is None else plan.short.item
        for candidate in plan.admitted:
            self._claims.pop(candidate.item.seq_id, None)
            candidate.item.patience.serve(now)
        copies, loads = self._admission.admit([candidate.item for candidate in plan.admitted])
        self._pass_over(plan, active, now)
        # Those admitted whose blocks are on their way from the host tier come with a step after that.
        prompts = [chunk for chunk in plan.prompts if not chunk.item.loading]
        sequences = [*plan.decodes, *(chunk.item for chunk in prompts)]
        work = plan_chunks(sequences, [chunk.num_tokens for chunk in prompts], copies, loads) if sequences else None
        if work is not None and self._constrained.count:
            self._constrained.take_masks(work)
        return work

    def _plan(
        self, active: Sequence[EngineSequence], ready: Sequence[EngineSequence], now: float, *, unlimited: bool = False
    ) -> StepPlan[EngineSequence]:
        """Changes nothing but what Admission.candidates notes. `unlimited`: as if there were blocks enough, for urgent prompts alone."""
        decodes, fillers, prompts = self._split(ready)
        pace = self._pace(decodes)
        below = self._open_below(active, ready)
        room = gap_room = Room(0, 0)
        if below > RequestClass.INTERACTIVE:
            room = Room(
                self._num_seats(RequestClass.BATCH), self._pool.num_blocks if unlimited else self._num_free(RequestClass.BATCH, now)
            )
            gap_room = Room(0, 0) if unlimited else Room(self._num_seats(_ANY_RANK), self._num_free(_ANY_RANK, now))
        return plan_step(
            decodes=decodes,
            fillers=fillers,
            prompts=prompts,
            waiting=self._admission.candidates(now, self._config.ageing_s, below=below) if room.seats > 0 else (),
            budget=self._config.max_num_batched_tokens,
            max_seqs=self._max_num_seqs,
            room=room,
            gap_room=gap_room,
            num_context=0 if pace is None else sum(len(sequence.tokens) for sequence in decodes),
            pace=pace,
        )

    def _split(
        self, ready: Sequence[EngineSequence]
    ) -> tuple[list[EngineSequence], list[Filler[EngineSequence]], list[Running[EngineSequence]]]:
        """Urgent decodes, batch decodes, prompts by rank; each in the order of admission."""
        decodes: list[EngineSequence] = []
        fillers: list[Filler[EngineSequence]] = []
        prompts: list[Running[EngineSequence]] = []
        for sequence in ready:
            # EngineSequence.decodes, without 256 calls of it a step.
            num_tokens = len(sequence.tokens) + sequence.num_pending
            if num_tokens - sequence.num_planned != 1 or num_tokens <= len(sequence.given):
                prompts.append(Running(sequence, sequence.num_remaining, sequence.num_planned, sequence.patience.rank))
            elif sequence.patience.rank < _BATCH:
                decodes.append(sequence)
            else:
                fillers.append(Filler(sequence, len(sequence.tokens)))
        prompts.sort(key=lambda prompt: prompt.rank)
        if len(decodes) > self._max_num_seqs:  # some have risen
            decodes.sort(key=lambda sequence: (sequence.patience.rank, sequence.arrival))
        return decodes, fillers, prompts

    def _pace(self, decodes: Sequence[EngineSequence]) -> Pace | None:
        """Without urgent decodes there is nobody whose gap a long step lengthens."""
        bound = self._bound_s(decodes)
        if self.curve is None or bound == math.inf:
            return None
        return Pace(curve=self.curve, max_step_s=bound, min_chunk=self._config.min_chunk_tokens)

    def _bound_s(self, decodes: Sequence[EngineSequence]) -> float:
        if not decodes:
            return math.inf
        tpot_s = min((s.request.tpot_s for s in decodes if s.request.tpot_s is not None), default=math.inf)
        bound = min(self._config.max_step_s or math.inf, _TPOT_SHARE * tpot_s)
        # A step that takes so long anyway may as well compute what fits: smaller chunks would only make more such steps.
        return bound if self.curve is None else max(bound, self.curve.mixed_s)

    @property
    def max_step_s(self) -> float:
        """Longest that a step which computes prompts may take now; 0: nothing bounds it."""
        bound = self._bound_s([s for s in self._running.values() if s.decodes and s.patience.rank < _BATCH])
        return 0.0 if self.curve is None or bound == math.inf else bound

    def _pass_over(self, plan: StepPlan[EngineSequence], active: Sequence[EngineSequence], now: float) -> None:
        """Who could have gone on and was left out waits; the others do not."""
        if not self._passed_over and len(plan.decodes) + len(plan.prompts) - len(plan.admitted) == len(active):
            return
        planned = {*plan.decodes, *(chunk.item for chunk in plan.prompts)}
        for sequence in self._passed_over:
            if sequence in planned:
                sequence.patience.serve(now)
        self._passed_over = [sequence for sequence in active if sequence not in planned]
        for sequence in self._passed_over:
            sequence.patience.wait(now, self._config.ageing_s)

    # ---- room -------------------------------------------------------------------------------------------------------

    def take_room(self, sequence: EngineSequence, now: float) -> list[int]:
        """For a reservation: its tokens' blocks that were found in the pool, while the others that it needs are free. Raises
        ResourceExhausted; with `retry_after_s` if batch sequences give way meanwhile, and their blocks are kept for it for a moment."""
        rank = sequence.patience.rank
        below = RequestClass.BATCH if rank < RequestClass.BATCH else _ANY_RANK
        if self._num_seats(below) <= 0:
            raise ResourceExhausted(f"all {self._max_num_seqs} seats are taken; try another worker, or later")
        if self._preemptor.holds_back(rank):
            raise ResourceExhausted(
                f"{self._preemptor.num_preempted or 'some'} sequences wait here for room to go on; try another worker, or later"
            )
        short = self._short
        if short is not None and short.state is SequenceState.WAITING and short.patience.rank <= rank:
            # Else small reservations would take one by one what comes free for it.
            raise ResourceExhausted("a prompt waits here for KV blocks; try another worker, or later")
        for may_make_room in (below < _ANY_RANK, False):
            cached = self._pool.lookup(sequence.block_hashes())
            num_new = num_blocks_now(sequence, self._block_size) - len(cached)
            room = self._num_free(below, now) - self._pool.num_unowned(cached)
            missing = num_new + grows(sequence, self._block_size) - room
            if missing <= 0:
                self._claims.pop(sequence.seq_id, None)
                return cached
            coming = self._preemptor.num_coming
            if not may_make_room or not self._preemptor.make_room(missing - coming, missing - coming):
                break
        message = f"{num_new} KV blocks are needed and {max(0, room)} are free"
        if below < _ANY_RANK and missing <= self._preemptor.num_coming:
            self._claim(sequence.seq_id, missing + room, now)
            raise ResourceExhausted(f"{message}; batch sequences give way, so try again after a step", retry_after_s=_RETRY_S)
        raise ResourceExhausted(f"{message}; try another worker, or later")

    def forget(self, seq_id: str) -> None:
        """Nothing is kept for it any more."""
        self._claims.pop(seq_id, None)

    def _make_room(self, plan: StepPlan[EngineSequence], short: Waiting[EngineSequence], now: float) -> bool:
        """Batch sequences give way for the urgent prompt that is short of blocks, and for as many after it as would be in this step.
        False: nobody did."""
        if short.rank >= RequestClass.BATCH:
            return False
        free = self._num_free(RequestClass.BATCH, now) + self._preemptor.num_coming
        least = sum(candidate.num_blocks for candidate in plan.admitted) + short.num_blocks
        active = [sequence for sequence in self._running.values() if sequence.is_plannable]
        wanted = sum(candidate.num_blocks for candidate in self._plan(active, active, now, unlimited=True).admitted)
        if not self._preemptor.make_room(least - free, max(least, wanted) - free):
            return False
        self._claim(short.item.seq_id, short.num_blocks, now)
        return True

    def _open_below(self, active: Sequence[EngineSequence], ready: Sequence[EngineSequence]) -> int:
        """Ranks below this may be admitted: what comes free is for those that run already, and for newcomers more urgent than they."""
        if not self._admission.waiting and not self._preemptor.waiting:
            return 0
        limit = min(_ANY_RANK, self._preemptor.most_urgent)
        if len(ready) < len(active):
            limit = min(limit, *(sequence.patience.rank for sequence in {*active}.difference(ready)))
        return limit

    def _num_seats(self, below: int) -> int:
        """Left for sequences of ranks below this, whoever of the others runs."""
        return self._max_num_seqs - sum(1 for _ in self._seated(below))

    def _num_free(self, below: int, now: float) -> int:
        """Blocks for newcomers of ranks below this, beside what those of such ranks need who are here. For the batch class, beside what
        is kept for others too."""
        wanted = [num_blocks_in_the_end(sequence, self._block_size) - len(sequence.blocks) for sequence in self._seated(below)]
        left = watermark(num_blocks=self._pool.num_blocks, num_growing=sum(x > 0 for x in wanted), num_wanted=sum(wanted))
        return self._pool.num_available - left - (self._num_claimed(now) if below == _ANY_RANK else 0)

    def _seated(self, below: int) -> Iterator[EngineSequence]:
        for sequence in self._sequences.values():
            if sequence.state in (SequenceState.RUNNING, SequenceState.RESERVED) and sequence.patience.rank < below:
                yield sequence

    def _claim(self, seq_id: str, num_blocks: int, now: float) -> None:
        self._claims[seq_id] = _Claim(num_blocks, now + _CLAIM_S)

    def _num_claimed(self, now: float) -> int:
        for seq_id in [seq_id for seq_id, claim in self._claims.items() if claim.until <= now]:
            del self._claims[seq_id]
        return sum(claim.num_blocks for claim in self._claims.values())
