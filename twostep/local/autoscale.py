"""Keeps as many workers as the autoscaler wants: what KEDA and a Deployment are on Kubernetes.

1. Once a second the autoscaler is asked (scaler.py); while it does not answer, all stays as it is.
2. Which workers are to start and which are to go is a pure function of that (scaling.py), within the bounds of the machine (capacity.py).
3. A worker that goes gets SIGTERM: its streams have --drain-timeout to end, then routers take them elsewhere. Its place, perhaps
   a GPU, is another's only when it is gone.
4. Which worker has changed its role is told, as who comes and goes is: the autoscaler asks the worker for that itself.
5. A worker that cannot be started is tried again after 10 s, twice that, and so on to five minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from twostep.cluster.cancellation import end_if_cancelled
from twostep.local.scaler import WantedWorkers
from twostep.local.scaling import ROLES, RunningWorker, Scale, changes
from twostep.local.supervisor import Component, Supervisor

_LOOK_EVERY_S = 1.0
_FIRST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 300.0


@dataclass(slots=True)
class _Held:
    """A worker's place, who has it, and in which role it was seen last."""

    worker: RunningWorker
    place: int
    role: str


class LocalAutoscale:
    """run() until it is cancelled; drains that it has begun go on, and end with the supervisor's stop.

    `make(worker_id, role, place)` makes the component of a new worker in one of the places 0 to scale.total - 1, of which `first` have the
    first. `ask` is ScalerClient.wanted, `roles` its roles; `say` takes a line for people."""

    def __init__(
        self,
        scale: Scale,
        supervisor: Supervisor,
        first: Sequence[tuple[str, str]],
        *,
        make: Callable[[str, str, int], Component],
        ask: Callable[[], Awaitable[WantedWorkers | None]],
        roles: Callable[[Sequence[str]], Awaitable[Mapping[str, str]]],
        say: Callable[[str], None],
        look_every_s: float = _LOOK_EVERY_S,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        """`first`: (worker id, role) of those that run already."""
        self._scale, self._supervisor, self._make, self._say = scale, supervisor, make, say
        self._ask, self._roles = ask, roles
        self._look_every_s, self._first_pause_s = look_every_s, first_pause_s
        self._numbers = itertools.count()
        self._held: dict[str, _Held] = {}
        for place, (worker_id, role) in enumerate(first):
            self._held[worker_id] = _Held(RunningWorker(worker_id=worker_id, owner=role, number=next(self._numbers)), place, role)
        self._retiring: dict[str, asyncio.Task[None]] = {}
        # Added and not ready yet.
        self._starting: set[str] = set()
        self._pause_s = dict.fromkeys(ROLES, 0.0)
        self._not_before = dict.fromkeys(ROLES, 0.0)
        self._last: dict[str, int] | None = None

    @property
    def workers(self) -> tuple[RunningWorker, ...]:
        """Those that run, start or drain."""
        return tuple(
            RunningWorker(worker_id=name, owner=held.worker.owner, number=held.worker.number, retiring=name in self._retiring)
            for name, held in self._held.items()
        )

    async def run(self) -> None:
        try:
            while True:
                await self.step()
                await asyncio.sleep(self._look_every_s)
        finally:
            for task in self._retiring.values():
                task.cancel()
            await asyncio.gather(*self._retiring.values(), return_exceptions=True)

    async def step(self) -> None:
        """One look, and what follows from it."""
        self._look_after()
        await self._look_at_roles()
        wanted = await self._ask()
        end_if_cancelled()
        if wanted is None:
            return
        todo = changes(self.workers, wanted.replicas, wanted.victims, self._scale)
        self._tell(wanted)
        for name in todo.retire:
            self._retire(name)
        now = time.monotonic()
        for role in todo.start:
            if now >= self._not_before[role]:
                self._start(role)

    def _look_after(self) -> None:
        """Who is gone, and who has become ready."""
        for name in [name for name, task in self._retiring.items() if task.done()]:
            self._retiring.pop(name).result()
            self._starting.discard(name)
            del self._held[name]
        there = self._supervisor.names
        for name in list(self._starting):
            role = self._held[name].worker.owner
            if self._supervisor.is_ready(name):
                self._starting.discard(name)
                self._pause_s[role] = 0.0
            elif name not in there and name not in self._retiring:
                # The supervisor has said why.
                self._starting.discard(name)
                del self._held[name]
                self._pause_s[role] = min(_LONGEST_PAUSE_S, 2 * self._pause_s[role] or self._first_pause_s)
                self._not_before[role] = time.monotonic() + self._pause_s[role]
                self._say(f"autoscaler: no {role} worker is started for {self._pause_s[role]:g} s")

    async def _look_at_roles(self) -> None:
        for name, role in (await self._roles(list(self._held))).items():
            held = self._held.get(name)
            if held is not None and held.role != role:
                held.role = role
                self._say(f"{name}: a {role} worker now")

    def _retire(self, name: str) -> None:
        self._say(f"{name}: draining, it is not needed any more")
        self._retiring[name] = asyncio.create_task(self._gone(name), name=f"retire {name}")

    async def _gone(self, name: str) -> None:
        begun = time.monotonic()
        await self._supervisor.retire(name)
        self._say(f"{name}: gone, took {time.monotonic() - begun:.1f} s")

    def _start(self, role: str) -> None:
        taken = {held.place for held in self._held.values()}
        place = next(place for place in range(self._scale.total) if place not in taken)
        name = next(name for n in itertools.count() if (name := f"{role}-{n}") not in self._held)
        self._held[name] = _Held(RunningWorker(worker_id=name, owner=role, number=next(self._numbers)), place, role)
        self._starting.add(name)
        self._supervisor.add(self._make(name, role, place))

    def _tell(self, wanted: WantedWorkers) -> None:
        # As the workers' roles are told, not as they were started.
        workers = dict(wanted.workers or wanted.replicas)
        if workers != self._last:
            if self._last is not None or any(self._count(role) != workers[role] for role in ROLES):
                why = f": {wanted.reason}" if wanted.reason else ""
                if sum(workers.values()) > self._scale.total:
                    why += f"; there is room for {self._scale.total} together, so that not all of them are started"
                self._say(f"autoscaler: {workers['prefill']} prefill, {workers['decode']} decode workers wanted{why}")
            self._last = workers

    def _count(self, role: str) -> int:
        return sum(held.role == role and name not in self._retiring for name, held in self._held.items())
