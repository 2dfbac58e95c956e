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

from twostep.autoscaler.composition import Composition
from twostep.autoscaler.goal import Goal
from twostep.autoscaler.limits import Fitted
from twostep.autoscaler.memory import Course, Wanted
from twostep.autoscaler.model import ROLES, PolicyConfig, Role, Switch, WorkerView, other
from twostep.autoscaler.stability import may_move

_REACH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    wanted: Wanted
    switches: tuple[Switch, ...] = ()
    victims: tuple[str, ...] = ()
    held: bool = False  # another number would have been better, but it turned round too lately


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Pods of each Deployment; of those that a Deployment loses, `away` work in the other role; workers that go from decode to prefill
    (below 0: the other way)."""

    pods: Mapping[Role, int]
    away: Mapping[Role, int]
    to_prefill: int


def assign(
    config: PolicyConfig,
    goal: Goal,
    fitted: Fitted,
    there: Composition,
    before: Wanted | None,
    courses: Mapping[str, Course],
    now_s: float,
) -> Assignment:
    search = _Search(config=config, goal=goal, fitted=fitted, there=there, lately=_lately(config, courses.get("switch"), now_s))
    if before is not None and (kept := search.as_it_is(before)) is not None:
        return kept
    # Woken up: whoever waits is not to wait for a cool-down.
    awake = before is None or goal.asleep or (before.prefill and before.decode)
    best: tuple[tuple[float, ...], Wanted, _Choice] | None = None
    free: tuple[float, ...] | None = None
    for choice in search.choices(before):
        wanted = search.outcome(choice)
        if not search.within(wanted) or not search.spared(choice):
            continue
        rank = search.rank(choice, wanted)
        free = rank if free is None else min(free, rank)
        if before is not None and awake and not _may_become(before, wanted, courses, now_s, config.cool_down_s):
            continue
        if best is None or rank < best[0]:
            best = rank, wanted, choice
    if best is None:
        return search.hold(before)
    rank, wanted, choice = best
    victims = search.victims(choice)
    return Assignment(wanted=wanted, switches=search.switches(choice, victims), victims=victims, held=free is not None and free < rank)


def _between(first: int, last: int) -> list[int]:
    """Numbers of pods to look at: both ends, and what is near them."""
    low, high = min(first, last), max(first, last)
    return [num for num in range(low, high + 1) if num - low <= 2 * _REACH or high - num <= 2 * _REACH]


def _lately(config: PolicyConfig, course: Course | None, now_s: float) -> int:
    """Which way workers have been switched within the cool-down: 1 to prefill, -1 to decode, 0 not."""
    if course is None or course.turned_s is None or now_s - course.turned_s >= config.cool_down_s:
        return 0
    return course.way


def _may_become(before: Wanted, after: Wanted, courses: Mapping[str, Course], now_s: float, cool_down_s: float) -> bool:
    """The pods of no Deployment turn round too soon."""
    return may_move(courses.get("prefill"), before.prefill_pods, after.prefill_pods, now_s, cool_down_s) and may_move(
        courses.get("decode"), before.decode_pods, after.decode_pods, now_s, cool_down_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    config: PolicyConfig
    goal: Goal
    fitted: Fitted
    there: Composition
    lately: int

    def as_it_is(self, before: Wanted) -> Assignment | None:
        """Nothing is to be done, as most of the time."""
        there, goal = self.there, self.goal
        expected = {role: there.expected(role) for role in ROLES}
        now = Wanted(
            prefill=expected["prefill"],
            decode=expected["decode"],
            prefill_pods=there.pods["prefill"],
            decode_pods=there.pods["decode"],
        )
        if now != before or now.pods != self.fitted.total or not self.within(now):
            return None
        if any(expected[role] < self.fitted.need[role] or there.ready(role) < goal.now[role] for role in ROLES):
            return None
        return Assignment(wanted=now)

    def hold(self, before: Wanted | None) -> Assignment:
        """Nothing that may be done is within the limits: what was wanted before stands, or what the limits leave."""
        if before is not None and self.within(before):
            return Assignment(wanted=before, held=True)
        need = self.fitted.need
        return Assignment(
            wanted=Wanted(prefill=need["prefill"], decode=need["decode"], prefill_pods=need["prefill"], decode_pods=need["decode"])
        )

    # ---- the choices ------------------------------------------------------------------------------------------------

    def choices(self, before: Wanted | None) -> Iterator[_Choice]:
        there, total = self.there, self.fitted.total
        asked_for = before.pods if before is not None else sum(there.pods.values())
        lows = {role: self.config.pool(role).min_workers for role in ROLES}
        highs = {role: self.config.pool(role).max_workers for role in ROLES}
        need = self.fitted.need
        away = len(there.cells["decode", "prefill"]) - len(there.cells["prefill", "decode"])
        for num_pods in _between(asked_for, total):
            more = num_pods - asked_for
            marks = {there.pods["prefill"], there.pods["prefill"] + more, need["prefill"] + away, num_pods - need["decode"] + away}
            if before is not None:
                marks |= {before.prefill_pods, before.prefill_pods + more}
            least = max(lows["prefill"], num_pods - highs["decode"])
            most = min(highs["prefill"], num_pods - lows["decode"])
            near = {min(most, max(least, mark + step)) for mark in marks for step in range(-_REACH, _REACH + 1)}
            for prefill in sorted(near) if least <= most else ():
                yield from self._ways({"prefill": prefill, "decode": num_pods - prefill})

    def _ways(self, pods: Mapping[Role, int]) -> Iterator[_Choice]:
        """Which workers are lost, and how many switch."""
        ranges: list[range] = []
        for owner in ROLES:
            registered = self._registered_lost(pods, owner)
            at_home, elsewhere = len(self.there.cells[owner, owner]), len(self.there.cells[other(owner), owner])
            ranges.append(range(max(0, registered - at_home), min(registered, elsewhere) + 1))
        for prefill_away in ranges[0]:
            for decode_away in ranges[1]:
                away: dict[Role, int] = {"prefill": prefill_away, "decode": decode_away}
                most = self._switchable(pods, away, "decode")
                least = -self._switchable(pods, away, "prefill")
                for to_prefill in range(least, most + 1):
                    yield _Choice(pods=pods, away=away, to_prefill=to_prefill)

    def _registered_lost(self, pods: Mapping[Role, int], owner: Role) -> int:
        """Counts the registered pods among those that a Deployment loses: Kubernetes takes pods that are not ready first."""
        lost = max(0, self.there.pods[owner] - pods[owner])
        return max(0, lost - self.there.pending[owner])

    def _lost(self, pods: Mapping[Role, int], away: Mapping[Role, int], role: Role, owner: Role) -> int:
        return away[owner] if role != owner else self._registered_lost(pods, owner) - away[owner]

    def _left(self, pods: Mapping[Role, int], away: Mapping[Role, int], role: Role) -> list[WorkerView]:
        return [w for owner in ROLES for w in self.there.cells[role, owner][self._lost(pods, away, role, owner) :]]

    def _switchable(self, pods: Mapping[Role, int], away: Mapping[Role, int], role: Role) -> int:
        if not self.goal.shared:
            return 0
        num = sum(w.can_switch and self.there.is_ready(w) for w in self._left(pods, away, role))
        return min(num, self.config.surge)

    # ---- what comes of one ------------------------------------------------------------------------------------------

    def _final(self, choice: _Choice) -> dict[Role, int]:
        """Workers of each role once all pods are there."""
        final: dict[Role, int] = {}
        for role in ROLES:
            # Pods to come, less those that are given up before they came, and those asked for now.
            change = choice.pods[role] - self.there.pods[role]
            coming = max(0, self.there.pending[role] + change) if change < 0 else self.there.pending[role] + change
            final[role] = len(self._left(choice.pods, choice.away, role)) + coming
        final["prefill"] += choice.to_prefill
        final["decode"] -= choice.to_prefill
        return final

    def outcome(self, choice: _Choice) -> Wanted:
        final = self._final(choice)
        if self.goal.shared:
            # A switch for as long as the other role would have nobody is undone when its pods are there.
            for role in ROLES:
                back = min(self.fitted.need[role] - final[role], final[other(role)] - self.fitted.need[other(role)])
                if back > 0:
                    final[role] += back
                    final[other(role)] -= back
        return Wanted(
            prefill=final["prefill"],
            decode=final["decode"],
            prefill_pods=choice.pods["prefill"],
            decode_pods=choice.pods["decode"],
        )

    def within(self, wanted: Wanted) -> bool:
        pods: dict[Role, int] = {"prefill": wanted.prefill_pods, "decode": wanted.decode_pods}
        workers: dict[Role, int] = {"prefill": wanted.prefill, "decode": wanted.decode}
        for role in ROLES:
            pool = self.config.pool(role)
            if not pool.min_workers <= pods[role] <= pool.max_workers or workers[role] > pool.max_workers:
                return False
        return self.config.affordable(pods)

    def _ready(self, choice: _Choice) -> dict[Role, int]:
        """Workers that serve then. One that is to switch serves in its new role, after its drain."""
        ready: dict[Role, int] = {}
        for role in ROLES:
            ready[role] = sum(self.there.is_ready(w) for w in self._left(choice.pods, choice.away, role))
        ready["prefill"] += choice.to_prefill
        ready["decode"] -= choice.to_prefill
        return ready

    def spared(self, choice: _Choice) -> bool:
        """Whether those that go or switch can be spared: who is left carries the load of now, and with some to spare where workers went the
        other way lately. But bounds and budget come first, and a role that has nobody."""
        there, goal = self.there, self.goal
        forced = self.fitted.total < sum(there.pods.values())
        forced = forced or any(there.pods[role] > self.config.pool(role).max_workers for role in ROLES)
        ready, to_prefill = self._ready(choice), choice.to_prefill
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
        there, need, now = self.there, self.fitted.need, self.goal.now
        final = self._final(choice)
        ready = self._ready(choice)
        quick = self.config.switch_s + self.config.drain_s < min(self.config.pool(role).cold_start_s for role in ROLES)
        begun = sum(abs(choice.pods[role] - there.pods[role]) for role in ROLES)
        at_home = sum(len(there.cells[role, other(role)]) - choice.away[other(role)] for role in ROLES)
        return (
            float(sum(now[role] > 0 and ready[role] <= 0 for role in ROLES)) if quick and not self.goal.asleep else 0.0,
            1.0 - min((final[role] / need[role] for role in ROLES if final[role] < need[role]), default=1.0),
            float(sum(max(0, need[role] - final[role]) for role in ROLES)),
            float(abs(self.fitted.total - wanted.pods)),
            1.0 - min((ready[role] / now[role] for role in ROLES if ready[role] < now[role]), default=1.0) if quick else 0.0,
            float(begun),
            float(abs(choice.to_prefill)),
            self.config.cost(choice.pods),
            sum(need[role] / max(1, final[role]) for role in ROLES),
            float(at_home),
        )

    # ---- who --------------------------------------------------------------------------------------------------------

    def victims(self, choice: _Choice) -> tuple[str, ...]:
        lost: list[WorkerView] = []
        for role in ROLES:
            for owner in ROLES:
                lost += self.there.cells[role, owner][: self._lost(choice.pods, choice.away, role, owner)]
        lost.sort(key=lambda w: (w.ready, w.num_running + w.num_waiting, -w.started_s, w.worker_id))
        return tuple(w.worker_id for w in lost)

    def switches(self, choice: _Choice, victims: tuple[str, ...]) -> tuple[Switch, ...]:
        source: Role = "decode" if choice.to_prefill > 0 else "prefill"
        free = [w for w in self.there.switchable(source) if w.worker_id not in victims]
        return tuple(Switch(worker_id=w.worker_id, to=other(source)) for w in free[: abs(choice.to_prefill)])
