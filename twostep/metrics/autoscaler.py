"""Declares the metrics of what the autoscaler sees, decides and does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from twostep.metrics.family import counter, gauge
from twostep.metrics.registry import MetricSample, MetricsRegistry

_ROLE = ["worker_role"]

LEADER = gauge("twostep_autoscaler_leader", "1: this replica decides. 0: it answers from what another one has decided.")
ANSWERING = gauge("twostep_autoscaler_answering", "1: KEDA gets an answer. 0: no decision, or too old a one; KEDA keeps what there is.")
AGE = gauge("twostep_autoscaler_decision_age_seconds", "Of the decision that this replica answers from. Missing before the first one.")
DESIRED_WORKERS = gauge("twostep_autoscaler_desired_workers", "Workers wanted in a role, by the last decision.", _ROLE)
DESIRED_REPLICAS = gauge(
    "twostep_autoscaler_desired_replicas",
    "Pods wanted of a role's Deployment. A worker that changed its role counts for its pod's.",
    _ROLE,
)
NEEDED = gauge("twostep_autoscaler_needed_workers", "Workers that the load asks for, without spare and bounds. Of the leader.", _ROLE)
WORKERS = gauge("twostep_autoscaler_workers", "Workers that serve a role, as of the last decision. Of the leader.", _ROLE)
PODS = gauge("twostep_autoscaler_pods", "Pods of a role's Deployment, those asked for and still to come included.", _ROLE)
COST = gauge("twostep_autoscaler_cost_per_hour", "Of the pods wanted, by the prices that the autoscaler was told.")
REQUESTS = gauge(
    "twostep_autoscaler_requests_per_second",
    "Load offered to all routers of late, refused requests included. Of the leader.",
)
ATTAINMENT = gauge(
    "twostep_autoscaler_attainment_ratio",
    "Share of the answers of the last windows that kept their target, by kind: ttft, tpot. Missing while none ended. Of the leader.",
    ["kind"],
)
DECISIONS = counter(
    "twostep_autoscaler_decisions_total", "Decisions, by kind: hold, up, down, shift (more pods of one role, fewer of the other).", ["kind"]
)
LIMITED = counter("twostep_autoscaler_limited_total", "Decisions that a bound held back, by reason.", ["reason"])
SKIPPED = counter(
    "twostep_autoscaler_skipped_total",
    "Looks of the leader that led to no decision, by reason: redis (away), demand (no router has said what is asked of it), workers "
    "(none that is registered counts, or the first are only coming up), lease (lost before the decision stood).",
    ["reason"],
)
TURNS = counter(
    "twostep_autoscaler_direction_changes_total",
    "How often the pods wanted turned from growing to shrinking or back.",
    _ROLE,
)
SWITCHES = counter(
    "twostep_autoscaler_switches_total",
    "Role changes that were asked for, by status: ok, refused (it cannot), failed, left_out (it was the last of its role).",
    ["status"],
)
PATCHES = counter("twostep_autoscaler_pod_patches_total", "Pods marked to go first, or cleared of it, by status: ok, failed.", ["status"])

_READ = (LEADER, ANSWERING, AGE, DESIRED_WORKERS, DESIRED_REPLICAS, NEEDED, WORKERS, PODS, COST, REQUESTS, ATTAINMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerState:
    """A moment of an autoscaler. Maps are by role; what only a leader knows is empty elsewhere. `attainment` by kind."""

    leader: bool = False
    answering: bool = False
    age_s: float | None = None
    desired_workers: Mapping[str, int] = field(default_factory=dict)
    desired_replicas: Mapping[str, int] = field(default_factory=dict)
    pods: Mapping[str, int] = field(default_factory=dict)
    cost: float | None = None
    needed: Mapping[str, int] = field(default_factory=dict)
    workers: Mapping[str, int] = field(default_factory=dict)
    requests_per_s: float | None = None
    attainment: Mapping[str, float] = field(default_factory=dict)


class AutoscalerMetrics:
    def __init__(self, registry: MetricsRegistry, state: Callable[[], AutoscalerState]) -> None:
        """`state` is called from scrapes' threads."""
        self._state = state
        self.decisions = registry.counter(DECISIONS)
        self.limited = registry.counter(LIMITED)
        self.skipped = registry.counter(SKIPPED)
        self.turns = registry.counter(TURNS)
        self.switches = registry.counter(SWITCHES)
        self.patches = registry.counter(PATCHES)
        for role in ("prefill", "decode"):
            self.turns.labels(role)
        for status in ("ok", "failed"):
            self.patches.labels(status)
        registry.on_scrape(_READ, self._read)

    def _read(self) -> Iterable[MetricSample]:
        state = self._state()
        yield MetricSample(LEADER, state.leader)
        yield MetricSample(ANSWERING, state.answering)
        for family, value in ((AGE, state.age_s), (COST, state.cost), (REQUESTS, state.requests_per_s)):
            if value is not None:
                yield MetricSample(family, value)
        for family, by_label in (
            (DESIRED_WORKERS, state.desired_workers),
            (DESIRED_REPLICAS, state.desired_replicas),
            (NEEDED, state.needed),
            (WORKERS, state.workers),
            (PODS, state.pods),
            (ATTAINMENT, state.attainment),
        ):
            yield from (MetricSample(family, each, (label,)) for label, each in by_label.items())
