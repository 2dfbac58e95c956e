"""A simulated cluster whose pods come and go: Deployments get a number of pods (`scale`), and workers change roles (`switch`).

A pod is paid from when it is made until it is gone. A lost worker says nothing: routers keep sending until its record has expired, its
Deployment makes another at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from twostep.autoscaler.model import ROLES, PolicyConfig, Role
from twostep.cluster.records import HEARTBEAT_TTL_S
from twostep.lab.simulation.outcome import RequestLedger
from twostep.lab.simulation.traces import WorkerLoss
from twostep.lab.simulator.cluster import (
    PlacementRule,
    SimulatedCluster,
    SimulatedDeployment,
    SimulatedRequest,
    SimulatedWorker,
    shortest_ttft,
)


@dataclass(slots=True, eq=False)
class SimulatedPod:
    """`owner` is the Deployment that made the pod, `role` what its worker does now; `worker` None: it starts, or switches. Instants in
    seconds since the start."""

    number: int
    owner: Role
    role: Role
    created_at: float
    worker: SimulatedWorker | None = None
    alive: bool = True
    ready_at: float = math.inf  # in its present role
    first_ready_at: float = math.inf
    draining: bool = False
    terminating: bool = False
    switch_to: Role | None = None

    @property
    def worker_id(self) -> str:
        return f"{self.owner}-{self.number}"

    @property
    def serving(self) -> bool:
        """Routers may send it something."""
        return self.alive and self.worker is not None and not self.draining


class PodCluster(SimulatedCluster):
    """`deployment` says what workers are like (its numbers of them do not matter), `policy` how long pods take to start, to drain and to
    switch. `max_waiting` requests wait in the routers, each for `max_wait_s`; more, and longer, are refused."""

    def __init__(
        self,
        deployment: SimulatedDeployment,
        policy: PolicyConfig,
        requests: Iterable[SimulatedRequest],
        ledger: RequestLedger,
        *,
        placement: PlacementRule = shortest_ttft,
        seed: int = 0,
        max_waiting: int = 1024,
        max_wait_s: float = 30.0,
    ) -> None:
        super().__init__(deployment, requests, ledger, placement=placement, max_waiting=max_waiting, max_wait_s=max_wait_s)
        self.ledger = ledger
        self.pods: dict[int, SimulatedPod] = {}
        self.replicas: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._policy = policy
        self._rng = random.Random(f"losses/{seed}")
        self._num_pods = 0

    def start_with(self, replicas: Mapping[Role, int]) -> None:
        """A fleet that is up already."""
        for role in ROLES:
            self.replicas[role] = replicas[role]
            for _ in range(replicas[role]):
                self._ready(0.0, self._create(role, 0.0))

    def plan_losses(self, losses: Sequence[WorkerLoss]) -> None:
        for loss in losses:
            self.at(loss.at_s, self._lose, loss.role)

    def scale(self, role: Role, replicas: int, now: float, *, victims: Sequence[str] = ()) -> None:
        """The Deployment of `role` shall have so many pods. As ReplicaSets do, those that are not ready go first, then by deletion cost
        (`victims`, the first first), then the youngest."""
        self.replicas[role] = replicas
        owned = [pod for pod in self.pods.values() if pod.owner == role and pod.alive and not pod.terminating]
        for _ in range(replicas - len(owned)):
            self._start(role, now)
        rank = {worker_id: place for place, worker_id in enumerate(victims)}
        owned.sort(key=lambda pod: (pod.worker is not None, rank.get(pod.worker_id, len(rank)), -pod.created_at))
        for pod in owned[: max(0, len(owned) - replicas)]:
            pod.terminating = True
            if pod.worker is None and pod.switch_to is None:
                self._remove(now, pod)
            else:
                self._drain(now, pod, self._policy.drain_s, None)

    def switch(self, worker_id: str, to: Role, now: float, *, drain_s: float) -> bool:
        """False: it cannot now."""
        pod = next((pod for pod in self.pods.values() if pod.worker_id == worker_id), None)
        if pod is None or not pod.serving or pod.role == to:
            return False
        self._drain(now, pod, drain_s, to)
        return True

    def pay(self, now: float) -> None:
        """At the end: what the pods that are there have cost."""
        for pod in self.pods.values():
            if pod.alive:
                self.ledger.paid(pod.owner, now - pod.created_at)

    # ---- a pod's life -----------------------------------------------------------------------------------------------

    def _create(self, role: Role, now: float) -> SimulatedPod:
        self._num_pods += 1
        pod = SimulatedPod(number=self._num_pods, owner=role, role=role, created_at=now)
        self.pods[pod.number] = pod
        return pod

    def _start(self, role: Role, now: float) -> None:
        self.at(now + self._policy.pool(role).cold_start_s, self._ready, self._create(role, now))

    def _ready(self, now: float, pod: SimulatedPod) -> None:
        """It serves in its role."""
        if not pod.alive or pod.terminating:
            return
        pod.worker = self.add_worker(pod.role)
        pod.ready_at = now
        pod.first_ready_at = min(pod.first_ready_at, now)
        pod.draining, pod.switch_to = False, None
        self.place_waiting(now)

    def _drain(self, now: float, pod: SimulatedPod, drain_s: float, to: Role | None) -> None:
        """Nothing new comes; what runs has `drain_s`. `to`: in order to take this role, else to end."""
        pod.draining, pod.switch_to = True, to
        if pod.worker is None:
            self._drained(now, pod)
            return
        self.hide(pod.worker)
        self.at(now + drain_s, self._drain_over, (pod, pod.worker))
        self.left(pod.worker, now)

    def _drain_over(self, now: float, argument: tuple[SimulatedPod, SimulatedWorker]) -> None:
        pod, worker = argument
        if pod.alive and pod.worker is worker and pod.draining:
            self._drained(now, pod)

    def left(self, worker: SimulatedWorker, now: float) -> None:
        if worker.running or not worker.alive:
            return
        for pod in [pod for pod in self.pods.values() if pod.worker is worker and pod.draining]:
            self._drained(now, pod)

    def _drained(self, now: float, pod: SimulatedPod) -> None:
        worker, pod.worker = pod.worker, None
        if worker is not None:
            self.close(worker, now)
        if pod.switch_to is None:
            self._remove(now, pod)
        else:
            pod.role, pod.draining = pod.switch_to, False
            self.at(now + self._policy.switch_s, self._ready, pod)

    def _lose(self, now: float, role: Role) -> None:
        there = [pod for pod in self.pods.values() if pod.serving and pod.role == role]
        if not there:
            return
        pod = self._rng.choice(there)
        assert pod.worker is not None
        pod.worker.lost_at = now
        pod.alive = False
        self.ledger.lost_at.append(now)
        self.ledger.paid(pod.owner, now - pod.created_at)
        self._start(pod.owner, now)
        self.at(now + HEARTBEAT_TTL_S, self._notice, pod)

    def _notice(self, now: float, pod: SimulatedPod) -> None:
        del self.pods[pod.number]
        assert pod.worker is not None
        self.close(pod.worker, now)

    def _remove(self, now: float, pod: SimulatedPod) -> None:
        pod.alive = False
        self.ledger.paid(pod.owner, now - pod.created_at)
        del self.pods[pod.number]
