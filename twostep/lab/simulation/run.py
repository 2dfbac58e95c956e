"""One simulation: a trace, a seed and who scales, from a fleet that fits the beginning to the last answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostep.autoscaler.decision_log import head_of, line_of
from twostep.autoscaler.model import ROLES, Decision, Observation, PolicyConfig, Role
from twostep.lab.simulation.outcome import Moment, RequestLedger, ScalingOutcome, judge
from twostep.lab.simulation.pods import PodCluster, PodsConfig
from twostep.lab.simulation.sampling import AGE_S, Sampler
from twostep.lab.simulation.scalers import JointPolicy, Scaler
from twostep.lab.simulation.traces import LoadTrace
from twostep.lab.simulator.cluster import SimulatedRequest
from twostep.step_curve import chunk_pairs

# How long answers have after the trace's end; nothing is decided and nothing paid in it.
_AFTER_S = 120.0
# Share of what a worker can do that the fleet at the beginning is to use.
_FIRST_UTILIZATION = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The setting that all scalers have in common."""

    cluster: PodsConfig
    policy: PolicyConfig


def simulate(setting: Setting, trace: LoadTrace, requests: Sequence[SimulatedRequest], scaler: Scaler, *, seed: int) -> ScalingOutcome:
    """`requests` are the trace's for this seed; they can be given to any number of simulations."""
    policy = setting.policy
    ledger = RequestLedger(ttft_ms=policy.ttft_ms, tpot_ms=policy.tpot_ms, edge_s=setting.cluster.deployment.edge_s)
    cluster = PodCluster(setting.cluster, requests, ledger, seed=seed)
    cluster.start_with(scaler.start(0.0) or fitting(setting, trace, 0.0))
    cluster.plan_losses(trace.losses)
    sampler = Sampler(cluster, window_s=policy.window_s)
    moments: list[Moment] = []

    def look(now: float, _: Any) -> None:
        sample = sampler.sample(now)
        cluster.at(now + AGE_S, act, sample)
        if now + policy.interval_s < trace.seconds:
            cluster.at(now + policy.interval_s, look)

    def act(now: float, sample: Any) -> None:
        scaler.act(now, sample, cluster)
        moments.append(_moment(now, trace, cluster))

    def close(now: float, _: Any) -> None:
        cluster.pay(now)
        ledger.closed = True

    cluster.at(policy.interval_s - AGE_S, look)
    cluster.at(trace.seconds, close)
    cluster.run(trace.seconds + _AFTER_S)
    return judge(scaler.name, ledger, moments, policy, trace.seconds)


def fitting(setting: Setting, trace: LoadTrace, second: float) -> Mapping[Role, int]:
    """A fleet that carries what the trace offers at `second`, reckoned from its means."""
    deployment, policy = setting.cluster.deployment, setting.policy
    prefill, decode = deployment.spec_of("prefill"), deployment.spec_of("decode")
    rate, prompt, output = trace.rate.at(second), trace.prompts.at(second), trace.outputs.at(second)
    uncached = prompt * (1 - trace.cached)
    pairs = chunk_pairs(round(uncached), round(prompt - uncached))
    prompt_s = prefill.curve.per_row_s * round(uncached) + prefill.curve.per_pair_s * pairs
    prompt_s += prefill.curve.fixed_s * uncached / prefill.step_tokens
    tpot_s = policy.tpot_ms / 1e3
    context = prompt + output / 2
    each = decode.curve.per_sequence_s + decode.curve.per_context_s * context
    seats = min(decode.max_num_seqs, decode.num_tokens / context, max(1.0, (tpot_s - decode.curve.fixed_s) / each))
    needed = {"prefill": rate * prompt_s, "decode": rate * output * tpot_s / seats}
    return {role: min(policy.pool(role).max_workers, max(1, math.ceil(needed[role] / _FIRST_UTILIZATION))) for role in ROLES}


def _moment(now: float, trace: LoadTrace, cluster: PodCluster) -> Moment:
    pods = cluster.pods.values()
    return Moment(
        at_s=now,
        requests_per_s=trace.rate.at(now),
        wanted=dict(cluster.replicas),
        serving={role: sum(pod.serving and pod.role == role for pod in pods) for role in ROLES},
        pods={role: sum(pod.alive and pod.owner == role for pod in pods) for role in ROLES},
    )


def decision_lines(setting: Setting, trace: LoadTrace, requests: Sequence[SimulatedRequest], *, seed: int) -> list[str]:
    """Returns a simulation as a decision log (twostep/autoscaler/decision_log.py), to be replayed through the policy or the service: the
    configuration, then what the joint policy saw and decided, in order."""
    lines = [head_of(setting.policy)]

    def write(observation: Observation, decision: Decision) -> None:
        lines.append(line_of(observation, decision))

    simulate(setting, trace, requests, JointPolicy(setting.policy, on_decision=write), seed=seed)
    return lines
