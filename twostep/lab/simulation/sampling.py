"""What a controller can see of the simulated cluster: heartbeats of the workers that are registered, the routers' means over windows, and
each pod's metrics; all of it a second old."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from twostep.autoscaler.model import ROLES, Observation, Role, Traffic, WorkerView
from twostep.cluster.records import HEARTBEAT_S
from twostep.lab.simulation.cluster import Cluster
from twostep.lab.simulation.decode_side import DecodeSide
from twostep.lab.simulation.outcome import Totals
from twostep.lab.simulation.prefill_side import PrefillSide
from twostep.lab.simulation.worker import SimWorker

# Before each decision.
AGE_S = HEARTBEAT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMetrics:
    """Of a ready pod, means since the last sample. Shares of 1: `busy` of the time in steps, `seats` of max_num_seqs, `pool` of the KV
    pool."""

    busy: float = 0.0
    queued_tokens: float = 0.0
    tokens_per_s: float = 0.0
    seats: float = 0.0
    pool: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """`pods`: metrics of each Deployment's ready pods; `starting`: its pods without any."""

    observation: Observation
    pods: Mapping[Role, tuple[PodMetrics, ...]]
    starting: Mapping[Role, int]


@dataclass(frozen=True, slots=True)
class _Meter:
    """A worker's sums when it was last looked at."""

    side: object
    busy_s: float = 0.0
    num_tokens: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0


@dataclass(slots=True)
class _Window:
    before: deque[tuple[float, Totals]] = field(default_factory=deque)
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.5)


class Sampler:
    def __init__(self, cluster: Cluster, *, window_s: float) -> None:
        self._cluster = cluster
        self._window_s = window_s
        self._window = _Window()
        self._window.before.append((0.0, replace(cluster.ledger.totals)))
        self._meters: dict[int, _Meter] = {}
        self._sampled_at = 0.0

    def sample(self, now: float) -> Sample:
        """For a decision that is taken AGE_S later."""
        elapsed = max(1e-9, now - self._sampled_at)
        pods: dict[Role, list[PodMetrics]] = {"prefill": [], "decode": []}
        starting: dict[Role, int] = {"prefill": 0, "decode": 0}
        views: list[WorkerView] = []
        meters: dict[int, _Meter] = {}
        for worker in self._cluster.workers.values():
            if worker.side is None:
                starting[worker.owner] += worker.alive and not worker.terminating
                continue
            meter = _meter(worker, now)
            metrics = self._metrics(worker, meter, elapsed)
            meters[worker.number] = meter
            views.append(self._view(worker, metrics))
            if not worker.terminating:
                pods[worker.owner].append(metrics)
        self._meters, self._sampled_at = meters, now
        observation = Observation(now_s=now + AGE_S, traffic=self._traffic(now), workers=tuple(views), pods=dict(self._cluster.replicas))
        return Sample(observation=observation, pods={role: tuple(pods[role]) for role in ROLES}, starting=starting)

    def _metrics(self, worker: SimWorker, meter: _Meter, elapsed: float) -> PodMetrics:
        before = self._meters.get(worker.number)
        if before is None or before.side is not meter.side:
            before = _Meter(meter.side)
        hardware = self._cluster.config.hardware
        seconds = min(elapsed, max(1e-9, self._sampled_at + elapsed - worker.ready_at))
        queued = worker.side.queued_tokens if isinstance(worker.side, PrefillSide) else 0
        return PodMetrics(
            busy=(meter.busy_s - before.busy_s) / seconds,
            queued_tokens=queued,
            tokens_per_s=(meter.num_tokens - before.num_tokens) / seconds,
            seats=(meter.sequence_s - before.sequence_s) / seconds / hardware.max_num_seqs,
            pool=(meter.token_s - before.token_s) / seconds / hardware.num_tokens,
        )

    def _view(self, worker: SimWorker, metrics: PodMetrics) -> WorkerView:
        hardware, side = self._cluster.config.hardware, worker.side
        prefill = side if isinstance(side, PrefillSide) else None
        decode = side if isinstance(side, DecodeSide) else None
        return WorkerView(
            worker_id=worker.worker_id,
            role=worker.role,
            owner=worker.owner,
            pod_name=worker.worker_id,
            ready=not worker.draining,
            draining=worker.draining,
            can_switch=True,
            curve=hardware.prefill if worker.role == "prefill" else hardware.decode,
            step_tokens=hardware.prefill_tokens if worker.role == "prefill" else hardware.decode_tokens,
            max_num_seqs=hardware.max_num_seqs,
            num_blocks=hardware.num_blocks,
            block_size=hardware.block_size,
            num_running=decode.num_running if decode is not None else int(prefill is not None and prefill.running),
            num_waiting=decode.num_reserved if decode is not None else prefill.num_prompts if prefill is not None else 0,
            queued_tokens=prefill.queued_tokens if prefill is not None else 0,
            context_tokens=int(decode.context) if decode is not None else 0,
            tokens_per_s=metrics.tokens_per_s,
            started_s=worker.first_ready_at,
        )

    def _traffic(self, now: float) -> Traffic:
        before, totals = self._window.before, replace(self._cluster.ledger.totals)
        while len(before) > 1 and before[1][0] <= now - self._window_s:
            before.popleft()
        since, old = before[0]
        before.append((now, totals))
        seconds = max(1e-9, now - since)
        came, ended = totals.arrived - old.arrived, totals.ended - old.ended
        prompt, cached, output, scv = self._window.means
        if came:
            prompt, cached = (totals.prompt_tokens - old.prompt_tokens) / came, (totals.cached_tokens - old.cached_tokens) / came
            mean = prompt - cached
            scv = max(0.0, (totals.uncached_squares - old.uncached_squares) / came / (mean * mean) - 1)
        if ended:
            output = (totals.output_tokens - old.output_tokens) / ended
        self._window.means = (prompt, cached, output, scv)
        return Traffic(
            requests_per_s=came / seconds,
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
            refused_per_s=(totals.refused - old.refused) / seconds,
            queued_requests=self._cluster.num_waiting,
            ttft_met=(totals.ttft_kept - old.ttft_kept) / ended if ended else None,
            tpot_met=(totals.tpot_kept - old.tpot_kept) / ended if ended else None,
            prompt_scv=scv,
        )


def _meter(worker: SimWorker, now: float) -> _Meter:
    match worker.side:
        case PrefillSide() as side:
            # A step counts when it starts: what is left of it is not over yet.
            return _Meter(side, busy_s=side.busy_s - max(0.0, side.free_at - now), num_tokens=side.num_tokens)
        case DecodeSide() as side:
            return _Meter(side, num_tokens=side.num_tokens, sequence_s=side.sequence_s, token_s=side.token_s)
    return _Meter(None)
