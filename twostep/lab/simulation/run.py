"""One simulation: a trace, a seed and who scales, from a fleet that fits the beginning to the last answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twostep.autoscaler.model import ROLES, PolicyConfig, Role
from twostep.lab.simulation.cluster import Cluster, ClusterConfig
from twostep.lab.simulation.decode_side import DecodeSide
from twostep.lab.simulation.outcome import Ledger, Moment, Outcome, judge
from twostep.lab.simulation.prefill_side import PrefillSide
from twostep.lab.simulation.sampling import AGE_S, Sampler
from twostep.lab.simulation.scalers import Scaler
from twostep.lab.simulation.traces import Requests, Trace
from twostep.step_curve import chunk_pairs

# How long answers have after the trace's end; nothing is decided and nothing paid in it.
_AFTER_S = 120.0
# Share of what a worker can do that the fleet at the beginning is to use.
_FIRST_UTILIZATION = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all scalers have in common."""

    cluster: ClusterConfig
    policy: PolicyConfig


def simulate(setting: Setting, trace: Trace, requests: Requests, scaler: Scaler, *, seed: int) -> Outcome:
    """`requests` are the trace's for this seed; they can be given to any number of simulations."""
    policy = setting.policy
    ledger = Ledger(requests, ttft_ms=policy.ttft_ms, tpot_ms=policy.tpot_ms)
    cluster = Cluster(setting.cluster, requests, ledger, seed=seed)
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


def fitting(setting: Setting, trace: Trace, second: float) -> Mapping[Role, int]:
    """A fleet that carries what the trace offers at `second`, reckoned from its means."""
    hardware, policy = setting.cluster.hardware, setting.policy
    rate, prompt, output = trace.rate.at(second), trace.prompts.at(second), trace.outputs.at(second)
    uncached = prompt * (1 - trace.cached)
    prompt_s = hardware.prompt_s(round(uncached), chunk_pairs(round(uncached), round(prompt - uncached)))
    prompt_s += hardware.prefill.fixed_s * uncached / hardware.prefill_tokens
    tpot_s = policy.tpot_ms / 1e3
    context = prompt + output / 2
    each = hardware.decode.per_sequence_s + hardware.decode.per_context_s * context
    seats = min(hardware.max_num_seqs, hardware.num_tokens / context, max(1.0, (tpot_s - hardware.decode.fixed_s) / each))
    needed = {"prefill": rate * prompt_s, "decode": rate * output * tpot_s / seats}
    return {role: min(policy.pool(role).max_workers, max(1, math.ceil(needed[role] / _FIRST_UTILIZATION))) for role in ROLES}


def _moment(now: float, trace: Trace, cluster: Cluster) -> Moment:
    workers = cluster.workers.values()
    sides = {"prefill": PrefillSide, "decode": DecodeSide}
    return Moment(
        at_s=now,
        requests_per_s=trace.rate.at(now),
        wanted=dict(cluster.replicas),
        serving={role: sum(isinstance(w.side, sides[role]) and w.serving for w in workers) for role in ROLES},
        pods={role: sum(w.alive and w.owner == role for w in workers) for role in ROLES},
    )
