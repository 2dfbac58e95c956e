"""How many workers there should be: of each role for the load, and in sum, with what is kept and what may be lost. Bounds come later.

    now      the load until the next decision
    ahead    the most of it until a pod asked for now would serve: a cold start and an interval
    kept     `ahead`, and `now` with `hysteresis` more, the most of the last cool-down: nothing below it is taken away
    spare    what carries the load of now with `spare` workers lost, if only just

Where workers can switch roles, what is kept and what is spare is one number for both roles, and a worker of either fills in for any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from twostep.autoscaler.composition import Composition
from twostep.autoscaler.forecast import DecodeLoad, Forecast
from twostep.autoscaler.memory import Memory, Need
from twostep.autoscaler.model import ROLES, Observation, PolicyConfig, Role, WorkerView
from twostep.autoscaler.sizing import OfferedLoad, WorkerSpec, decode_need, prefill_need
from twostep.autoscaler.stability import remember

# Of a prefill worker, while a lost one is missed: it is for a cold start at most.
_SURVIVAL_UTILIZATION = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`now`: workers of each role that the load of now needs; `need`: that are to be there in the end; `total`: of both roles, the sum of
    `need` at least. `shared`: workers can fill in for the other role. `asleep`: nothing came for long, and nothing is needed."""

    now: Mapping[Role, int]
    need: Mapping[Role, int]
    total: int
    shared: bool
    asleep: bool
    ahead: Mapping[Role, int]
    kept: Mapping[Role, int]
    needs: tuple[Need, ...]  # to be remembered


def goal(config: PolicyConfig, memory: Memory, forecast: Forecast, observation: Observation, there: Composition) -> Goal:
    now_s = observation.now_s
    shared = config.switching and (not observation.workers or any(w.can_switch for w in observation.workers))
    idle_s = 0.0 if memory.busy_s is None else now_s - memory.busy_s
    if config.scale_to_zero_after_s > 0.0 and idle_s >= config.scale_to_zero_after_s:
        idle = {role: config.pool(role).min_workers for role in ROLES}
        return Goal(now=idle, need=idle, total=sum(idle.values()), shared=shared, asleep=True, ahead=idle, kept=idle, needs=())
    current: dict[Role, int] = {}
    ahead: dict[Role, int] = {}
    kept: dict[Role, int] = {}
    survival: dict[Role, int] = {}
    decoding = decoding_of(observation.workers)
    just = replace(config, max_utilization=max(config.max_utilization, _SURVIVAL_UTILIZATION))
    # A mean over a window is as old as its middle.
    lag_s = config.window_s / 2
    for role in ROLES:
        spec = memory.specs.get(role, WorkerSpec())
        horizon_s = config.pool(role).cold_start_s + config.interval_s
        correction = memory.corrections.get(role)
        factor = correction.factor if correction is not None else 1.0
        late = backlog_per_s(config, observation, there.ready("prefill"), horizon_s)
        present = demand(forecast, lag_s + config.interval_s, decoding.num_seqs).times(factor).plus(late)
        later = demand(forecast, lag_s + horizon_s, decoding.num_seqs).times(factor).plus(late)
        current[role] = max(config.pool(role).least, sized(config, role, spec, present))
        ahead[role] = max(current[role], sized(config, role, spec, later))
        kept[role] = max(ahead[role], sized(config, role, spec, present.times(1.0 + config.hysteresis)))
        survival[role] = max(1, sized(just, role, spec, present))
    if not shared:
        kept = {role: max(kept[role], survival[role] + config.spare) for role in ROLES}
    total = max(sum(kept.values()), sum(survival.values()) + config.spare)
    need = Need(at_s=now_s, prefill=kept["prefill"], decode=kept["decode"], total=total)
    needs = remember(memory.needs, need, config.cool_down_s)
    full = memory.began_s is not None and now_s - memory.began_s >= config.cool_down_s
    # Nobody is seen of all that were asked for, or not all that is asked: not the moment to ask for fewer.
    unheard = memory.unheard_s is not None and now_s - memory.unheard_s <= config.cool_down_s
    blind = memory.wanted if unheard or not observation.workers else None
    if shared:
        total = max(need.total for need in needs)
        total = total if full else max(total, sum(there.pods.values()))
        total = max(total, blind.pods) if blind is not None else total
        apart = {role: max(ahead[role], blind.workers(role)) for role in ROLES} if blind is not None and unheard else ahead
        # What one role needs beside what the other one keeps.
        total = max(total, sum(apart.values()))
        return Goal(now=current, need=apart, total=total, shared=True, asleep=False, ahead=ahead, kept=kept, needs=needs)
    apart = {role: max(need.of(role) for need in needs) for role in ROLES}
    if not full:
        apart = {role: max(apart[role], there.expected(role)) for role in ROLES}
    if blind is not None:
        apart = {role: max(apart[role], blind.workers(role)) for role in ROLES}
    return Goal(now=current, need=apart, total=sum(apart.values()), shared=False, asleep=False, ahead=ahead, kept=kept, needs=needs)


def sized(config: PolicyConfig, role: Role, spec: WorkerSpec, load: OfferedLoad) -> int:
    return prefill_need(config, spec, load) if role == "prefill" else decode_need(config, spec, load)


def demand(forecast: Forecast, seconds: float, running: int = 0) -> OfferedLoad:
    """The most that is expected from now until then."""
    rate = forecast.requests.ahead(seconds)
    share = 1.0 / rate if rate else 0.0
    prompt = forecast.prompt.ahead(seconds) * share
    return OfferedLoad(
        requests_per_s=rate,
        prompt_tokens=prompt,
        cached_tokens=max(0.0, prompt - forecast.uncached.ahead(seconds) * share),
        output_tokens=forecast.output.ahead(seconds) * share,
        prompt_scv=forecast.prompt_scv,
        # Without its trend: it rises too when a worker comes back and makes up for lost time.
        decoded_per_s=forecast.decoded.now,
        running=running,
    )


def decoding_of(workers: tuple[WorkerView, ...]) -> DecodeLoad:
    """By their curves: a worker that is slow because it has too many sequences gives few tokens for them, and one that nobody has measured
    is not counted."""
    num_seqs, tokens_per_s = 0, 0.0
    for worker in workers:
        if worker.role == "decode" and worker.num_running:
            num_seqs += worker.num_running
            if worker.curve is not None:
                tokens_per_s += worker.num_running / max(1e-4, worker.curve.decode_step_s(worker.num_running, worker.context_tokens))
    return DecodeLoad(num_seqs=num_seqs, tokens_per_s=tokens_per_s)


def backlog_per_s(config: PolicyConfig, observation: Observation, num_ready: int, within_s: float) -> float:
    """Requests a second that come on top if what waits, and cannot be served in time by those that are there, is to be worked off within
    that time. At most as many as come by themselves."""
    traffic = observation.traffic
    uncached = max(1.0, traffic.prompt_tokens - traffic.cached_tokens)
    queued = sum(w.queued_tokens for w in observation.workers if w.role == "prefill") / uncached
    in_time = traffic.requests_per_s * config.ttft_ms / 1e3 + num_ready
    late = traffic.queued_requests + queued - in_time
    return min(traffic.requests_per_s, max(0.0, late / within_s))


def spec_of(workers: tuple[WorkerView, ...], role: Role, known: WorkerSpec | None) -> WorkerSpec:
    """The role's workers by the middle one of those that have measured themselves; without any, what was known before."""
    measured = sorted((w for w in workers if w.role == role and w.curve is not None), key=_slowness)
    if not measured:
        return _by_rate(workers, role, known or WorkerSpec())
    middle = measured[len(measured) // 2]
    return WorkerSpec(
        curve=middle.curve,
        step_tokens=middle.step_tokens,
        max_num_seqs=middle.max_num_seqs,
        num_blocks=middle.num_blocks,
        block_size=middle.block_size,
    )


def _slowness(worker: WorkerView) -> tuple[float, str]:
    assert worker.curve is not None
    return worker.curve.prefill_s(1024, 0, max(1, worker.step_tokens), decodes=0) + worker.curve.decode_step_s(32, 32768), worker.worker_id


def _by_rate(workers: tuple[WorkerView, ...], role: Role, known: WorkerSpec) -> WorkerSpec:
    """Without curves: the most that one of them did while it had more than enough to do."""
    own = [w for w in workers if w.role == role and w.ready]
    if known.curve is not None or not own:
        return known
    busy = [w.tokens_per_s for w in own if w.num_waiting or w.queued_tokens > w.step_tokens]
    first = own[0]
    return WorkerSpec(
        step_tokens=first.step_tokens,
        max_num_seqs=first.max_num_seqs,
        num_blocks=first.num_blocks,
        block_size=first.block_size,
        tokens_per_s=max([known.tokens_per_s, *busy]),
    )
