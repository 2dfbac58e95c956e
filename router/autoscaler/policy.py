"""One decision of the autoscaler, for both roles together. Pure: (config, memory, observation) in, (decision, memory) out.

1. Traffic       level and trend of the rates (forecast.py)
2. Need          workers of each role for the load that is there, and for the one at the end of a cold start (sizing.py)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from router.autoscaler.forecast import Forecast, observe
from router.autoscaler.memory import Memory
from router.autoscaler.model import ROLES, Decision, Observation, PolicyConfig, Role, WorkerView
from router.autoscaler.sizing import Demand, WorkerSpec, decode_need, prefill_need


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A decision, and what the next one is to be given."""

    decision: Decision
    memory: Memory


def decide(config: PolicyConfig, memory: Memory, observation: Observation) -> Step:
    now = observation.now_s
    dt_s = 0.0 if memory.at_s is None else now - memory.at_s
    forecast = observe(memory.forecast, observation.traffic, dt_s, config.window_s)
    specs = {role: _spec(observation.workers, role) or memory.specs.get(role) or WorkerSpec() for role in ROLES}
    horizon_s = max(config.pool(role).cold_start_s for role in ROLES) + config.interval_s
    demand = _demand(forecast, observation.workers, horizon_s)
    needed: dict[Role, int] = {
        "prefill": prefill_need(config, specs["prefill"], demand),
        "decode": decode_need(config, specs["decode"], demand),
    }
    counts = {role: min(config.pool(role).max_workers, max(config.pool(role).least, needed[role])) for role in ROLES}
    decision = Decision(prefill=counts["prefill"], decode=counts["decode"], replicas=counts, needed=needed, reason="sized by load")
    return Step(decision=decision, memory=replace(memory, at_s=now, forecast=forecast, specs=specs))


def _spec(workers: tuple[WorkerView, ...], role: Role) -> WorkerSpec | None:
    """The middle one of the role's workers that have a curve."""
    known = sorted((w for w in workers if w.role == role and w.curve is not None), key=lambda w: (w.tokens_per_s, w.worker_id))
    if not known:
        return None
    middle = known[len(known) // 2]
    return WorkerSpec(
        curve=middle.curve,
        step_tokens=middle.step_tokens,
        max_num_seqs=middle.max_num_seqs,
        num_blocks=middle.num_blocks,
        block_size=middle.block_size,
    )


def _demand(forecast: Forecast, workers: tuple[WorkerView, ...], horizon_s: float) -> Demand:
    rate = forecast.requests.ahead(horizon_s)
    share = 1.0 / rate if rate else 0.0
    prompt = forecast.prompt.ahead(horizon_s) * share
    return Demand(
        requests_per_s=rate,
        prompt_tokens=prompt,
        cached_tokens=max(0.0, prompt - forecast.uncached.ahead(horizon_s) * share),
        output_tokens=forecast.output.ahead(horizon_s) * share,
        prompt_scv=forecast.prompt_scv,
        running=sum(w.num_running for w in workers if w.role == "decode"),
    )
