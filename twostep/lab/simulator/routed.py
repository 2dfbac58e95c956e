"""Places simulated requests as one router does: with its own `place`, on the records that workers would write at that moment.

Where reality differs: records are a second old and there may be several routers (tests/router/placement_simulation.py has both); which
worker holds which prefix is not simulated; answers are known to end where they end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

# The one way out of `twostep` to the router (pyproject.toml names it): what is simulated is the decision that is made.
from router.placing.placement import Placement, place
from twostep.cluster.prediction import RECENT_S, Candidate, PlacementRequest, Snapshot
from twostep.cluster.records import HEARTBEAT_S, LayoutRecord, MeasuredHandOver, WorkerLoad, WorkerRecord
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.simulator.cluster import HandOverCost, PlacementChoice, SimulatedRequest, SimulatedWorker

_MAX_MODEL_LEN = 1 << 20
# By which KV travels on one host of GPUs.
_TRANSPORT = "cuda_ipc"


# Workers tell of so many heartbeats the tokens a second that they computed.
_BEATS = 10


@dataclass(slots=True, eq=False)
class _Known:
    """Holds what a router has of a worker: its record, what it computed by its last heartbeats, and the tokens sent to it lately."""

    record: WorkerRecord
    beats: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_BEATS + 1))
    recent_tokens: float = 0.0
    sent_at: float = 0.0

    def recent(self, now: float) -> float:
        """As router/workers/pool.py reckons them."""
        return self.recent_tokens * math.exp((self.sent_at - now) / RECENT_S)

    def send(self, num_tokens: int, now: float) -> None:
        self.recent_tokens, self.sent_at = self.recent(now) + num_tokens, now

    def prompt_tokens_per_s(self, num_tokens: int, now: float) -> float:
        """By the last heartbeat. `num_tokens`: all that it has computed by now."""
        if not self.beats or now - self.beats[-1][0] >= HEARTBEAT_S:
            self.beats.append((now, num_tokens))
        (first_s, first), (last_s, last) = self.beats[0], self.beats[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class RoutedPlacement:
    """A PlacementRule for requests that all have the same targets. `refusing`: whoever would miss them is refused, as routers do.
    `both_roles`: of the workers, else each does its role's work alone."""

    def __init__(
        self,
        targets: LatencyTargets,
        hand_over: HandOverCost,
        *,
        refusing: bool = False,
        both_roles: bool = True,
    ) -> None:
        self._targets, self._hand_over, self._refusing, self._both_roles = targets, hand_over, refusing, both_roles
        self._known: dict[SimulatedWorker, _Known] = {}
        self._num_placed = 0

    def __call__(
        self,
        request: SimulatedRequest,
        now: float,
        prefill: Sequence[SimulatedWorker],
        decode: Sequence[SimulatedWorker],
        full: Collection[int],
    ) -> PlacementChoice | None:
        # Whoever has no seat would refuse: a queue in the router is as good as one there, and quicker to simulate.
        open_ = [i not in full and worker.engine.has_seat for i, worker in enumerate(decode)]
        if not any(open_):
            return None
        self._num_placed += 1
        seen: dict[SimulatedWorker, Candidate] = {}
        for worker in (*prefill, *decode):
            if worker not in seen:
                seen[worker] = self._candidate(worker, request, now)
        placed = place(
            Snapshot(
                prefill=[seen[worker] for worker in prefill],
                decode=[seen[w] if is_open else replace(seen[w], excluded=True) for w, is_open in zip(decode, open_, strict=True)],
            ),
            PlacementRequest(
                request_id=str(self._num_placed),
                num_tokens=request.num_prompt,
                max_new_tokens=request.num_output,
                ttft_ms=self._targets.ttft_ms,
                tpot_ms=self._targets.tpot_ms,
                gap_ms=self._targets.gap_ms,
            ),
        )
        if not isinstance(placed, Placement):
            return None
        targets, sources = ({self._known[worker].record.worker_id: i for i, worker in enumerate(side)} for side in (decode, prefill))
        source = None if placed.prefill is None else sources[placed.prefill.worker_id]
        target = targets[placed.decode.worker_id]
        # As router/request/targets.py judges one that has not waited.
        too_late = self._refusing and not placed.meets_targets
        if not too_late:
            self._known[decode[target] if source is None else prefill[source]].send(request.num_uncached, now)
        return PlacementChoice(source, target, too_late=too_late)

    def _candidate(self, worker: SimulatedWorker, request: SimulatedRequest, now: float) -> Candidate:
        engine = worker.engine
        known = self._known.get(worker)
        if known is None:
            known = self._known[worker] = _Known(self._record(worker))
        bytes_ = request.num_prompt * self._hand_over.kv_token_bytes + self._hand_over.state_bytes
        load = WorkerLoad(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_reserved=engine.num_reserved,
            num_free_blocks=engine.free_blocks,
            num_queued_tokens=engine.uncomputed_tokens,
            num_context_tokens=engine.context,
            max_step_s=engine.usual_step_s,
            num_handing_over=engine.num_handing_over,
            prompt_tokens_per_s=known.prompt_tokens_per_s(engine.num_prompt_tokens, now),
            tpot_s=(self._targets.tpot_ms or 0.0) / 1e3 if engine.num_decoding else 0.0,
            hand_overs=(
                MeasuredHandOver(
                    transport=_TRANSPORT,
                    seconds=self._hand_over.latency_s + self._hand_over.exposed_s(request.num_prompt),
                    num_bytes=bytes_,
                ),
            ),
        )
        return Candidate(
            record=replace(known.record, load=load),
            cached_tokens=request.num_cached,
            queued_tokens=worker.queued_tokens,
            recent_tokens=known.recent(now),
            num_attempts=worker.num_attempts,
        )

    def _record(self, worker: SimulatedWorker) -> WorkerRecord:
        spec = worker.engine.spec
        # One layer and head of so many numbers: a token's bytes are what counts.
        layout = LayoutRecord(
            model_fingerprint="",
            dtype="bfloat16",
            block_size=spec.block_size,
            num_layers=1,
            num_kv_heads=1,
            head_dim=round(self._hand_over.kv_token_bytes / 4),
            num_state_blocks=spec.num_state_blocks,
        )
        return WorkerRecord(
            worker_id=f"{worker.role}-{len(self._known)}",
            role=worker.role,
            address="",
            epoch=1,
            model="",
            layout=layout,
            hash_unit=spec.block_size,
            secret_check="",
            num_blocks=spec.num_blocks,
            max_num_seqs=spec.max_num_seqs,
            max_model_len=_MAX_MODEL_LEN,
            transports=(_TRANSPORT,),
            curve=spec.prompt_curve,
            step_tokens=spec.step_tokens,
            local_prefill=self._both_roles,
            both_roles=self._both_roles,
            max_step_s=0.0 if self._targets.tpot_ms or self._targets.gap_ms else spec.max_step_s,
        )
