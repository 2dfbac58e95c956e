"""Limits a goal to what may be asked for: the bounds of the pools, the budget, and how much at once. Where not everything can be had, both
roles get the same share of what they need, the one that is shorter first, so that neither waits idle for the other. What they need now goes
before what they need a cold start ahead. The spare is given up first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from twostep.autoscaler.composition import Composition
from twostep.autoscaler.model import ROLES, PolicyConfig, Role, other


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`now`: workers of each role that the load of now needs; `ahead`: that it needs a cold start ahead; `need`: that are to be there in
    the end; `total`: of both roles, the sum of `need` at least; `kept`: with hysteresis. `shared`: workers can fill in for the other role.
    `asleep`: nothing came for long, and nothing is needed. `both_roles`: workers take work of either role, so that it is the total that
    carries the load (`least`: that of now), and numbers by role only say what workers are for."""

    now: Mapping[Role, int]
    need: Mapping[Role, int]
    total: int
    shared: bool
    asleep: bool
    ahead: Mapping[Role, int]
    kept: Mapping[Role, int]
    both_roles: bool = False
    least: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A goal within its limits. `limit` names the one that held it back; "": none."""

    need: Mapping[Role, int]
    total: int
    limit: str = ""


def fit(config: PolicyConfig, goal: Goal, there: Composition, asked_for: int) -> Fitted:
    """`asked_for`: pods of both roles that the last decision wanted, or that are there."""
    fitted = _within_cost(config, goal, there, _within_bounds(config, goal, there))
    return _within_surge(config, goal, there, max(asked_for, 0), fitted)


def _floor(config: PolicyConfig, goal: Goal) -> dict[Role, int]:
    return {role: config.pool(role).min_workers if goal.asleep else config.pool(role).least for role in ROLES}


def _within_bounds(config: PolicyConfig, goal: Goal, there: Composition) -> Fitted:
    most = {role: config.pool(role).max_workers for role in ROLES}
    short = min(ROLES, key=lambda role: most[role] / max(1, goal.need[role]))
    share = most[short] / max(1, goal.need[short])
    if share >= 1.0:
        total = min(goal.total, sum(most.values()))
        return Fitted(need=goal.need, total=total, limit="max_workers" if total < goal.total else "")
    floor = _floor(config, goal)
    share_now = min(1.0, *(most[role] / max(1, goal.now[role]) for role in ROLES))
    need: dict[Role, int] = {}
    for role in ROLES:
        part = math.ceil(goal.need[role] * share - 1e-9)
        # Of what is needed now, as much as the other role's bound lets through.
        part = max(part, min(goal.need[role], math.ceil(goal.now[role] * share_now - 1e-9)))
        # Those that are needed and there are not taken away because others cannot be had.
        need[role] = min(most[role], max(floor[role], min(goal.need[role], there.expected(role)), part))
    # Beyond its bound a role gets nothing; the spare, if there was one, still has its place on the other side.
    extra = goal.total - sum(goal.need.values())
    return Fitted(need=need, total=min(sum(need.values()) + extra, sum(most.values())), limit=f"max_workers of {short}")


def _within_cost(config: PolicyConfig, goal: Goal, there: Composition, fitted: Fitted) -> Fitted:
    total, need = fitted.total, fitted.need
    limit = config.beyond(_cheapest(config, need, total))
    if not limit:
        return fitted
    while total > sum(need.values()):
        total -= 1
        still = config.beyond(_cheapest(config, need, total))
        if not still:
            return replace(fitted, total=total, limit=limit)
        limit = still
    start = _floor(config, goal)
    if not goal.shared:
        # Nobody can change sides: those that are there stay.
        kept = {role: max(start[role], min(need[role], goal.need[role], there.expected(role))) for role in ROLES}
        start = kept if config.affordable(kept) else start
    need = _towards(goal, start, need, config.affordable)
    return Fitted(need=need, total=sum(need.values()), limit=limit)


def _cheapest(config: PolicyConfig, need: Mapping[Role, int], total: int) -> dict[Role, int]:
    """`total` workers, `need` of them where they are needed and the others where they cost least."""
    cheap = min(ROLES, key=lambda role: config.pool(role).worker_hour)
    more = min(total - sum(need.values()), config.pool(cheap).max_workers - need[cheap])
    counts = {cheap: need[cheap] + max(0, more), other(cheap): need[other(cheap)]}
    counts[other(cheap)] += total - sum(counts.values())
    return counts


def _within_surge(config: PolicyConfig, goal: Goal, there: Composition, asked_for: int, fitted: Fitted) -> Fitted:
    floor = _floor(config, goal)
    # What is there already is not added: a number that was wanted too low does not end workers that are needed.
    most = max(asked_for + config.surge, sum(there.pods.values()), sum(floor.values()))
    least = min(asked_for - config.surge, sum(config.pool(role).max_workers for role in ROLES))
    if fitted.total < least:
        # Fewer at once; but not more than there may be.
        slower = replace(fitted, total=least, limit=fitted.limit or "surge")
        return slower if config.affordable(_cheapest(config, slower.need, least)) else fitted
    if fitted.total <= most:
        return fitted
    need = fitted.need
    if sum(need.values()) > most:
        start = {role: max(floor[role], min(need[role], there.expected(role))) for role in ROLES}
        need = _towards(goal, start, need, lambda counts: sum(counts.values()) <= most)
    return Fitted(need=need, total=max(most, sum(need.values())), limit=fitted.limit or "surge")


def _towards(
    goal: Goal, start: Mapping[Role, int], need: Mapping[Role, int], allowed: Callable[[Mapping[Role, int]], bool]
) -> dict[Role, int]:
    """From `start` towards `need`, always the role that has the smaller share of what it needs, as long as it is allowed. A worker that the
    load of now needs is not taken for one that the load may need later."""
    counts = dict(start)
    for target in ({role: min(goal.now[role], need[role]) for role in ROLES}, need):
        while short := [role for role in ROLES if counts[role] < target[role]]:
            role = min(short, key=lambda role: counts[role] / target[role])
            if not allowed({**counts, role: counts[role] + 1}):
                break
            counts[role] += 1
    return counts
