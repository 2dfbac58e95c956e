"""One decision of the autoscaler, for both roles together. Pure: (config, memory, observation) in, (decision, memory) out.

1. Traffic       level and trend of the rates (forecast.py); what a worker of each role can do (its step curve)
2. Correction    targets missed although there are enough workers: they are slower than they say (correction.py)
3. There         workers by role and owner, pods to come, switches under way, who leaves (composition.py)
4. Goal          workers needed now and a cold start ahead, kept for a cool-down, spare (goal.py, by sizing.py)
5. Limits        bounds, budget, surge: both roles get the same share of what they need (limits.py)
6. Assignment    pods of each Deployment, switches, victims; nothing turns round twice in a cool-down (assignment.py, stability.py)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twostep.autoscaler.assignment import Assignment, assign
from twostep.autoscaler.composition import Composition, compose
from twostep.autoscaler.correction import corrected
from twostep.autoscaler.forecast import Forecast, observe
from twostep.autoscaler.goal import Goal, backlog_per_s, decoding_of, demand, goal, sized, spec_of
from twostep.autoscaler.limits import Fitted, fit
from twostep.autoscaler.memory import Correction, Course, Memory, Wanted
from twostep.autoscaler.model import ROLES, Decision, Observation, PolicyConfig, Role
from twostep.autoscaler.sizing import can_help
from twostep.autoscaler.stability import moved
from twostep.autoscaler.unheard import unheard_since


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A decision, and what the next one is to be given."""

    decision: Decision
    memory: Memory


def decide(config: PolicyConfig, memory: Memory, observation: Observation) -> Step:
    """`observation.now_s` does not go back; a step that does counts as none."""
    now_s = observation.now_s
    seen = _see(config, memory, observation)
    there = compose(config, memory, observation)
    aim = goal(config, seen, _known(seen.forecast), observation, there)
    asked_for = memory.wanted.pods if memory.wanted is not None else sum(there.pods.values())
    fitted = fit(config, aim, there, asked_for)
    chosen = assign(config, aim, fitted, there, memory.wanted, memory.courses, now_s)
    wanted = chosen.wanted
    replicas: dict[Role, int] = {"prefill": wanted.prefill_pods, "decode": wanted.decode_pods}
    decision = Decision(
        prefill=wanted.prefill,
        decode=wanted.decode,
        replicas=replicas,
        switches=chosen.switches,
        victims=chosen.victims,
        reason=_reason(observation, seen, aim, chosen, there),
        limit=_limit(fitted, chosen),
        needed=dict(aim.ahead),
    )
    after = replace(
        seen,
        needs=aim.needs,
        wanted=wanted,
        courses=_courses(memory, wanted, chosen, now_s),
        switching={**there.switching, **{switch.worker_id: (switch.to, now_s) for switch in chosen.switches}},
        victims=chosen.victims,
    )
    return Step(decision=decision, memory=after)


def _courses(memory: Memory, wanted: Wanted, chosen: Assignment, now_s: float) -> dict[str, Course]:
    before = memory.wanted or wanted
    courses = {
        "prefill": moved(memory.courses.get("prefill"), before.prefill_pods, wanted.prefill_pods, now_s),
        "decode": moved(memory.courses.get("decode"), before.decode_pods, wanted.decode_pods, now_s),
    }
    if chosen.switches:
        courses["switch"] = Course(way=1 if chosen.switches[0].to == "prefill" else -1, turned_s=now_s)
    elif "switch" in memory.courses:
        courses["switch"] = memory.courses["switch"]
    return courses


def _see(config: PolicyConfig, memory: Memory, observation: Observation) -> Memory:
    """Steps 1 and 2: what is known after this observation."""
    now_s, traffic = observation.now_s, observation.traffic
    dt_s = 0.0 if memory.at_s is None else max(0.0, now_s - memory.at_s)
    decoding = decoding_of(observation.workers)
    forecast = observe(memory.forecast, traffic, decoding, dt_s, config.window_s)
    specs = {role: spec_of(observation.workers, role, memory.specs.get(role)) for role in ROLES}
    busy = traffic.requests_per_s > 0.0 or traffic.queued_requests > 0
    unheard_s = unheard_since(config, memory.unheard_s, forecast, observation)
    busy = busy or unheard_s == now_s or any(w.num_running or w.num_waiting or w.queued_tokens for w in observation.workers)
    corrections: dict[Role, Correction] = {}
    present = demand(forecast, 0.0, decoding.num_seqs)
    ready = sum(w.ready and w.role == "prefill" for w in observation.workers)
    late = backlog_per_s(config, observation, ready, config.interval_s)
    for role in ROLES:
        before = memory.corrections.get(role, Correction())
        serving = sum(w.ready and not w.draining for w in observation.workers if w.role == role)
        enough = serving >= max(1, sized(config, role, specs[role], present.times(before.factor)))
        corrections[role] = corrected(
            config,
            before,
            met=traffic.ttft_met if role == "prefill" else traffic.tpot_met,
            num_answers=traffic.requests_per_s * config.window_s,
            enough=enough and not late and can_help(config, role, specs[role], present),
            now_s=now_s,
            dt_s=dt_s,
        )
    return replace(
        memory,
        began_s=now_s if memory.began_s is None else memory.began_s,
        at_s=now_s if memory.at_s is None else max(now_s, memory.at_s),
        forecast=forecast,
        corrections=corrections,
        specs=specs,
        busy_s=now_s if busy or memory.busy_s is None else memory.busy_s,
        unheard_s=unheard_s,
    )


def _known(forecast: Forecast | None) -> Forecast:
    assert forecast is not None
    return forecast


def _limit(fitted: Fitted, chosen: Assignment) -> str:
    return fitted.limit or ("cool_down" if chosen.held else "")


def _reason(observation: Observation, seen: Memory, aim: Goal, chosen: Assignment, there: Composition) -> str:
    if aim.asleep:
        return "idle: scaled to the least"
    # The level follows what comes; whichever is more is what the workers are for.
    rate = max(_known(seen.forecast).requests.level, observation.traffic.requests_per_s)
    waiting = f", {observation.traffic.queued_requests} waiting," if observation.traffic.queued_requests else ""
    parts = [f"{rate:.3g} requests/s{waiting} need {aim.now['prefill']} + {aim.now['decode']}"]
    if aim.ahead != aim.now:
        parts.append(f"{aim.ahead['prefill']} + {aim.ahead['decode']} ahead")
    if aim.total > sum(aim.ahead.values()):
        parts.append(f"{aim.total} with reserve")
    slow = [f"{role} x{seen.corrections[role].factor:.2f}" for role in ROLES if seen.corrections[role].factor > 1.01]
    if slow:
        parts.append("slower than their curves: " + ", ".join(slow))
    if chosen.switches:
        parts.append(f"{len(chosen.switches)} to {chosen.switches[0].to}")
    if observation.traffic.silent_routers:
        parts.append(f"{observation.traffic.silent_routers} of the routers silent")
    elif seen.unheard_s == observation.now_s:
        parts.append("workers do more than routers told of")
    if any(there.pending.values()):
        num_pending = sum(there.pending.values())
        parts.append(f"{num_pending} worker{'s' if num_pending > 1 else ''} to come")
    return "; ".join(parts)
