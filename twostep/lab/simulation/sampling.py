"""Samples what a controller can see of the simulated cluster: heartbeats of the workers that are registered, the routers' means over
windows, and each pod's metrics; all of it a second old."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from twostep.autoscaler.model import ROLES, Observation, Role, Traffic, WorkerView
from twostep.cluster.records import HEARTBEAT_S
from twostep.lab.simulation.outcome import Totals
from twostep.lab.simulation.pods import PodCluster, SimulatedPod
from twostep.lab.simulator.engine import SimulatedEngine

# Before each decision.
AGE_S = HEARTBEAT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMetrics:
    """Metrics of a ready pod, means since the last sample. Shares of 1: `busy` of the time in steps, `seats` of max_num_seqs, `pool` of the
    KV pool."""

    busy: float = 0.0
    tokens_per_s: float = 0.0
    seats: float = 0.0
    pool: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSample:
    """`pods`: metrics of each Deployment's ready pods; `starting`: its pods without any."""

    observation: Observation
    pods: Mapping[Role, tuple[PodMetrics, ...]]
    starting: Mapping[Role, int]


@dataclass(frozen=True, slots=True)
class _Meter:
    """A worker's sums when it was last looked at."""

    engine: SimulatedEngine
    busy_s: float = 0.0
    num_tokens: float = 0.0
    sequence_s: float = 0.0
    token_s: float = 0.0


class Sampler:
    def __init__(self, cluster: PodCluster, *, window_s: float, refusing: bool = False) -> None:
        """`refusing`: the routers refuse what would be late."""
        self._cluster = cluster
        self._refusing = refusing
        self._window_s = window_s
        self._before = deque([(0.0, Totals())])
        # Of the window; where nothing came or ended in it, of the one before: mean prompt, its squared variation, mean answer.
        self._prompt, self._scv, self._output = 0.0, 0.5, 0.0
        self._meters: dict[int, _Meter] = {}
        self._sampled_at = 0.0

    def sample(self, now: float) -> ClusterSample:
        """For a decision that is taken AGE_S later."""
        elapsed = max(1e-9, now - self._sampled_at)
        pods: dict[Role, list[PodMetrics]] = {role: [] for role in ROLES}
        starting: dict[Role, int] = dict.fromkeys(ROLES, 0)
        views: list[WorkerView] = []
        meters: dict[int, _Meter] = {}
        for pod in self._cluster.pods.values():
            if pod.worker is None:
                starting[pod.owner] += pod.alive and not pod.terminating
                continue
            engine = pod.worker.engine
            # A step counts when it is launched: what is left of it is not over yet.
            busy_s = engine.busy_s - max(0.0, engine.free_at_s - now)
            meters[pod.number] = meter = _Meter(engine, busy_s, engine.num_tokens, engine.sequence_s, engine.token_s)
            metrics = self._metrics(pod, meter, elapsed)
            views.append(_view(pod, engine, metrics, both_roles=self._cluster.deployment.both_roles))
            if not pod.terminating:
                pods[pod.owner].append(metrics)
        self._meters, self._sampled_at = meters, now
        observation = Observation(now_s=now + AGE_S, traffic=self._traffic(now), workers=tuple(views), pods=dict(self._cluster.replicas))
        return ClusterSample(observation=observation, pods={role: tuple(pods[role]) for role in ROLES}, starting=starting)

    def _metrics(self, pod: SimulatedPod, meter: _Meter, elapsed: float) -> PodMetrics:
        before = self._meters.get(pod.number)
        if before is None or before.engine is not meter.engine:
            before = _Meter(meter.engine)
        spec = meter.engine.spec
        seconds = min(elapsed, max(1e-9, self._sampled_at + elapsed - pod.ready_at))
        return PodMetrics(
            busy=(meter.busy_s - before.busy_s) / seconds,
            tokens_per_s=(meter.num_tokens - before.num_tokens) / seconds,
            seats=(meter.sequence_s - before.sequence_s) / seconds / spec.max_num_seqs,
            pool=(meter.token_s - before.token_s) / seconds / spec.num_tokens,
        )

    def _traffic(self, now: float) -> Traffic:
        before, totals = self._before, replace(self._cluster.ledger.totals)
        while len(before) > 1 and before[1][0] <= now - self._window_s:
            before.popleft()
        since, old = before[0]
        before.append((now, totals))
        seconds = max(1e-9, now - since)
        came, ended, refused = totals.arrived - old.arrived, totals.ended - old.ended, totals.refused - old.refused
        if came:
            self._prompt = (totals.prompt_tokens - old.prompt_tokens) / came
            self._scv = max(0.0, (totals.prompt_squares - old.prompt_squares) / came / self._prompt**2 - 1)
        if ended:
            self._output = (totals.output_tokens - old.output_tokens) / ended
        return Traffic(
            requests_per_s=came / seconds,
            prompt_tokens=self._prompt,
            output_tokens=self._output,
            refused_per_s=refused / seconds,
            queued_requests=self._cluster.num_waiting,
            # Who was refused had no first token in time.
            ttft_met=(totals.ttft_kept - old.ttft_kept) / (ended + refused) if ended + refused else None,
            tpot_met=(totals.tpot_kept - old.tpot_kept) / ended if ended else None,
            prompt_scv=self._scv,
            promised=float(self._refusing),
        )


def _view(pod: SimulatedPod, engine: SimulatedEngine, metrics: PodMetrics, *, both_roles: bool) -> WorkerView:
    spec, prefill = engine.spec, pod.role == "prefill"
    num_running = engine.num_decoding if both_roles else engine.num_running
    return WorkerView(
        worker_id=pod.worker_id,
        role=pod.role,
        owner=pod.owner,
        pod_name=pod.worker_id,
        ready=not pod.draining,
        draining=pod.draining,
        can_switch=True,
        both_roles=both_roles,
        # The one that workers publish knows steps of either kind.
        curve=spec.prompt_curve if both_roles else spec.curve,
        step_tokens=spec.step_tokens,
        max_num_seqs=spec.max_num_seqs,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        num_running=int(not engine.idle) if prefill and not both_roles else num_running,
        num_waiting=engine.num_prompts if prefill else engine.num_reserved,
        queued_tokens=engine.queued_tokens,
        context_tokens=engine.context,
        tokens_per_s=metrics.tokens_per_s,
        started_s=pod.first_ready_at,
    )
