"""Places simulated requests as one router does: with its own `place`, on the records that workers would write at that moment.

Where reality differs: records are a second old and there may be several routers (tests/router/placement_simulation.py has both); which
worker holds which prefix is not simulated; answers are known to end where they end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

# The one way out of `twostep` to the router (pyproject.toml names it): what is simulated is the decision that is made.
from router.placing.placement import Placement, place
from twostep.cluster.prediction import Candidate, PlacementRequest, Snapshot
from twostep.cluster.records import LayoutRecord, WorkerLoad, WorkerRecord
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.simulator.cluster import HandOverCost, PlacementChoice, SimulatedRequest, SimulatedWorker

_MAX_MODEL_LEN = 1 << 20
# By which KV travels on one host of GPUs.
_TRANSPORT = "cuda_ipc"


class RoutedPlacement:
    """A PlacementRule for requests that all have the same targets."""

    def __init__(self, targets: LatencyTargets, hand_over: HandOverCost) -> None:
        self._targets, self._hand_over = targets, hand_over
        self._records: dict[SimulatedWorker, WorkerRecord] = {}
        self._num_placed = 0

    def __call__(
        self,
        request: SimulatedRequest,
        now: float,
        prefill: Sequence[SimulatedWorker],
        decode: Sequence[SimulatedWorker],
        full: Collection[int],
    ) -> PlacementChoice | None:
        self._num_placed += 1
        seen: dict[SimulatedWorker, Candidate] = {}
        for worker in (*prefill, *decode):
            if worker not in seen:
                seen[worker] = self._candidate(worker, request.num_cached)
        placed = place(
            Snapshot(
                prefill=[seen[worker] for worker in prefill],
                decode=[replace(seen[worker], excluded=True) if i in full else seen[worker] for i, worker in enumerate(decode)],
            ),
            PlacementRequest(
                request_id=str(self._num_placed),
                num_tokens=request.num_prompt,
                max_new_tokens=request.num_output,
                ttft_ms=self._targets.ttft_ms,
                tpot_ms=self._targets.tpot_ms,
            ),
        )
        if not isinstance(placed, Placement):
            return None
        numbers = {self._records[worker].worker_id: i for i, worker in enumerate(decode)}
        sources = {self._records[worker].worker_id: i for i, worker in enumerate(prefill)}
        source = None if placed.prefill is None else sources[placed.prefill.worker_id]
        return PlacementChoice(source, numbers[placed.decode.worker_id])

    def _candidate(self, worker: SimulatedWorker, num_cached: int) -> Candidate:
        engine, spec = worker.engine, worker.engine.spec
        known = self._records.get(worker)
        if known is None:
            known = self._records[worker] = self._record(worker)
        load = WorkerLoad(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_reserved=engine.num_reserved,
            num_free_blocks=engine.free_blocks,
            num_queued_tokens=engine.uncomputed_tokens,
            num_context_tokens=engine.context,
            max_step_s=spec.max_step_s if engine.num_decoding else 0.0,
        )
        return Candidate(
            record=replace(known, load=load),
            cached_tokens=num_cached,
            queued_tokens=worker.queued_tokens,
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
        )
        return WorkerRecord(
            worker_id=f"{worker.role}-{len(self._records)}",
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
            local_prefill=True,
        )
