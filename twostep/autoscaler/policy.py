"""One decision of the autoscaler, for both roles together. Pure: (config, memory, observation) in, (decision, memory) out.

1. See        level and trend of the rates (forecast.py); what a worker of each role can do (its step curve); whether routers told of all
              the load; targets missed although there are enough workers: they are slower than they say
2. Compose    workers by role and owner, pods to come, switches under way, who leaves (composition.py)
3. Aim        workers of each role, and in sum, for the load and with what is kept and what may be lost (sizing.py):

                  now      the load until the next decision
                  ahead    the most of it until a pod asked for now would serve: a cold start and an interval
                  kept     `ahead`, and `now` with `hysteresis` more, the most of the last cool-down: nothing below it is taken away
                  spare    what carries the load of now with `spare` workers lost, if only just

              Where routers refuse what would be late, too few workers cost what is too much, not everybody's target. There `attainment`
              holds over the last hour or so, and `hysteresis` and `spare` are kept only once half of what may be missed was missed

              Where workers can switch roles, what is kept and spare is one number for both: a worker of either fills in for any.
              Where all take work of both roles, so is what is needed: the total is that of the work, and a role only a purpose
4. Limit      bounds, budget, surge: both roles get the same share of what they need (limits.py)
5. Assign     pods of each Deployment, switches, victims; nothing turns round twice in a cool-down (assignment.py)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from twostep.autoscaler.assignment import Assignment, assign
from twostep.autoscaler.composition import Composition, compose
from twostep.autoscaler.forecast import DecodeLoad, Forecast, observe
from twostep.autoscaler.limits import Goal, fit
from twostep.autoscaler.memory import Correction, Course, Memory, Need
from twostep.autoscaler.model import ROLES, Decision, Observation, PolicyConfig, Role, WorkerView, longest_start_s
from twostep.autoscaler.sizing import NeededWorkers, OfferedLoad, WorkerSpec, can_help, needed

# Of a prefill worker, while a lost one is missed: it is for a cold start at most.
_SURVIVAL_UTILIZATION = 0.95
# A correction that nothing confirms halves in this time, and is never more than this.
_CORRECTION_HALF_LIFE_S = 300.0
_MOST_CORRECTION = 1.5
_LEAST_STEP, _MOST_STEP = 0.05, 0.25
# What is missed by chance deviates by so many standard deviations.
_SIGMAS = 2.0
# In which misses are forgotten.
_BUDGET_S = 3600.0
# So many windows there must have been enough: answers that end now may have waited while there were not.
_WINDOWS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A decision, and what the next one is to be given."""

    decision: Decision
    memory: Memory


def decide(config: PolicyConfig, memory: Memory, observation: Observation) -> Step:
    """`observation.now_s` does not go back; a step that does counts as none."""
    now_s = observation.now_s
    decoding = _decoding(config, observation.workers)
    dt_s = 0.0 if memory.at_s is None else max(0.0, now_s - memory.at_s)
    forecast = observe(memory.forecast, observation.traffic, decoding, dt_s, config.window_s)
    reserved = _reserved(config, memory, forecast, both_roles=_both_roles(observation))
    seen = _see(config, reserved, memory, observation, forecast, decoding, dt_s)
    there = compose(config, memory, observation)
    aim, needs = _aim(reserved, seen, observation, forecast, decoding, there)
    fitted = fit(config, aim, there, memory.wanted.pods if memory.wanted is not None else sum(there.pods.values()))
    chosen = assign(config, aim, fitted, there, memory.wanted, memory.courses, now_s)
    wanted = chosen.wanted
    decision = Decision(
        prefill=wanted.prefill,
        decode=wanted.decode,
        replicas={role: wanted.pods_of(role) for role in ROLES},
        switches=chosen.switches,
        victims=chosen.victims,
        reason=_reason(observation, seen, forecast, aim, chosen, there),
        limit=fitted.limit or ("cool_down" if chosen.held else ""),
        needed=dict(aim.ahead),
    )
    after = replace(
        seen,
        needs=needs,
        wanted=wanted,
        courses=_courses(memory, chosen, now_s),
        switching={**there.switching, **{switch.worker_id: (switch.to, now_s) for switch in chosen.switches}},
        victims=chosen.victims,
    )
    return Step(decision=decision, memory=after)


def why_wait(config: PolicyConfig, observation: Observation, decision: Decision, *, oldest_s: float | None, since_s: float) -> str:
    """Returns why `decision` is not to be the first one, that has none before it to go on from; "": it is. `oldest_s`: the instant at which
    the oldest worker began; None: there are none. `since_s`: of the first look.

    While a deployment comes up, perhaps with a Redis that has lost everything, it has pods that nobody here knows of: they load their
    model. Whoever decided by the few that are there would end the others before they came; until there is a decision, KEDA keeps what there
    is.
    Pods that begin together come within a cold start, so that is waited for, unless the load needs more than are there."""
    now_s, cold_start_s = observation.now_s, max(config.pool(role).cold_start_s for role in ROLES)
    if now_s - since_s >= longest_start_s(cold_start_s):
        return ""
    missing = [role for role in ROLES if not any(w.role == role and w.serves for w in observation.workers)]
    if missing:
        return f"no {' and no '.join(missing)} worker serves yet, and how many are coming up is not known"
    if any(decision.needed.get(role, 0) > observation.pods.get(role, 0) for role in ROLES):
        return ""
    if oldest_s is None or now_s - oldest_s < cold_start_s:
        return "workers have only just come up, and others may be about to; the first of them began less than a cold start ago"
    return ""


# ---- 1 see --------------------------------------------------------------------------------------------------------------


def _see(
    config: PolicyConfig,
    reserved: PolicyConfig,
    memory: Memory,
    observation: Observation,
    forecast: Forecast,
    decoding: DecodeLoad,
    dt_s: float,
) -> Memory:
    """Returns what is known after this observation. `reserved`: with the part of the reserve that is kept."""
    now_s, traffic = observation.now_s, observation.traffic
    specs = {role: _spec(observation.workers, role, memory.specs.get(role)) for role in ROLES}
    unheard_s = _unheard_since(config, reserved.hysteresis, memory.unheard_s, forecast, observation)
    busy = traffic.requests_per_s > 0.0 or traffic.queued_requests > 0 or unheard_s == now_s
    busy = busy or any(w.num_running or w.num_waiting or w.queued_tokens for w in observation.workers)
    present = _demand(forecast, 0.0, decoding.num_seqs)
    late = _backlog_per_s(config, observation, config.interval_s)
    corrections: dict[Role, Correction] = {}
    known = {role: memory.corrections.get(role, Correction()) for role in ROLES}
    both_roles = _both_roles(observation)
    sized = needed(config, specs, {role: present.times(known[role].factor) for role in ROLES}, both_roles=both_roles)
    for role in ROLES:
        before = known[role]
        serving = sum(w.serves for w in observation.workers if w.role == role or both_roles)
        enough = serving >= max(1, sized.total if both_roles else sized.of(role))
        enough = enough and not late and can_help(config, role, specs[role], present)
        met = traffic.ttft_met if role == "prefill" else traffic.tpot_met
        corrections[role] = _corrected(config, before, met, traffic.requests_per_s * config.window_s, enough, now_s, dt_s)
    return replace(
        memory,
        began_s=now_s if memory.began_s is None else memory.began_s,
        at_s=now_s if memory.at_s is None else max(now_s, memory.at_s),
        forecast=forecast,
        corrections=corrections,
        specs=specs,
        busy_s=now_s if busy or memory.busy_s is None else memory.busy_s,
        missed=_missed(memory.missed, observation, dt_s),
        unheard_s=unheard_s,
    )


def _corrected(
    config: PolicyConfig, before: Correction, met: float | None, num_answers: float, enough: bool, now_s: float, dt_s: float
) -> Correction:
    """After a window in which the share `met` of about `num_answers` answers was within the target. `enough`: there were as many ready
    workers as sizing asks for, nothing waited beyond its time, and more could help. Where the target is missed all the same, workers are
    slower than their curves (a neighbour on the host, a cold cache, a load of another shape), and the load is counted for more."""
    factor = 1.0 + (before.factor - 1.0) * 0.5 ** (max(0.0, dt_s) / _CORRECTION_HALF_LIFE_S)
    since = (before.enough_s if before.enough_s is not None else now_s) if enough else None
    noise = math.sqrt((1.0 - config.attainment) * config.attainment / max(1.0, num_answers))
    missing = 0.0 if met is None else config.attainment - _SIGMAS * noise - met
    judged = since is not None and now_s - since >= _WINDOWS * config.window_s
    again = before.raised_s is None or now_s - before.raised_s >= config.window_s
    if missing <= 0.0 or not judged or not again or num_answers < 1.0:
        return Correction(factor=factor, raised_s=before.raised_s, enough_s=since)
    factor = min(_MOST_CORRECTION, factor * (1.0 + min(_MOST_STEP, max(_LEAST_STEP, missing))))
    return Correction(factor=factor, raised_s=now_s, enough_s=since)


def _missed(before: float | None, observation: Observation, dt_s: float) -> float | None:
    """Returns the share of answers that missed a target, over the last hour or so."""
    traffic = observation.traffic
    met = [share for share in (traffic.ttft_met, traffic.tpot_met) if share is not None]
    if not met:
        return before
    now = 1.0 - min(met)
    return now if before is None else before - math.expm1(-max(0.0, dt_s) / _BUDGET_S) * (now - before)


def _reserved(config: PolicyConfig, memory: Memory, forecast: Forecast, *, both_roles: bool) -> PolicyConfig:
    """Returns the configuration to size by, as tight as the attainment lets it. Requests that no router refuses get all of the reserve.
    Of those that are refused rather than late, the attainment is to be kept over the last hour or so: half of what may be missed in it is
    missed before there is any reserve, and what is left of it may be missed now. A worker of one role may be the last one that has it:
    there the spare is kept, and the attainment at any time."""
    allowed = 1.0 - config.attainment
    spent = 1.0 if memory.missed is None else min(1.0, max(0.0, memory.missed) / allowed)
    part = 1.0 - forecast.promised * min(1.0, 2.0 * (1.0 - spent))
    reserved = replace(config, hysteresis=part * config.hysteresis)
    if not both_roles:
        return reserved
    left = forecast.promised * (1.0 - spent) * min(allowed, config.attainment / 2)
    return replace(reserved, spare=round(part * config.spare), attainment=config.attainment - left)


def _unheard_since(
    config: PolicyConfig, room: float, before: float | None, forecast: Forecast, observation: Observation
) -> float | None:  # fmt: skip
    """Returns the instant at which more was last known to be asked of workers than routers tell. `before`: as of the decision before. None:
    it is not so, and was not within the last cool-down.

    A router that falls silent and had not said that it leaves has died, or serves on, cut off from Redis. For the two minutes in which its
    windows are still there it is known to be missing. After them its work tells: tokens that workers compute beyond those of requests
    that are metered, beyond chance, and beyond the `room` for more load that is kept anyway. While it is so, and for a cool-down after,
    nobody is taken away."""
    now_s = observation.now_s
    if observation.traffic.silent_routers:
        return now_s
    if before is None or not 0 <= now_s - before <= config.cool_down_s + 2 * config.interval_s:
        return None
    told = forecast.uncached.now + forecast.output.now
    done = sum(worker.tokens_per_s for worker in observation.workers)
    chance = _SIGMAS * math.sqrt((1.0 + forecast.prompt_scv) / max(1.0, forecast.requests.now * config.window_s))
    return now_s if done > (1.0 + max(room, min(config.hysteresis, chance))) * told else before


def _decoding(config: PolicyConfig, workers: tuple[WorkerView, ...]) -> DecodeLoad:
    """By their curves: a worker that is slow because it has too many sequences gives few tokens for them, and one that nobody has measured
    is not counted. Where prompts are computed between tokens, steps take what the target allows."""
    num_seqs, tokens_per_s = 0, 0.0
    for worker in workers:
        if (worker.role == "decode" or worker.both_roles) and worker.num_running:
            num_seqs += worker.num_running
            if worker.curve is not None:
                step_s = worker.curve.decode_step_s(worker.num_running, worker.context_tokens)
                tokens_per_s += worker.num_running / max(1e-4, step_s, config.tpot_ms / 1e3 if worker.both_roles else 0.0)
    return DecodeLoad(num_seqs=num_seqs, tokens_per_s=tokens_per_s)


def _spec(workers: tuple[WorkerView, ...], role: Role, known: WorkerSpec | None) -> WorkerSpec:
    """The role's workers by the middle one of those that have measured themselves; without any, what was known before, or the most that one
    of them did while it had more than enough to do."""
    measured = [
        (w.curve.prefill_s(1024, 0, max(1, w.step_tokens), decodes=0) + w.curve.decode_step_s(32, 32768), w.worker_id, w)
        for w in workers
        if w.role == role and w.curve is not None
    ]
    if measured:
        return _spec_like(sorted(measured)[len(measured) // 2][2])
    known = known or WorkerSpec()
    own = [w for w in workers if w.role == role and w.ready]
    if known.curve is not None or not own:
        return known
    busy = [w.tokens_per_s for w in own if w.num_waiting or w.queued_tokens > w.step_tokens]
    return _spec_like(own[0], tokens_per_s=max([known.tokens_per_s, *busy]))


def _spec_like(worker: WorkerView, *, tokens_per_s: float = 0.0) -> WorkerSpec:
    return WorkerSpec(
        curve=worker.curve,
        step_tokens=worker.step_tokens,
        max_num_seqs=worker.max_num_seqs,
        num_blocks=worker.num_blocks,
        block_size=worker.block_size,
        tokens_per_s=tokens_per_s,
    )


# ---- 3 aim --------------------------------------------------------------------------------------------------------------


def _aim(
    config: PolicyConfig, memory: Memory, observation: Observation, forecast: Forecast, decoding: DecodeLoad, there: Composition
) -> tuple[Goal, tuple[Need, ...]]:
    """Returns the goal, and the needs that are to be remembered: those of the last cool-down that no later one outdoes."""
    now_s = observation.now_s
    scaled = [w for w in observation.workers if w.owner is not None]
    shared = config.switching and (not scaled or any(w.can_switch for w in scaled))
    idle_s = 0.0 if memory.busy_s is None else now_s - memory.busy_s
    if config.scale_to_zero_after_s > 0.0 and idle_s >= config.scale_to_zero_after_s:
        idle = {role: config.pool(role).min_workers for role in ROLES}
        return Goal(now=idle, need=idle, total=sum(idle.values()), shared=shared, asleep=True, ahead=idle, kept=idle), ()
    just = replace(config, max_utilization=max(config.max_utilization, _SURVIVAL_UTILIZATION))
    both_roles = _both_roles(observation)
    # A mean over a window is as old as its middle.
    lag_s = config.window_s / 2
    beside = {role: sum(w.owner is None and w.role == role and w.serves for w in observation.workers) for role in ROLES}
    horizons_s = {role: config.pool(role).cold_start_s + config.interval_s for role in ROLES}
    late = {role: _backlog_per_s(config, observation, horizons_s[role]) for role in ROLES}

    def workers(policy: PolicyConfig, ahead_s: Mapping[Role, float], times: float = 1.0) -> NeededWorkers:
        """For the most load from now until then; without what workers do that no Deployment scales."""
        demands = {
            role: _demand(forecast, lag_s + ahead_s[role], decoding.num_seqs)
            .times(memory.corrections[role].factor)
            .plus(late[role])
            .times(times)
            for role in ROLES
        }
        return needed(policy, memory.specs, demands, both_roles=both_roles).less(beside)

    soon: dict[Role, float] = dict.fromkeys(ROLES, config.interval_s)
    load_now, load_ahead = workers(config, soon), workers(config, horizons_s)
    load_kept, survivors = workers(config, soon, 1.0 + config.hysteresis), workers(just, soon)
    # What a worker is for is changed where a role has less than half of its share of the work: the others do it meanwhile.
    part = 2 if both_roles else 1
    current = {role: max(config.pool(role).least, load_now.of(role) // part) for role in ROLES}
    ahead = {role: max(current[role], load_ahead.of(role) // part) for role in ROLES}
    kept = {role: max(ahead[role], load_kept.of(role) // part) for role in ROLES}
    survival = {role: max(1, survivors.of(role)) for role in ROLES}
    if not shared:
        kept = {role: max(kept[role], survival[role] + config.spare) for role in ROLES}
    total = max(sum(kept.values()), sum(survival.values()) + config.spare)
    if both_roles:
        total = max(sum(kept.values()), *(load.total for load in (load_now, load_ahead, load_kept)), survivors.total + config.spare)
    new = Need(at_s=now_s, prefill=kept["prefill"], decode=kept["decode"], total=total)
    needs = (*(old for old in memory.needs if now_s - old.at_s <= config.cool_down_s and not new.outdoes(old)), new)
    full = memory.began_s is not None and now_s - memory.began_s >= config.cool_down_s
    # Nobody is seen of all that were asked for, or not all that is asked: not the moment to ask for fewer.
    unheard = memory.unheard_s is not None and now_s - memory.unheard_s <= config.cool_down_s
    blind = memory.wanted if unheard or not scaled else None
    if shared:
        total = max(need.total for need in needs)
        total = total if full else max(total, sum(there.pods.values()))
        total = max(total, blind.pods) if blind is not None else total
        apart = {role: max(ahead[role], blind.workers(role)) for role in ROLES} if blind is not None and unheard else ahead
        # What one role needs beside what the other one keeps.
        total = max(total, sum(apart.values()))
    else:
        apart = {role: max(need.of(role) for need in needs) for role in ROLES}
        if not full:
            apart = {role: max(apart[role], there.expected(role)) for role in ROLES}
        if blind is not None:
            apart = {role: max(apart[role], blind.workers(role)) for role in ROLES}
        total = sum(apart.values())
    shares = {role: max(ahead[role], load_ahead.of(role)) for role in ROLES}
    goal = Goal(
        now=current,
        need=apart,
        total=total,
        shared=shared,
        asleep=False,
        ahead=shares,
        kept=kept,
        both_roles=both_roles,
        least=load_now.total,
    )
    return goal, needs


def _both_roles(observation: Observation) -> bool:
    """Returns whether every worker that serves takes work of either role, so that they are one pool."""
    serving = [w for w in observation.workers if w.serves]
    return bool(serving) and all(w.both_roles for w in serving)


def _demand(forecast: Forecast, seconds: float, running: int) -> OfferedLoad:
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
        promised=forecast.promised,
        # Without its trend: it rises too when a worker comes back and makes up for lost time.
        decoded_per_s=forecast.decoded.now,
        running=running,
    )


def _backlog_per_s(config: PolicyConfig, observation: Observation, within_s: float) -> float:
    """Requests a second that come on top if what waits, and cannot be served in time by those that are there, is to be worked off within
    that time. At most as many as come by themselves."""
    traffic = observation.traffic
    uncached = max(1.0, traffic.prompt_tokens - traffic.cached_tokens)
    computing = [w for w in observation.workers if w.role == "prefill" or w.both_roles]
    queued = sum(w.queued_tokens for w in computing) / uncached
    in_time = traffic.requests_per_s * config.ttft_ms / 1e3 + sum(w.ready for w in computing)
    late = traffic.queued_requests + queued - in_time
    return min(traffic.requests_per_s, max(0.0, late / within_s))


# ---- what is left behind ------------------------------------------------------------------------------------------------


def _courses(memory: Memory, chosen: Assignment, now_s: float) -> dict[str, Course]:
    wanted, before = chosen.wanted, memory.wanted or chosen.wanted
    courses: dict[str, Course] = {
        role: memory.courses.get(role, Course()).moved(before.pods_of(role), wanted.pods_of(role), now_s) for role in ROLES
    }
    if chosen.switches:
        courses["switch"] = Course(way=1 if chosen.switches[0].to == "prefill" else -1, turned_s=now_s)
    elif "switch" in memory.courses:
        courses["switch"] = memory.courses["switch"]
    return courses


def _reason(observation: Observation, seen: Memory, forecast: Forecast, aim: Goal, chosen: Assignment, there: Composition) -> str:
    if aim.asleep:
        return "idle: scaled to the least"
    traffic = observation.traffic
    # The level follows what comes; whichever is more is what the workers are for.
    rate = max(forecast.requests.level, traffic.requests_per_s)
    waiting = f", {traffic.queued_requests} waiting," if traffic.queued_requests else ""
    least = f"{aim.least} for both roles" if aim.both_roles else f"{aim.now['prefill']} + {aim.now['decode']}"
    parts = [f"{rate:.3g} requests/s{waiting} need {least}"]
    if aim.ahead != aim.now and not aim.both_roles:
        parts.append(f"{aim.ahead['prefill']} + {aim.ahead['decode']} ahead")
    if aim.total > sum(aim.ahead.values()):
        parts.append(f"{aim.total} with reserve")
    if forecast.promised and seen.missed is not None:
        parts.append(f"{seen.missed:.1%} missed of late")
    if beside := sum(w.owner is None and w.serves for w in observation.workers):
        parts.append(f"beside {beside} that no Deployment scales")
    slow = [f"{role} x{seen.corrections[role].factor:.2f}" for role in ROLES if seen.corrections[role].factor > 1.01]
    if slow:
        parts.append("slower than their curves: " + ", ".join(slow))
    if chosen.switches:
        parts.append(f"{len(chosen.switches)} to {chosen.switches[0].to}")
    if traffic.silent_routers:
        parts.append(f"{traffic.silent_routers} of the routers silent")
    elif seen.unheard_s == observation.now_s:
        parts.append("workers do more than routers told of")
    if num_pending := sum(there.pending.values()):
        parts.append(f"{num_pending} worker{'s' if num_pending > 1 else ''} to come")
    return "; ".join(parts)
