"""Who scales a simulated cluster. Each is shown a sample at every interval; the joint policy's decision reaches Deployments through HPAs,
as KEDA makes them, and so comes late and with their tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

from twostep.autoscaler.hpa import Asked, metric, replicas_asked
from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import ROLES, Decision, Observation, PolicyConfig, Role
from twostep.autoscaler.policy import decide
from twostep.errors import InvalidRequest
from twostep.lab.simulation.hpa import DEFAULT_TOLERANCE, Hpa, Rules, average_value, pods_metric
from twostep.lab.simulation.pods import PodCluster
from twostep.lab.simulation.sampling import ClusterSample, PodMetrics

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
        """Pods to begin with; None: as many as all scalers begin with."""
        ...

    def act(self, now: float, sample: ClusterSample, cluster: PodCluster) -> None: ...


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
            replicas = self._hpas[role].follow(now, current, average_value(current, told, 1.0))
            if replicas != current:
                cluster.scale(role, replicas, now, victims=decision.victims)


@dataclass(frozen=True, slots=True)
class HpaTarget:
    """An HPA's target: which of METRICS, and how much of it a pod shall have."""

    metric: str
    value: float

    def __str__(self) -> str:
        shown = f"{self.value:.0%}" if self.value <= 1 else f"{self.value:g}"
        return f"{self.metric} {shown}"


class TwoHpas:
    """Each role's Deployment has an HPA of its own, with Kubernetes's defaults."""

    def __init__(self, config: PolicyConfig, targets: Mapping[Role, HpaTarget]) -> None:
        self.name = f"HPAs, prefill {targets['prefill']}, decode {targets['decode']}"
        self._targets = targets
        self._hpas = {role: Hpa(least=config.pool(role).least, most=config.pool(role).max_workers) for role in ROLES}

    def start(self, now: float) -> Mapping[Role, int] | None:
        return None

    def act(self, now: float, sample: ClusterSample, cluster: PodCluster) -> None:
        for role in ROLES:
            current = cluster.replicas[role]
            replicas = self._hpas[role].follow(now, current, _wanted(self._targets[role], role, current, sample))
            if replicas != current:
                cluster.scale(role, replicas, now)


class FixedFleet:
    """As many as it is given, all the time."""

    def __init__(self, replicas: Mapping[Role, int]) -> None:
        self.name = f"fixed fleet {replicas['prefill']} + {replicas['decode']}"
        self._replicas = replicas

    def start(self, now: float) -> Mapping[Role, int] | None:
        return self._replicas

    def act(self, now: float, sample: ClusterSample, cluster: PodCluster) -> None:
        pass


def _wanted(target: HpaTarget, role: Role, current: int, sample: ClusterSample) -> int:
    read = METRICS[target.metric]
    return pods_metric(current, [read(pod) for pod in sample.pods[role]], sample.starting[role], target.value)


# ---- who is compared, as text, to be named on a command line, in a table, and in another process ----------------------------------------
#
# joint                                   the autoscaler's policy with its configuration
# joint,spare=0                           the same with a field of PolicyConfig changed
# hpas,prefill=busy:0.6,decode=seats:0.2  two independent HPAs, metric and target of each
# fleet,prefill=7,decode=5

# What each HPA is tried with. A decode worker of the preset misses 10 ms a token from 26 % of its seats on where prompts are long, and from
# 45 % on where answers are; from about 19 % of its KV pool in both cases.
PREFILL_GRID = tuple(HpaTarget("busy", percent / 100) for percent in (50, 60, 70, 80))
DECODE_GRID = (
    *(HpaTarget("seats", percent / 100) for percent in (8, 12, 16, 20, 25, 30)),
    *(HpaTarget("pool", percent / 100) for percent in (6, 8, 10, 12, 14, 16)),
)


def hpa_grid(prefill: Sequence[HpaTarget] = PREFILL_GRID, decode: Sequence[HpaTarget] = DECODE_GRID) -> Iterator[str]:
    """Every pair."""
    for one, other in product(prefill, decode):
        yield f"hpas,prefill={one.metric}:{one.value:g},decode={other.metric}:{other.value:g}"


def contestant(text: str, policy: PolicyConfig, *, on_decision: Callable[[Observation, Decision], None] | None = None) -> Scaler:
    """Raises InvalidRequest with what is wrong."""
    kind, *parts = text.split(",")
    fields = dict(part.partition("=")[::2] for part in parts)
    if kind == "joint":
        config = _changed(policy, fields)
        name = "joint policy" + "".join(f", {key} {value}" for key, value in fields.items())
        return JointPolicy(config, name=name, on_decision=on_decision)
    if kind == "fleet":
        return FixedFleet({"prefill": int(_number(fields, "prefill")), "decode": int(_number(fields, "decode"))})
    if kind != "hpas":
        raise InvalidRequest(f"{text!r} begins with none of joint, hpas, fleet")
    return TwoHpas(policy, {"prefill": _target(fields, "prefill"), "decode": _target(fields, "decode")})


def _changed(policy: PolicyConfig, fields: Mapping[str, str]) -> PolicyConfig:
    changes: dict[str, Any] = {}
    for key in fields:
        before = getattr(policy, key, None)
        if not isinstance(before, int | float):
            raise InvalidRequest(f"{key} is no number in the policy's configuration")
        changes[key] = type(before)(_number(fields, key))
    return replace(policy, **changes)


def _target(fields: Mapping[str, str], role: str) -> HpaTarget:
    metric, _, value = fields.get(role, "").partition(":")
    if metric not in METRICS:
        raise InvalidRequest(f"{role}={metric}: the metrics are {', '.join(METRICS)}; give for example {role}=busy:0.6")
    target = _number({role: value}, role)
    if not target > 0:
        raise InvalidRequest(f"{role}={metric}:{value}: a target is above 0")
    return HpaTarget(metric, target)


def _number(fields: Mapping[str, str], name: str) -> float:
    try:
        return float(fields[name])
    except (KeyError, ValueError) as error:
        raise InvalidRequest(f"{name} is missing or no number in {dict(fields)}") from error
