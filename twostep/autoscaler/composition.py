"""Who is there: workers by role and by the Deployment that owns their pod, pods that are still to come, and who is on the way out.

A worker that drains leaves: it is no capacity, and its Deployment has let go of it already. But one that was told to switch drains too, and
comes back in the other role. A pod that its Deployment asked for and that is not registered is to come: in its cold start, or lost, and
then Kubernetes starts it again without being asked. It comes in the role of its Deployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import ROLES, Observation, PolicyConfig, Role, WorkerView, other

# A switch that has not come about after so many intervals beyond its drain has failed.
_PATIENCE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """`cells`: workers that stay, by (role, owner), in the role that they are to have, the least costly to lose first. `pending`: pods to
    come, by owner. `pods`: that each Deployment has, the sum of both. `switching`: switches under way."""

    cells: Mapping[tuple[Role, Role], tuple[WorkerView, ...]]
    pending: Mapping[Role, int]
    pods: Mapping[Role, int]
    switching: Mapping[str, tuple[Role, float]]

    def expected(self, role: Role) -> int:
        """Workers of this role once all that is to come has come."""
        return sum(len(self.cells[role, owner]) for owner in ROLES) + self.pending[role]

    def ready(self, role: Role) -> int:
        return sum(self.is_ready(worker) for owner in ROLES for worker in self.cells[role, owner])

    def is_ready(self, worker: WorkerView) -> bool:
        """Serving, in the role that it is to have."""
        return worker.ready and worker.worker_id not in self.switching

    def switchable(self, role: Role) -> list[WorkerView]:
        """Ready workers of this role that can take the other one: those that would come home first, then those with least to do."""
        free = [w for owner in ROLES for w in self.cells[role, owner] if w.can_switch and self.is_ready(w)]
        return sorted(free, key=lambda w: (w.owner == role, *cost_of_loss(w)))


def cost_of_loss(worker: WorkerView) -> tuple[bool, int, float, str]:
    """Those that do not serve yet cost nothing; then those with the fewest streams, and of these the youngest: its caches are coldest."""
    return worker.ready, worker.num_running + worker.num_waiting, -worker.started_s, worker.worker_id


def compose(config: PolicyConfig, memory: Memory, observation: Observation) -> Composition:
    switching = _under_way(config, memory, observation)
    staying = [w for w in observation.workers if not w.draining or w.worker_id in switching]
    pods: dict[Role, int] = {}
    pending: dict[Role, int] = {}
    cells: dict[tuple[Role, Role], tuple[WorkerView, ...]] = {}
    for owner in ROLES:
        # Those named before are named again.
        own = sorted((w for w in staying if w.owner == owner), key=lambda w: (w.worker_id not in memory.victims, cost_of_loss(w)))
        asked_for = memory.wanted.pods_of(owner) if memory.wanted is not None else len(own)
        pods[owner] = max(0, observation.pods.get(owner, asked_for))
        # Registered beyond what the Deployment asks for: it is shrinking, and takes those that cost least.
        own = own[max(0, len(own) - pods[owner]) :]
        pending[owner] = pods[owner] - len(own)
        for role in ROLES:
            cells[role, owner] = tuple(w for w in own if switching.get(w.worker_id, (w.role,))[0] == role)
    return Composition(cells=cells, pending=pending, pods=pods, switching=switching)


def _under_way(config: PolicyConfig, memory: Memory, observation: Observation) -> dict[str, tuple[Role, float]]:
    """Switches that were asked for and are not done, of workers that are there."""
    latest = config.drain_s + config.switch_s + _PATIENCE * config.interval_s
    now_s, roles = observation.now_s, {w.worker_id: w.role for w in observation.workers}
    return {
        worker_id: (role, told_s)
        for worker_id, (role, told_s) in memory.switching.items()
        if roles.get(worker_id) == other(role) and now_s - told_s <= latest
    }
