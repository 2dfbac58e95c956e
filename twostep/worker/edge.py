"""Defines what a role adds to a worker: its services, what they hold, and how it ends.

A worker of either role is the same process around the same engine. It has the edges of both roles at once, or with `--fixed-roles` that of
its own, and the other one after a change: each process joins the two packages' where it begins (`prefill_worker/__main__.py`,
`decode_worker/__main__.py`). A sequence belongs to the edge that took it; each passes over what it does not know in a step's output.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from twostep.cluster.records import MeasuredHandOver
from twostep.engine.types import LayerProgress, StepOutput
from twostep.errors import TwostepError, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.metrics.registry import MetricsRegistry
from twostep.process.tracing import Tracer
from twostep.rpc.server import GrpcServer
from twostep.rpc.v1 import decode_pb2_grpc, kv_pb2_grpc, prefill_pb2_grpc, worker_pb2
from twostep.worker.config import WorkerConfig
from twostep.worker.engine_port import EnginePort
from twostep.worker.requests import RequestReader

# Full name of a service, and what adds it to a server.
_SERVICES: Mapping[str, Callable[..., None]] = {
    "twostep.v1.Prefill": prefill_pb2_grpc.add_PrefillServicer_to_server,
    "twostep.v1.Kv": kv_pb2_grpc.add_KvServicer_to_server,
    "twostep.v1.Decode": decode_pb2_grpc.add_DecodeServicer_to_server,
}
SERVICE_NAMES = tuple(_SERVICES)
_POLL_S = 0.02


class Named(Protocol):
    @property
    def name(self) -> str: ...


class KvTransports(Protocol):
    """A worker's KV transports (kv_transfer/transports.py). They run on from one edge to the next; the worker closes them at its end."""

    @property
    def ready(self) -> Sequence[Named]:
        """Those that work now."""
        ...

    @property
    def why_none(self) -> str:
        """Why none works; empty if one does, or none is wanted."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeParts:
    """Holds what every edge is made of. `address` returns host:port as others reach the worker, once it listens. `carried`: the transports
    of the edge before, which this one goes on with."""

    config: WorkerConfig
    worker_id: str
    epoch: int
    secret: DeploymentSecret = field(repr=False)
    engine: EnginePort
    reader: RequestReader
    address: Callable[[], str]
    metrics: MetricsRegistry
    tracer: Tracer | None = None
    carried: KvTransports | None = None


class EdgeCounts(NamedTuple):
    """What an edge has done since it was made: KV bytes taken from other workers; sequences whose prompt and answer were both computed
    here, whose KV went to another worker, and whose KV came from one."""

    fetched_bytes: float = 0
    kept: float = 0
    handed_over: float = 0
    taken_over: float = 0


class Edge(Protocol):
    """Everything runs on the worker's event loop."""

    @property
    def transports(self) -> KvTransports: ...

    @property
    def services(self) -> Mapping[str, object]:
        """Servicers by the full names of their services: those that it takes calls of, and no others."""
        ...

    async def start(self) -> None:
        """Raises SetupError."""
        ...

    @property
    def counts(self) -> EdgeCounts: ...

    @property
    def measured(self) -> Sequence[MeasuredHandOver]:
        """Returns what hand-overs to this edge took lately."""
        ...

    def on_step(self, output: StepOutput) -> None: ...

    def on_layers(self, progress: Sequence[LayerProgress]) -> None:
        """Is called while a step of prompts to be handed over runs, where the runner tells how far it is."""
        ...

    def refuse(self, reason: str) -> None:
        """Refuses new requests from now on, with UNAVAILABLE and this reason; what runs goes on."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing runs and everything was sent."""
        ...

    def fail_all(self, error: TwostepError) -> None:
        """Ends what runs; the routers are told."""
        ...

    async def close(self) -> None:
        """Ends what runs, waits until it is freed, lets streams end: seconds at most. The transports run on. Idempotent."""
        ...

    async def fill_stats(self, stats: worker_pb2.WorkerStats) -> None:
        """Adds what the edge holds to what another one has said."""
        ...


class JoinedEdge:
    """The edges of both roles around one engine, over the same transports. See Edge."""

    def __init__(self, edges: Sequence[Edge]) -> None:
        self._edges = edges
        self.transports = edges[0].transports
        self.services = {name: servicer for edge in edges for name, servicer in edge.services.items()}

    async def start(self) -> None:
        for edge in self._edges:
            await edge.start()

    @property
    def counts(self) -> EdgeCounts:
        return EdgeCounts(*map(sum, zip(*(edge.counts for edge in self._edges), strict=True)))

    @property
    def measured(self) -> Sequence[MeasuredHandOver]:
        return [each for edge in self._edges for each in edge.measured]

    def on_step(self, output: StepOutput) -> None:
        for edge in self._edges:
            edge.on_step(output)

    def on_layers(self, progress: Sequence[LayerProgress]) -> None:
        for edge in self._edges:
            edge.on_layers(progress)

    def refuse(self, reason: str) -> None:
        for edge in self._edges:
            edge.refuse(reason)

    @property
    def idle(self) -> bool:
        return all(edge.idle for edge in self._edges)

    def fail_all(self, error: TwostepError) -> None:
        for edge in self._edges:
            edge.fail_all(error)

    async def close(self) -> None:
        await asyncio.gather(*(edge.close() for edge in self._edges))

    async def fill_stats(self, stats: worker_pb2.WorkerStats) -> None:
        for edge in self._edges:
            await edge.fill_stats(stats)


T = TypeVar("T", bound=KvTransports)


def edge_maker(
    kinds: Mapping[str, Callable[[EdgeParts, T], Edge]], make_transports: Callable[[EdgeParts], T]
) -> Callable[[EdgeParts], Edge]:
    """Returns what makes a worker's edge: of the kinds by role, those that its configuration takes work for."""

    def make(parts: EdgeParts) -> Edge:
        transports, config = make_transports(parts), parts.config
        edges = [kinds[role](parts, transports) for role in (kinds if config.both_roles else (config.role,))]
        return edges[0] if len(edges) == 1 else JoinedEdge(edges)

    return make


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Waits until the condition holds. Returns False where `timeout_s` passed first."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= give_up:
            return False
        await asyncio.sleep(_POLL_S)
    return True


class Switchboard:
    """The services of both roles, on the server from the start: gRPC takes none later. Calls go to the edge that serves; where there is
    none for them (`--fixed-roles`, a change of roles), the answer is UNAVAILABLE with the reason, as of a worker that is gone."""

    def __init__(self) -> None:
        self._slots = {name: _Slot() for name in _SERVICES}

    def add_to(self, server: GrpcServer) -> None:
        for name, add in _SERVICES.items():
            server.add(self._slots[name], add, name)

    def connect(self, services: Mapping[str, object], reason: str) -> None:
        """Lets these services answer from now on; the other role's calls are refused with `reason`."""
        for name, slot in self._slots.items():
            slot.servicer, slot.reason = services.get(name), reason

    def disconnect(self, reason: str) -> None:
        """Lets nothing answer from now on; calls that run go on."""
        for slot in self._slots.values():
            slot.servicer, slot.reason = None, reason


class _Slot:
    """One service: looks to gRPC like a servicer that has whatever method is asked for."""

    servicer: Any = None
    reason = "this worker is starting; use another one"

    def __getattr__(self, method: str) -> Callable[[Any, Any], Any]:
        return functools.partial(self._call, method)

    def _call(self, method: str, request: Any, context: Any) -> Any:
        """Returns what the servicer's method returns: something to await, or a stream. Raises Unavailable, which the server's guard passes
        on."""
        if self.servicer is None:
            raise Unavailable(self.reason)
        return getattr(self.servicer, method)(request, context)
