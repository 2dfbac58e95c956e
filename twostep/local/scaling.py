"""Decides what is to be done so that there are as many workers as are wanted: which to start, which to retire. Pure.

A worker counts for the role that it was started in, whichever it has now: as a pod counts for its Deployment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds the workers started in one role."""

    least: int
    most: int

    def clamp(self, count: int) -> int:
        return max(self.least, min(self.most, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many workers there may be of each role, and of both together, those on their way out included."""

    prefill: Bounds
    decode: Bounds
    total: int

    def of(self, role: str) -> Bounds:
        return self.prefill if role == "prefill" else self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    """A worker that runs, starts or drains. `number` grows from one start to the next."""

    worker_id: str
    owner: str
    number: int
    retiring: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Roles to start a worker in, one for each, and worker ids to retire."""

    start: tuple[str, ...] = ()
    retire: tuple[str, ...] = ()


def changes(running: Sequence[RunningWorker], wanted: Mapping[str, int], victims: Sequence[str], scale: Scale) -> Changes:
    """`victims` go first, in their order, then who came last. A place is free only when whoever had it is gone."""
    target = {role: scale.of(role).clamp(wanted[role]) for role in ROLES}
    staying = {role: [worker for worker in running if worker.owner == role and not worker.retiring] for role in ROLES}
    retire: list[str] = []
    for role in ROLES:
        surplus = len(staying[role]) - target[role]
        if surplus > 0:
            order = {worker_id: place for place, worker_id in enumerate(victims)}
            leaving = sorted(staying[role], key=lambda worker: (order.get(worker.worker_id, len(order)), -worker.number))
            retire += [worker.worker_id for worker in leaving[:surplus]]
    missing = {role: max(0, target[role] - len(staying[role])) for role in ROLES}
    start: list[str] = []
    for _ in range(scale.total - len(running)):
        # Whoever lacks the larger share of what it is to have.
        role = max(ROLES, key=lambda role: missing[role] / max(1, target[role]))
        if not missing[role]:
            break
        missing[role] -= 1
        start.append(role)
    return Changes(start=tuple(start), retire=tuple(retire))
