"""One simulation: a trace, a seed and who scales, from a fleet that fits the beginning to the last answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from twostep.autoscaler.decision_log import head_of, line_of
from twostep.autoscaler.model import ROLES, Decision, Observation, PolicyConfig, Role
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.plan.goodput import promising, routed
from twostep.lab.plan.planner import decode_rate, prompt_work_s
from twostep.lab.simulation.outcome import Asked, RequestLedger, ScalingOutcome, judge
from twostep.lab.simulation.pods import PodCluster
from twostep.lab.simulation.sampling import AGE_S, Sampler
from twostep.lab.simulation.scalers import JointPolicy, Scaler
from twostep.lab.simulation.traces import LoadTrace
from twostep.lab.simulator.cluster import SimulatedDeployment, SimulatedRequest, shortest_ttft

# How long answers have after the trace's end; nothing is decided and nothing paid in it.
_AFTER_S = 120.0
# Share of what a worker can do that the fleet at the beginning is to use, and the requests that say what that is.
_FIRST_UTILIZATION = 0.6
_FIRST_REQUESTS = 500


def simulate(
    deployment: SimulatedDeployment,
    policy: PolicyConfig,
    trace: LoadTrace,
    requests: Sequence[SimulatedRequest],
    scaler: Scaler,
    *,
    seed: int,
    refusing: bool = True,
) -> ScalingOutcome:
    """`requests` are the trace's for this seed; they can be given to any number of simulations. `policy` is what all scalers are judged
    by, and how long pods take. `refusing`: requests name their targets, and routers refuse what would miss them."""
    ledger = RequestLedger(policy, edge_s=deployment.edge_s)
    targets = LatencyTargets(ttft_ms=policy.ttft_ms, tpot_ms=policy.tpot_ms)
    if refusing or deployment.both_roles:
        placement = routed(targets, deployment.hand_over, refusing=refusing, both_roles=deployment.both_roles)
    else:
        placement = shortest_ttft
    cluster = PodCluster(promising(deployment, targets), policy, requests, ledger, placement=placement, seed=seed)
    cluster.start_with(_fitting(deployment, policy, trace.rate.at(0.0), requests[:_FIRST_REQUESTS]))
    cluster.plan_losses(trace.losses)
    sampler = Sampler(cluster, window_s=policy.window_s, refusing=refusing)
    asked: dict[Role, Asked] = {role: [] for role in ROLES}

    def look(now: float, _: Any) -> None:
        sample = sampler.sample(now)
        cluster.at(now + AGE_S, act, sample)
        if now + policy.interval_s < trace.seconds:
            cluster.at(now + policy.interval_s, look)

    def act(now: float, sample: Any) -> None:
        scaler.act(now, sample, cluster)
        for role in ROLES:
            asked[role].append((now, cluster.replicas[role]))

    def close(now: float, _: Any) -> None:
        cluster.pay(now)
        ledger.closed = True

    cluster.at(policy.interval_s - AGE_S, look)
    cluster.at(trace.seconds, close)
    cluster.run(trace.seconds + _AFTER_S)
    return judge(scaler.name, ledger, asked, policy)


def _fitting(deployment: SimulatedDeployment, policy: PolicyConfig, rate: float, sample: Sequence[SimulatedRequest]) -> dict[Role, int]:
    """A fleet that carries `rate` requests a second like those of `sample`."""
    if not sample:
        return dict.fromkeys(ROLES, 1)
    needed = {
        "prefill": rate * prompt_work_s(deployment.spec_of("prefill"), sample),
        "decode": rate / decode_rate(deployment.spec_of("decode"), sample, LatencyTargets(tpot_ms=policy.tpot_ms)),
    }
    return {role: min(policy.pool(role).max_workers, max(1, math.ceil(needed[role] / _FIRST_UTILIZATION))) for role in ROLES}


def decision_lines(
    deployment: SimulatedDeployment,
    policy: PolicyConfig,
    trace: LoadTrace,
    requests: Sequence[SimulatedRequest],
    *,
    seed: int,
    refusing: bool = True,
) -> list[str]:
    """Returns a simulation as a decision log (twostep/autoscaler/decision_log.py), to be replayed through the policy or the service: the
    configuration, then what the joint policy saw and decided, in order."""
    lines = [head_of(policy)]

    def write(observation: Observation, decision: Decision) -> None:
        lines.append(line_of(observation, decision))

    simulate(deployment, policy, trace, requests, JointPolicy(policy, on_decision=write), seed=seed, refusing=refusing)
    return lines
