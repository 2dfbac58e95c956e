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
    `asleep`: nothing came for long, and nothing is needed."""

    now: Mapping[Role, int]
    need: Mapping[Role, int]
    total: int
    shared: bool
    asleep: bool
    ahead: Mapping[Role, int]
    kept: Mapping[Role, int]


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


def _floor(config: PolicyConfig, goal: Goal, role: Role) -> int:
    return config.pool(role).min_workers if goal.asleep else config.pool(role).least


def _in_use(goal: Goal, there: Composition, role: Role) -> int:
    """Workers that are needed and there: not taken away because others cannot be had."""
    return min(goal.need[role], there.expected(role))


def _within_bounds(config: PolicyConfig, goal: Goal, there: Composition) -> Fitted:
    most = {role: config.pool(role).max_workers for role in ROLES}
    short = min(ROLES, key=lambda role: most[role] / max(1, goal.need[role]))
    share = most[short] / max(1, goal.need[short])
    if share >= 1.0:
        total = min(goal.total, sum(most.values()))
        return Fitted(need=goal.need, total=total, limit="max_workers" if total < goal.total else "")
    share_now = min(1.0, *(most[role] / max(1, goal.now[role]) for role in ROLES))
    need: dict[Role, int] = {}
    for role in ROLES:
        part = math.ceil(goal.need[role] * share - 1e-9)
        # Of what is needed now, as much as the other role's bound lets through.
        part = max(part, min(goal.need[role], math.ceil(goal.now[role] * share_now - 1e-9)))
        need[role] = min(most[role], max(_floor(config, goal, role), _in_use(goal, there, role), part))
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
    start = {role: _floor(config, goal, role) for role in ROLES}
    if not goal.shared:
        # Nobody can change sides: those that are there stay.
        kept = {role: max(start[role], min(need[role], _in_use(goal, there, role))) for role in ROLES}
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
    floor = {role: _floor(config, goal, role) for role in ROLES}
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
    """From `start` towards `need`. A worker that the load of now needs is not taken for one that the load may need later."""
    now = {role: min(goal.now[role], need[role]) for role in ROLES}
    return _grow(_grow(start, now, allowed), need, allowed)


def _grow(start: Mapping[Role, int], need: Mapping[Role, int], allowed: Callable[[Mapping[Role, int]], bool]) -> dict[Role, int]:
    """From `start` towards `need`, always the role that has the smaller share of what it needs, as long as it is allowed."""
    counts = dict(start)
    while True:
        short = [role for role in ROLES if counts[role] < need[role]]
        if not short:
            return counts
        role = min(short, key=lambda role: counts[role] / need[role])
        grown = {**counts, role: counts[role] + 1}
        if not allowed(grown):
            return counts
        counts = grown
