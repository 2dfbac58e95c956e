"""From numbers to pods and workers: how many pods each Deployment is to have, who changes role, and who goes.

A worker that switches keeps its pod, and the pod its Deployment. So with N workers wanted there is a choice: which Deployment gets or
loses a pod, whether what is lost is a worker at home or one that switched, and how many switch. The choices are few; all of them within the
bounds, the budget and the limit on turning round are looked at, and the best by these, in order, is taken:

    no role without a ready worker
    what is needed in the end, then the number wanted
    what is needed now, where a switch is quicker than a pod
    fewest pods begun and ended, then fewest switches
    least price, then extra workers where they relieve most, then workers at home
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from twostep.autoscaler.composition import Composition, cost_of_loss
from twostep.autoscaler.limits import Fitted, Goal
from twostep.autoscaler.memory import Course, Wanted
from twostep.autoscaler.model import ROLES, PolicyConfig, Role, Switch, WorkerView, other

_REACH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    wanted: Wanted
    switches: tuple[Switch, ...] = ()
    victims: tuple[str, ...] = ()
    held: bool = False  # another number would have been better, but it turned round too lately


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """`pods` of each Deployment; of those that a Deployment loses, `away` work in the other role; `to_prefill`: workers that go from decode
    to prefill (below 0: the other way). `final`: workers of each role once all pods are there; `ready`: that serve as soon as those that
    switch have drained; `lost`: registered workers that go."""

    pods: Mapping[Role, int]
    away: Mapping[Role, int]
    to_prefill: int
    final: Mapping[Role, int]
    ready: Mapping[Role, int]
    lost: tuple[WorkerView, ...]


def assign(
    config: PolicyConfig,
    goal: Goal,
    fitted: Fitted,
    there: Composition,
    before: Wanted | None,
    courses: Mapping[str, Course],
    now_s: float,
) -> Assignment:
    # Which way workers have been switched within the cool-down: 1 to prefill, -1 to decode, 0 not.
    switched = courses.get("switch", Course())
    lately = 0 if switched.turned_s is None or now_s - switched.turned_s >= config.cool_down_s else switched.way
    search = _Search(config=config, goal=goal, fitted=fitted, there=there, lately=lately)
    if before is not None and (kept := search.as_it_is(before)) is not None:
        return kept
    # Woken up: whoever waits is not to wait for a cool-down.
    bound = before is not None and (goal.asleep or bool(before.prefill and before.decode))
    best: tuple[tuple[float, ...], Wanted, _Choice] | None = None
    free: tuple[float, ...] | None = None
    for choice in search.choices(before):
        wanted = search.outcome(choice)
        if not search.within(wanted) or not search.spared(choice):
            continue
        rank = search.rank(choice, wanted)
        free = rank if free is None else min(free, rank)
        if before is not None and bound and not _may_become(before, wanted, courses, now_s, config.cool_down_s):
            continue
        if best is None or rank < best[0]:
            best = rank, wanted, choice
    if best is None:
        return search.hold(before)
    rank, wanted, choice = best
    victims = tuple(w.worker_id for w in sorted(choice.lost, key=cost_of_loss))
    return Assignment(wanted=wanted, switches=search.switches(choice, victims), victims=victims, held=free is not None and free < rank)


def _may_become(before: Wanted, after: Wanted, courses: Mapping[str, Course], now_s: float, cool_down_s: float) -> bool:
    """The pods of no Deployment turn round too soon."""
    moves = ((courses.get(role, Course()), before.pods_of(role), after.pods_of(role)) for role in ROLES)
    return all(course.may_move(was, will_be, now_s, cool_down_s) for course, was, will_be in moves)


def _wanted(workers: Mapping[Role, int], pods: Mapping[Role, int]) -> Wanted:
    return Wanted(prefill=workers["prefill"], decode=workers["decode"], prefill_pods=pods["prefill"], decode_pods=pods["decode"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    config: PolicyConfig
    goal: Goal
    fitted: Fitted
    there: Composition
    lately: int

    def as_it_is(self, before: Wanted) -> Assignment | None:
        """Nothing is to be done, as most of the time."""
        expected = {role: self.there.expected(role) for role in ROLES}
        now = _wanted(expected, self.there.pods)
        if now != before or now.pods != self.fitted.total or not self.within(now):
            return None
        if any(expected[role] < self.fitted.need[role] or self.there.ready(role) < self.goal.now[role] for role in ROLES):
            return None
        return Assignment(wanted=now)

    def hold(self, before: Wanted | None) -> Assignment:
        """Nothing that may be done is within the limits: what was wanted before stands, or what the limits leave."""
        if before is not None and self.within(before):
            return Assignment(wanted=before, held=True)
        return Assignment(wanted=_wanted(self.fitted.need, self.fitted.need))

    # ---- the choices ------------------------------------------------------------------------------------------------

    def choices(self, before: Wanted | None) -> Iterator[_Choice]:
        there, total, need = self.there, self.fitted.total, self.fitted.need
        asked_for = before.pods if before is not None else sum(there.pods.values())
        prefill, decode = self.config.prefill, self.config.decode
        away = len(there.cells["decode", "prefill"]) - len(there.cells["prefill", "decode"])
        low, high = min(asked_for, total), max(asked_for, total)
        for num_pods in range(low, high + 1):
            # Both ends, and what is near them.
            if num_pods - low > 2 * _REACH and high - num_pods > 2 * _REACH:
                continue
            more = num_pods - asked_for
            marks = {there.pods["prefill"], there.pods["prefill"] + more, need["prefill"] + away, num_pods - need["decode"] + away}
            if before is not None:
                marks |= {before.prefill_pods, before.prefill_pods + more}
            least = max(prefill.min_workers, num_pods - decode.max_workers)
            most = min(prefill.max_workers, num_pods - decode.min_workers)
            near = {min(most, max(least, mark + step)) for mark in marks for step in range(-_REACH, _REACH + 1)}
            for num_prefill in sorted(near) if least <= most else ():
                yield from self._ways({"prefill": num_prefill, "decode": num_pods - num_prefill})

    def _ways(self, pods: Mapping[Role, int]) -> Iterator[_Choice]:
        """Which workers are lost, and how many switch."""
        there = self.there
        # Registered pods that a Deployment loses: Kubernetes takes pods that are not ready first.
        gone = {owner: max(0, there.pods[owner] - pods[owner] - there.pending[owner]) for owner in ROLES}
        coming = {owner: max(0, there.pending[owner] + pods[owner] - there.pods[owner]) for owner in ROLES}
        ranges: list[range] = []
        for owner in ROLES:
            at_home, elsewhere = len(there.cells[owner, owner]), len(there.cells[other(owner), owner])
            ranges.append(range(max(0, gone[owner] - at_home), min(gone[owner], elsewhere) + 1))
        for prefill_away in ranges[0]:
            for decode_away in ranges[1]:
                away: dict[Role, int] = {"prefill": prefill_away, "decode": decode_away}
                lost: list[WorkerView] = []
                left: dict[Role, list[WorkerView]] = {"prefill": [], "decode": []}
                for (role, owner), cell in there.cells.items():
                    num_lost = away[owner] if role != owner else gone[owner] - away[owner]
                    lost += cell[:num_lost]
                    left[role] += cell[num_lost:]
                ready = {role: sum(there.is_ready(w) for w in left[role]) for role in ROLES}
                may = {role: min(self.config.surge, sum(w.can_switch and there.is_ready(w) for w in left[role])) for role in ROLES}
                least, most = (-may["prefill"], may["decode"]) if self.goal.shared else (0, 0)
                for to_prefill in range(least, most + 1):
                    moved: dict[Role, int] = {"prefill": to_prefill, "decode": -to_prefill}
                    yield _Choice(
                        pods=pods,
                        away=away,
                        to_prefill=to_prefill,
                        final={role: len(left[role]) + coming[role] + moved[role] for role in ROLES},
                        ready={role: ready[role] + moved[role] for role in ROLES},
                        lost=tuple(lost),
                    )

    # ---- what comes of one ------------------------------------------------------------------------------------------

    def outcome(self, choice: _Choice) -> Wanted:
        final, need = dict(choice.final), self.fitted.need
        if self.goal.shared:
            # A switch for as long as the other role would have nobody is undone when its pods are there.
            for role in ROLES:
                back = min(need[role] - final[role], final[other(role)] - need[other(role)])
                if back > 0:
                    final[role] += back
                    final[other(role)] -= back
        return _wanted(final, choice.pods)

    def within(self, wanted: Wanted) -> bool:
        for role in ROLES:
            pool = self.config.pool(role)
            if not pool.min_workers <= wanted.pods_of(role) <= pool.max_workers or wanted.workers(role) > pool.max_workers:
                return False
        return self.config.affordable({role: wanted.pods_of(role) for role in ROLES})

    def spared(self, choice: _Choice) -> bool:
        """Whether those that go or switch can be spared: who is left carries the load of now, and with some to spare where workers went the
        other way lately. But bounds and budget come first, and a role that has nobody."""
        there, goal, ready, to_prefill = self.there, self.goal, choice.ready, choice.to_prefill
        forced = self.fitted.total < sum(there.pods.values())
        forced = forced or any(there.pods[role] > self.config.pool(role).max_workers for role in ROLES)
        if not forced:
            stay: dict[Role, int] = {"prefill": ready["prefill"] - to_prefill, "decode": ready["decode"] + to_prefill}
            if any(stay[role] < min(there.ready(role), goal.now[role]) for role in ROLES):
                return False
        if not to_prefill:
            return True
        source: Role = "decode" if to_prefill > 0 else "prefill"
        least = goal.kept[source] if self.lately * to_prefill < 0 else goal.now[source]
        if self.fitted.need[source] < goal.need[source]:
            least = self.fitted.need[source]
        return ready[source] >= least or (ready[source] >= 1 and abs(to_prefill) == 1 and ready[other(source)] == 1)

    def rank(self, choice: _Choice, wanted: Wanted) -> tuple[float, ...]:
        """The smaller the better."""
        there, need, now, final, ready = self.there, self.fitted.need, self.goal.now, choice.final, choice.ready
        quick = self.config.switch_s + self.config.drain_s < min(self.config.pool(role).cold_start_s for role in ROLES)
        # Where workers of the other role do its work, a shortage is not mended by a switch.
        quick = quick and not self.goal.both_roles
        return (
            float(sum(now[role] > 0 and ready[role] <= 0 for role in ROLES)) if quick and not self.goal.asleep else 0.0,
            1.0 - min((final[role] / need[role] for role in ROLES if final[role] < need[role]), default=1.0),
            float(sum(max(0, need[role] - final[role]) for role in ROLES)),
            float(abs(self.fitted.total - wanted.pods)),
            1.0 - min((ready[role] / now[role] for role in ROLES if ready[role] < now[role]), default=1.0) if quick else 0.0,
            float(sum(abs(choice.pods[role] - there.pods[role]) for role in ROLES)),
            float(abs(choice.to_prefill)),
            self.config.cost(choice.pods),
            sum(need[role] / max(1, final[role]) for role in ROLES),
            float(sum(len(there.cells[role, other(role)]) - choice.away[other(role)] for role in ROLES)),
        )

    def switches(self, choice: _Choice, victims: tuple[str, ...]) -> tuple[Switch, ...]:
        source: Role = "decode" if choice.to_prefill > 0 else "prefill"
        free = [w for w in self.there.switchable(source) if w.worker_id not in victims]
        return tuple(Switch(worker_id=w.worker_id, to=other(source)) for w in free[: abs(choice.to_prefill)])
