"""Defines what a role adds to a worker: its services, what they hold, and how it ends. twostep/worker/roles.py says where edges come
from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twostep.engine.engine import Engine
from twostep.engine.types import LayerProgress, StepOutput
from twostep.errors import TwostepError
from twostep.metrics.registry import MetricsRegistry
from twostep.process.tracing import Tracer
from twostep.rpc.v1 import worker_pb2
from twostep.worker.config import WorkerConfig
from twostep.worker.model import ServedModel
from twostep.worker.requests import RequestReader


class Carried(Protocol):
    """Holds what one edge of a worker leaves to the next, of either role: the KV transports, running. Its last owner closes it."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeParts:
    """Holds what every edge is made of. `address` returns host:port as others reach the worker, once it listens. `carried` is what the edge
    before has left; the new one owns it from now on."""

    config: WorkerConfig
    worker_id: str
    epoch: int
    secret: bytes = field(repr=False)
    model: ServedModel
    engine: Engine
    reader: RequestReader
    address: Callable[[], str]
    metrics: MetricsRegistry
    tracer: Tracer | None = None
    carried: Carried | None = None


class Edge(Protocol):
    """Everything runs on the worker's event loop."""

    @property
    def services(self) -> Mapping[str, object]:
        """Servicers by the full names of their services: those of the role, and no others."""
        ...

    async def start(self) -> None:
        """Raises SetupError."""
        ...

    @property
    def ready_transports(self) -> Sequence[str]:
        """Names of the KV transports that work now."""
        ...

    @property
    def why_no_transport(self) -> str:
        """Why none works; empty if one does, or none is wanted."""
        ...

    @property
    def num_fetched_bytes(self) -> int:
        """KV that this edge has taken from other workers since it was made."""
        ...

    def on_step(self, output: StepOutput) -> None: ...

    def on_layers(self, progress: Sequence[LayerProgress]) -> None:
        """While a step of prompts to be handed over runs, where the runner tells how far it is."""
        ...

    def refuse(self, reason: str) -> None:
        """From now on new requests get UNAVAILABLE with this reason; what runs goes on."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing runs and everything was sent."""
        ...

    def fail_all(self, error: TwostepError) -> None:
        """Ends what runs; the routers are told."""
        ...

    async def leave(self) -> Carried:
        """Ends what runs, waits until it is freed, lets streams end: seconds at most. Idempotent."""
        ...

    async def close(self) -> None:
        """As `leave`, and ends the transports too. Idempotent."""
        ...

    async def fill_stats(self, stats: worker_pb2.WorkerStats) -> None:
        """Adds what the edge holds."""
        ...
