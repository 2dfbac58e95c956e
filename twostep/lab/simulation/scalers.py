"""Who scales a simulated cluster: each is shown a sample at every interval. As text, for a command line and a table:

joint                                   the autoscaler's policy with its configuration
joint,spare=0,cool_down_s=90            the same with fields of PolicyConfig changed
hpas,prefill=busy:0.6,decode=pool:0.1   two independent HPAs, metric and target of each: busy, seats or pool
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from twostep.autoscaler.hpa import Asked, metric, replicas_asked
from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import ROLES, Decision, Observation, PolicyConfig, Role
from twostep.autoscaler.policy import decide
from twostep.errors import InvalidRequest
from twostep.lab.simulation.hpa import DEFAULT_TOLERANCE, Hpa, average_value, pods_metric
from twostep.lab.simulation.pods import PodCluster
from twostep.lab.simulation.sampling import ClusterSample, PodMetrics

# The HPAs that carry out decisions look at them that much later: half an interval, on average.
_SYNC_AFTER_S = 7.5
_METRICS: Mapping[str, Callable[[PodMetrics], float]] = {
    "busy": lambda pod: pod.busy,
    "seats": lambda pod: pod.seats,
    "pool": lambda pod: pod.pool,
}


class Scaler(Protocol):
    name: str

    def act(self, now: float, sample: ClusterSample, cluster: PodCluster) -> None: ...


class JointPolicy:
    """The autoscaler's own. Its decision reaches Deployments through HPAs, as KEDA makes them, and so comes late and with their tolerance.
    `on_decision` is shown what it saw and decided."""

    def __init__(
        self, config: PolicyConfig, *, name: str = "joint policy", on_decision: Callable[[Observation, Decision], None] | None = None
    ) -> None:
        self.name = name
        self._config = config
        self._memory = Memory()
        self._on_decision = on_decision
        self._asked: Mapping[str, Asked] = {}
        self._hpas = {
            role: Hpa(least=config.pool(role).min_workers, most=config.pool(role).max_workers, up_pods=100, settle_s=0.0) for role in ROLES
        }

    def act(self, now: float, sample: ClusterSample, cluster: PodCluster) -> None:
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

    def _sync(self, now: float, argument: tuple[PodCluster, Decision]) -> None:
        cluster, decision = argument
        for role in ROLES:
            current = cluster.replicas[role]
            told = metric(self._asked[role].pods, current, DEFAULT_TOLERANCE)
            replicas = self._hpas[role].follow(now, current, average_value(current, told))
            if replicas != current:
                cluster.scale(role, replicas, now, victims=decision.victims)


class TwoHpas:
    """Each Deployment has an HPA of its own, with Kubernetes's defaults. `targets`: a metric, and how much of it a pod shall have."""

    def __init__(self, config: PolicyConfig, targets: Mapping[Role, tuple[str, float]]) -> None:
        self.name = f"HPAs, {', '.join(f'{role} {name} {value:.0%}' for role, (name, value) in targets.items())}"
        self._targets = targets
        self._hpas = {role: Hpa(least=config.pool(role).least, most=config.pool(role).max_workers) for role in ROLES}

    def act(self, now: float, sample: ClusterSample, cluster: PodCluster) -> None:
        for role, (name, target) in self._targets.items():
            current, values = cluster.replicas[role], [_METRICS[name](pod) for pod in sample.pods[role]]
            replicas = self._hpas[role].follow(now, current, pods_metric(current, values, sample.starting[role], target))
            if replicas != current:
                cluster.scale(role, replicas, now)


def contestant(text: str, policy: PolicyConfig) -> Scaler:
    """Raises InvalidRequest with what is wrong."""
    kind, *parts = text.split(",")
    fields = dict(part.partition("=")[::2] for part in parts)
    if kind == "joint":
        name = "joint policy" + "".join(f", {key} {value}" for key, value in fields.items())
        return JointPolicy(_changed(policy, fields), name=name)
    if kind == "hpas":
        return TwoHpas(policy, {role: _target(role, fields.get(role, "")) for role in ROLES})
    raise InvalidRequest(f"{text!r} begins with neither joint nor hpas; a fixed fleet costs its size times the trace's hours")


def _changed(policy: PolicyConfig, fields: Mapping[str, str]) -> PolicyConfig:
    changes: dict[str, Any] = {}
    for key, text in fields.items():
        before = getattr(policy, key, None)
        if not isinstance(before, int | float):
            raise InvalidRequest(f"{key} is no number in the policy's configuration")
        changes[key] = type(before)(_number(key, text))
    return replace(policy, **changes)


def _target(role: Role, text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in _METRICS or not _number(role, value) > 0:
        raise InvalidRequest(f"{role}={text}: give one of {', '.join(_METRICS)} and a target above 0, as in {role}=busy:0.6")
    return name, float(value)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {text!r} is no number") from error
