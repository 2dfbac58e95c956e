"""A fleet that does what the policy says, as Kubernetes does it: pods in their cold start, drains, switches, losses. No requests: what a
worker has to do is reckoned from the rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import ROLES, Decision, Observation, PolicyConfig, PoolConfig, Role, Traffic, WorkerView
from twostep.autoscaler.policy import decide
from twostep.autoscaler.sizing import sequences
from twostep.step_curve import StepCurve

# An 8B model on one H200 (twostep/lab/plan/presets), so that numbers are of the size they have.
PREFILL = StepCurve(fixed_s=0.00833, per_row_s=2.06e-05, knee=292.0, per_pair_s=1.085e-09)
DECODE = StepCurve(fixed_s=0.004078, per_row_s=0.0, per_sequence_s=8.78e-06, per_context_s=2.983e-08)
CURVES: Mapping[Role, StepCurve] = {"prefill": PREFILL, "decode": DECODE}
STEP_TOKENS: Mapping[Role, int] = {"prefill": 8192, "decode": 2048}


def pool(**more: Any) -> PoolConfig:
    return replace(PoolConfig(max_workers=24, cold_start_s=90.0), **more)


def config(**more: Any) -> PolicyConfig:
    return replace(PolicyConfig(prefill=pool(), decode=pool(), ttft_ms=500.0, tpot_ms=10.0, hysteresis=0.1), **more)


def traffic(rate: float, *, prompt: float = 2600.0, output: float = 128.0, **more: Any) -> Traffic:
    return replace(Traffic(requests_per_s=rate, prompt_tokens=prompt, output_tokens=output, prompt_scv=0.09), **more)


def worker(name: str, role: Role, owner: Role | None = None, **more: Any) -> WorkerView:
    view = WorkerView(
        worker_id=name,
        role=role,
        owner=owner or role,
        pod_name=f"pod-{name}",
        can_switch=True,
        curve=CURVES[role],
        step_tokens=STEP_TOKENS[role],
        max_num_seqs=256,
        num_blocks=50_000,
    )
    return replace(view, **more)


def workers(prefill: int, decode: int, **more: Any) -> tuple[WorkerView, ...]:
    return tuple(worker(f"{role}-{i}", role, **more) for role, num in (("prefill", prefill), ("decode", decode)) for i in range(num))


@dataclass(slots=True)
class Pod:
    view: WorkerView
    ready_s: float
    role_s: float = 0.0  # when a switch is done
    to: Role | None = None


@dataclass(slots=True)
class Fleet:
    """Follows decisions at once; `lose` takes a worker away, and its Deployment makes another."""

    config: PolicyConfig
    memory: Memory = field(default_factory=Memory)
    now_s: float = 0.0
    pods: list[Pod] = field(default_factory=list)
    asked: dict[Role, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    decisions: list[Decision] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    num_made: int = 0
    both_roles: bool = False  # of its workers
    json: bool = False  # the memory goes through JSON at every step

    @classmethod
    def of(cls, config: PolicyConfig, prefill: int, decode: int, **more: Any) -> Fleet:
        fleet = cls(config=config, **more)
        for role, num in (("prefill", prefill), ("decode", decode)):
            fleet.asked[role] = num
            for _ in range(num):
                fleet._make(role, cold=False)
        return fleet

    def _make(self, owner: Role, *, cold: bool = True) -> None:
        self.num_made += 1
        view = worker(f"{owner}-{self.num_made}", owner, started_s=self.now_s, both_roles=self.both_roles)
        self.pods.append(Pod(view, self.now_s + (self.config.pool(owner).cold_start_s if cold else 0.0)))

    def lose(self, role: Role) -> None:
        there = [pod for pod in self.pods if pod.view.role == role and pod.ready_s <= self.now_s and pod.to is None]
        if there:
            self.pods.remove(there[0])
            self._make(there[0].view.owner)

    def serving(self, role: Role) -> int:
        return sum(pod.view.role == role and pod.ready_s <= self.now_s and pod.to is None for pod in self.pods)

    def observe(self, load: Traffic) -> Observation:
        decodes = self.serving("decode")
        context = load.prompt_tokens + load.output_tokens / 2
        each = sequences(DECODE, load.requests_per_s * max(0.0, load.output_tokens - 1) / decodes, context) if decodes else 0.0
        views = []
        for pod in self.pods:
            if pod.ready_s > self.now_s:
                continue
            if pod.to is not None and pod.role_s <= self.now_s:
                pod.view = replace(pod.view, role=pod.to, curve=CURVES[pod.to], step_tokens=STEP_TOKENS[pod.to])
                pod.to = None
            busy = pod.view.role == "decode" and pod.to is None and load.requests_per_s > 0.0
            num = min(256, round(min(each, 256.0))) if busy else 0
            draining = pod.to is not None
            views.append(replace(pod.view, ready=not draining, draining=draining, num_running=num, context_tokens=round(num * context)))
        return Observation(now_s=self.now_s, traffic=load, workers=tuple(views), pods=dict(self.asked))

    def step(self, load: Traffic) -> Decision:
        """One interval: look, decide, follow."""
        return self.decide(self.observe(load))

    def decide(self, observation: Observation) -> Decision:
        result = decide(self.config, self.memory, observation)
        self.memory = Memory.from_json(result.memory.to_json()) if self.json else result.memory
        decision = result.decision
        self.observations.append(observation)
        self.decisions.append(decision)
        self.follow(decision)
        self.now_s += self.config.interval_s
        return decision

    def follow(self, decision: Decision) -> None:
        for switch in decision.switches:
            pod = next(pod for pod in self.pods if pod.view.worker_id == switch.worker_id)
            pod.to, pod.role_s = switch.to, self.now_s + self.config.switch_s + 2.0
        rank = {name: i for i, name in enumerate(decision.victims)}
        for owner in ROLES:
            own = [pod for pod in self.pods if pod.view.owner == owner]
            own.sort(key=lambda pod: (pod.ready_s <= self.now_s, rank.get(pod.view.worker_id, len(rank)), -pod.ready_s))
            for pod in own[: max(0, len(own) - decision.replicas[owner])]:
                self.pods.remove(pod)
            for _ in range(decision.replicas[owner] - len(own)):
                self._make(owner)
            self.asked[owner] = decision.replicas[owner]

    def run(self, load: Traffic, seconds: float) -> list[Decision]:
        return [self.step(load) for _ in range(round(seconds / self.config.interval_s))]
