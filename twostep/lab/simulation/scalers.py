"""Who scales a simulated cluster. Each is shown a sample at every interval; the joint policy's decision reaches Deployments through HPAs,
as KEDA makes them, and so comes late and with their tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from twostep.autoscaler.hpa import Asked, metric, replicas_asked
from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import ROLES, Decision, Observation, PolicyConfig, Role
from twostep.autoscaler.policy import decide
from twostep.lab.simulation.cluster import Cluster
from twostep.lab.simulation.hpa import DEFAULT_TOLERANCE, Hpa, Rules, average_value, pods_metric
from twostep.lab.simulation.sampling import PodMetrics, Sample

# The HPAs that carry out decisions look at them that much later: half an interval, on average.
_SYNC_AFTER_S = 7.5
# Metrics of a pod that an HPA can be given, by role; the target is in the metric's unit.
METRICS: Mapping[str, Callable[[PodMetrics], float]] = {
    "busy": lambda pod: pod.busy,
    "queue": lambda pod: pod.queued_tokens,
    "tokens": lambda pod: pod.tokens_per_s,
    "seats": lambda pod: pod.seats,
    "pool": lambda pod: pod.pool,
}


class Scaler(Protocol):
    name: str

    def start(self, now: float) -> Mapping[Role, int] | None:
        """Pods to begin with; None: as many as everybody is given."""
        ...

    def act(self, now: float, sample: Sample, cluster: Cluster) -> None: ...


class JointPolicy:
    """The autoscaler's own. `on_decision` is shown what it saw and decided."""

    def __init__(
        self, config: PolicyConfig, *, name: str = "joint policy", on_decision: Callable[[Observation, Decision], None] | None = None
    ) -> None:
        self.name = name
        self._config = config
        self._memory = Memory()
        self._on_decision = on_decision
        self._asked: Mapping[str, Asked] = {}
        at_once = Rules(stabilization_s=0.0)
        self._hpas = {
            role: Hpa(least=config.pool(role).min_workers, most=config.pool(role).max_workers, up=replace(at_once, pods=100), down=at_once)
            for role in ROLES
        }

    def start(self, now: float) -> Mapping[Role, int] | None:
        return None

    def act(self, now: float, sample: Sample, cluster: Cluster) -> None:
        step = decide(self._config, self._memory, sample.observation)
        self._memory = step.memory
        decision = step.decision
        if self._on_decision is not None:
            self._on_decision(sample.observation, decision)
        for switch in decision.switches:
            cluster.switch(switch.worker_id, switch.to, now, drain_s=self._config.drain_s)
        wishes: dict[str, int] = {role: decision.replicas[role] for role in ROLES}
        pods: dict[str, int] = {role: cluster.replicas[role] for role in ROLES}
        self._asked = replicas_asked(wishes, pods, self._asked, DEFAULT_TOLERANCE)
        cluster.at(now + _SYNC_AFTER_S, self._sync, (cluster, decision))

    def _sync(self, now: float, argument: tuple[Cluster, Decision]) -> None:
        cluster, decision = argument
        for role in ROLES:
            current = cluster.replicas[role]
            told = metric(self._asked[role].pods, current, DEFAULT_TOLERANCE)
            replicas = self._hpas[role].follow(now, current, average_value(current, told, 1.0))
            if replicas != current:
                cluster.scale(role, replicas, now, victims=decision.victims)


@dataclass(frozen=True, slots=True)
class Target:
    """Of an HPA: which of METRICS, and how much of it a pod shall have."""

    metric: str
    value: float

    def __str__(self) -> str:
        shown = f"{self.value:.0%}" if self.value <= 1 else f"{self.value:g}"
        return f"{self.metric} {shown}"


class TwoHpas:
    """Each role's Deployment has an HPA of its own, with Kubernetes's defaults."""

    def __init__(self, config: PolicyConfig, targets: Mapping[Role, Target]) -> None:
        self.name = f"HPAs, prefill {targets['prefill']}, decode {targets['decode']}"
        self._targets = targets
        self._hpas = {role: Hpa(least=config.pool(role).least, most=config.pool(role).max_workers) for role in ROLES}

    def start(self, now: float) -> Mapping[Role, int] | None:
        return None

    def act(self, now: float, sample: Sample, cluster: Cluster) -> None:
        for role in ROLES:
            current = cluster.replicas[role]
            replicas = self._hpas[role].follow(now, current, _wanted(self._targets[role], role, current, sample))
            if replicas != current:
                cluster.scale(role, replicas, now)


class FixedRatio:
    """One HPA for both: as many workers as the needier role asks for, divided in one and the same ratio."""

    def __init__(self, config: PolicyConfig, targets: Mapping[Role, Target], prefill_share: float) -> None:
        self.name = f"fixed ratio {prefill_share:.0%} prefill, HPA on prefill {targets['prefill']}, decode {targets['decode']}"
        self._targets = targets
        self._share: Mapping[Role, float] = {"prefill": prefill_share, "decode": 1 - prefill_share}
        self._hpa = Hpa(least=2, most=sum(config.pool(role).max_workers for role in ROLES))

    def start(self, now: float) -> Mapping[Role, int] | None:
        return None

    def act(self, now: float, sample: Sample, cluster: Cluster) -> None:
        total = sum(cluster.replicas.values())
        wanted = max(
            math.ceil(_wanted(self._targets[role], role, cluster.replicas[role], sample) / self._share[role] - 1e-9) for role in ROLES
        )
        if all(_wanted(self._targets[role], role, cluster.replicas[role], sample) == cluster.replicas[role] for role in ROLES):
            wanted = total
        total = self._hpa.follow(now, total, wanted)
        prefill = min(total - 1, max(1, round(total * self._share["prefill"])))
        shares: dict[Role, int] = {"prefill": prefill, "decode": total - prefill}
        for role in ROLES:
            if shares[role] != cluster.replicas[role]:
                cluster.scale(role, shares[role], now)


class FixedFleet:
    """As many as it is given, all the time."""

    def __init__(self, replicas: Mapping[Role, int]) -> None:
        self.name = f"fixed fleet {replicas['prefill']} + {replicas['decode']}"
        self._replicas = replicas

    def start(self, now: float) -> Mapping[Role, int] | None:
        return self._replicas

    def act(self, now: float, sample: Sample, cluster: Cluster) -> None:
        pass


def _wanted(target: Target, role: Role, current: int, sample: Sample) -> int:
    read = METRICS[target.metric]
    return pods_metric(current, [read(pod) for pod in sample.pods[role]], sample.starting[role], target.value)
