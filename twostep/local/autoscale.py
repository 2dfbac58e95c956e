"""Keeps as many workers as the autoscaler wants: what KEDA and a Deployment are on Kubernetes.

1. Once a second the autoscaler is asked as KEDA asks it (ScalerClient); while it does not answer, all stays as it is. Which workers should
   go first stands in Redis, where Kubernetes would be told by marks on their pods.
2. Which workers are to start and which are to go is a pure function of that (changes), within the bounds of the machine (machine.py). A
   worker counts for the role that it was started in, whichever it has now: as a pod counts for its Deployment.
3. A worker that goes gets SIGTERM: its streams have --drain-timeout to end, then routers take them elsewhere. Its place, perhaps
   a GPU, is another's only when it is gone.
4. Which worker has changed its role is told, as who comes and goes is: the autoscaler asks the worker for that itself.
5. A worker that cannot be started is tried again after 10 s, twice that, and so on to five minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import grpc
import grpc.aio
import redis.exceptions

from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.connection import connect
from twostep.cluster.records import WorkerRecord, worker_key
from twostep.cluster.scaling import DECISION_KEY, MAX_DECISION_BYTES, ScalingRecord
from twostep.cluster.signed import DECISIONS, RECORDS, Signer
from twostep.errors import InvalidRequest, Unauthenticated
from twostep.keys.secret import DeploymentSecret
from twostep.local.supervisor import Component, Supervisor
from twostep.rpc.channel import channel_options
from twostep.rpc.keda import externalscaler_pb2, externalscaler_pb2_grpc

ROLES = ("prefill", "decode")
_TIMEOUT_S = 2.0
# Rounding of a binary fraction is no worker.
_EPSILON = 1e-9
_LOOK_EVERY_S = 1.0
_FIRST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 300.0


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


@dataclass(slots=True, kw_only=True)
class RunningWorker:
    """A worker that runs, starts or drains: started in the role `owner`, seen last in `role`. `number` grows from one start to the next."""

    worker_id: str
    owner: str
    number: int
    retiring: bool = False
    place: int = 0
    role: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorkers:
    """Workers to be had that were started in each role, and of each role, whichever they were started in (empty: that is not known); worker
    ids that should go first; why, in a line."""

    replicas: Mapping[str, int]
    workers: Mapping[str, int] = field(default_factory=dict)
    victims: tuple[str, ...] = ()
    reason: str = ""


class ScalerClient:
    """Needs a running event loop. `address` of the autoscaler's gRPC port on this machine."""

    def __init__(self, address: str, redis_url: str, secret: DeploymentSecret) -> None:
        self._channel = grpc.aio.insecure_channel(address, [*channel_options(), ("grpc.enable_http_proxy", 0)])
        self._stub: externalscaler_pb2_grpc.ExternalScalerAsyncStub = externalscaler_pb2_grpc.ExternalScalerStub(self._channel)
        self._redis = connect(redis_url)
        self._of_records, self._of_decisions = Signer(secret, RECORDS), Signer(secret, DECISIONS)
        self.trouble = ""
        """Why there was no answer the last time; empty: there was one."""

    async def wanted(self) -> WantedWorkers | None:
        """None: it does not answer, or has nothing to say that is recent. What there is stays then."""
        try:
            replicas = {role: await self._metric(role) for role in ROLES}
        except grpc.RpcError as error:
            self.trouble = error.details() or error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
            return None
        self.trouble = ""
        record = await self._decision()
        if record is None:
            return WantedWorkers(replicas=replicas)
        return WantedWorkers(replicas=replicas, workers=record.wanted, victims=record.victims, reason=record.reason)

    async def roles(self, worker_ids: Sequence[str]) -> dict[str, str]:
        """In which role each of them serves now. Those are missing that nobody knows, such as one that starts."""
        found: dict[str, str] = {}
        try:
            for raw in await self._redis.mget([worker_key(worker_id) for worker_id in worker_ids]):
                if raw is not None:
                    record = WorkerRecord.from_json(self._of_records.read_object(cast(bytes, raw)))
                    found[record.worker_id] = record.role
        except (redis.exceptions.RedisError, OSError, InvalidRequest, Unauthenticated):
            # What has changed is said a second later.
            return {}
        return found

    async def close(self) -> None:
        await self._channel.close()
        await self._redis.aclose()

    async def _metric(self, role: str) -> int:
        ref = externalscaler_pb2.ScaledObjectRef(name=role, namespace="local", scalerMetadata={"role": role})
        request = externalscaler_pb2.GetMetricsRequest(scaledObjectRef=ref)
        response = await self._stub.GetMetrics(request, timeout=_TIMEOUT_S)
        (value,) = response.metricValues
        return math.ceil((value.metricValueFloat or value.metricValue) - _EPSILON)

    async def _decision(self) -> ScalingRecord | None:
        try:
            raw = await self._redis.getrange(DECISION_KEY, 0, MAX_DECISION_BYTES)
            return ScalingRecord.from_redis(cast(bytes, raw), self._of_decisions)
        except (redis.exceptions.RedisError, OSError, InvalidRequest):
            return None


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first`: (worker id, role) of those that run already."""
        self._scale, self._supervisor, self._make, self._say = scale, supervisor, make, say
        self._ask, self._roles = ask, roles
        self._clock = clock
        self._numbers = itertools.count()
        self._held: dict[str, RunningWorker] = {}
        for place, (worker_id, role) in enumerate(first):
            self._hold(worker_id, role, place)
        self._retiring: dict[str, asyncio.Task[None]] = {}
        # Added and not ready yet.
        self._starting: set[str] = set()
        self._pause_s = dict.fromkeys(ROLES, 0.0)
        self._not_before = dict.fromkeys(ROLES, 0.0)
        self._last: dict[str, int] | None = None

    async def run(self) -> None:
        try:
            while True:
                await self.step()
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            for task in self._retiring.values():
                task.cancel()
            await asyncio.gather(*self._retiring.values(), return_exceptions=True)

    async def step(self) -> None:
        self._look_after()
        await self._look_at_roles()
        wanted = await self._ask()
        end_if_cancelled()
        if wanted is None:
            return
        todo = changes(tuple(self._held.values()), wanted.replicas, wanted.victims, self._scale)
        self._tell(wanted)
        for name in todo.retire:
            self._retire(name)
        now = self._clock()
        for role in todo.start:
            if now >= self._not_before[role]:
                self._start(role)

    def _look_after(self) -> None:
        for name in [name for name, task in self._retiring.items() if task.done()]:
            self._retiring.pop(name).result()
            self._starting.discard(name)
            del self._held[name]
        there = self._supervisor.names
        for name in list(self._starting):
            role = self._held[name].owner
            if self._supervisor.is_ready(name):
                self._starting.discard(name)
                self._pause_s[role] = 0.0
            elif name not in there and name not in self._retiring:
                # The supervisor has said why.
                self._starting.discard(name)
                del self._held[name]
                self._pause_s[role] = min(_LONGEST_PAUSE_S, 2 * self._pause_s[role] or _FIRST_PAUSE_S)
                self._not_before[role] = self._clock() + self._pause_s[role]
                self._say(f"autoscaler: no {role} worker is started for {self._pause_s[role]:g} s")

    async def _look_at_roles(self) -> None:
        for name, role in (await self._roles(list(self._held))).items():
            held = self._held.get(name)
            if held is not None and held.role != role:
                held.role = role
                self._say(f"{name}: a {role} worker now")

    def _hold(self, name: str, role: str, place: int) -> None:
        self._held[name] = RunningWorker(worker_id=name, owner=role, number=next(self._numbers), place=place, role=role)

    def _retire(self, name: str) -> None:
        self._held[name].retiring = True
        self._say(f"{name}: draining, it is not needed any more")
        self._retiring[name] = asyncio.create_task(self._gone(name), name=f"retire {name}")

    async def _gone(self, name: str) -> None:
        begun = self._clock()
        await self._supervisor.retire(name)
        self._say(f"{name}: gone, took {self._clock() - begun:.1f} s")

    def _start(self, role: str) -> None:
        taken = {held.place for held in self._held.values()}
        place = next(place for place in range(self._scale.total) if place not in taken)
        name = next(name for n in itertools.count() if (name := f"{role}-{n}") not in self._held)
        self._hold(name, role, place)
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
        return sum(held.role == role and not held.retiring for held in self._held.values())
