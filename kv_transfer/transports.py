"""Which transports a worker has: made from `--kv-transfer`, started together, the best first.

auto          cuda_ipc, nixl, ray, in this order: those that can exist here. Why another cannot is said once, in the log
a,b,...       those and no others, in this order of preference; the worker does not start where one of them cannot be made. A Ray that is
              away makes no difference: the transport is ready once it is back
none          nothing is handed over: for decode workers that compute every prompt themselves
local         within one process: for tests, never made here

To add a transport:

1. Write `kv_transfer/NAME/transport.py` with a class that keeps the contract `KvTransport` (kv_transfer/transport.py), on one of the bases
   in kv_transfer/pool_transport.py; local/transport.py is the shortest. Its docstring numbers the steps of a transfer.
2. Register it in `TRANSPORT_KINDS` below, by a function that imports it when it is called and raises SetupError, with what to do, where it
   cannot exist; and by name in `KV_TRANSPORTS` (twostep/settings/readers.py).
3. Give the contract's tests a pair of it (`PAIRS` in tests/kv_transfer/kv_pairs.py). What only yours does is tested in a file of its own.
"""

from __future__ import annotations

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kv_transfer.pool_side import LocalPool, PoolSide
from kv_transfer.ray.transport import RayTransport
from kv_transfer.transport import KvTransport, TransportEnd
from twostep.engine.batch import Runner
from twostep.errors import SetupError
from twostep.extras import install
from twostep.settings.readers import KV_TRANSPORTS
from twostep.worker.config import WorkerConfig
from twostep.worker.local_engine import LocalEngine

if TYPE_CHECKING:
    # The edge's, which a process that has the pool alone does without.
    from twostep.worker.edge import EdgeParts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportParts:
    """Holds what transports are made of, in the process that has the pool. `carried`: those of the worker's other role."""

    config: WorkerConfig
    worker_id: str
    epoch: int
    runner: Runner
    carried: Transports | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportKind:
    """Describes a kind of transport. `make` gets the worker's parts and a directory for sockets, and raises SetupError or ImportError where
    the transport cannot exist. `of_one_role`: made anew when the worker changes its role. `may_be_left_out` of `auto`, with the reason in
    the log."""

    make: Callable[[TransportParts], KvTransport]
    of_one_role: bool = False
    may_be_left_out: bool = True


def _cuda_ipc(parts: TransportParts) -> KvTransport:
    _check_one_gpu("cuda_ipc", parts)
    # These need torch.
    from kv_transfer.cuda_ipc.transport import CudaIpcTransport  # noqa: PLC0415
    from kv_transfer.gpu_pool import gpu_pool_of  # noqa: PLC0415

    return CudaIpcTransport(gpu_pool_of(parts.runner, "cuda_ipc"), serves=parts.config.hands_over)


def _nixl(parts: TransportParts) -> KvTransport:
    _check_one_gpu("nixl", parts)
    if importlib.util.find_spec("nixl") is None:
        raise SetupError(f"the nixl package is not installed; {install('nixl')}")
    # These need torch.
    from kv_transfer.nixl.memory import NixlMemory  # noqa: PLC0415
    from kv_transfer.nixl.transport import NixlTransport  # noqa: PLC0415

    runner = parts.runner
    return NixlTransport(NixlMemory.of_runner(runner), num_layers=runner.kv_shape.num_layers)


def _check_one_gpu(name: str, parts: TransportParts) -> None:
    """Checks that the worker's pool is in one GPU's memory, where these transports read it. Raises SetupError."""
    config = parts.config
    if config.runner != "model" or not config.device.startswith("cuda"):
        raise SetupError(f"{name} moves KV between GPUs, and this worker has none ({config.device}); leave it out of --kv-transfer")
    if config.tensor_parallel_size > 1:
        raise SetupError(
            f"--kv-transfer {name} reads one pool, and with --tensor-parallel-size {config.tensor_parallel_size} it is cut over processes; "
            f"leave {name} out"
        )


def _ray(parts: TransportParts) -> KvTransport:
    config, runner = parts.config, parts.runner
    assert config.run_dir is not None, "a worker's process makes one where none is given"
    return RayTransport(
        runner,
        runner.kv_shape.block_bytes,
        worker_id=parts.worker_id,
        epoch=parts.epoch,
        ray_address=config.ray_address,
        num_layers=runner.kv_shape.num_layers,
        pin=runner.pin_host,
        on_gpu=config.runner == "model" and config.device.startswith("cuda"),
        run_dir=config.run_dir,
        ring_bytes=config.kv_ring_bytes,
        budget_bytes=config.kv_budget_bytes,
    )


# The best first. With --fixed-roles a decode worker lets no peer read its pool, so that cuda_ipc differs by role; the others go on.
TRANSPORT_KINDS = {
    "cuda_ipc": TransportKind(make=_cuda_ipc, of_one_role=True),
    "nixl": TransportKind(make=_nixl),
    "ray": TransportKind(make=_ray, may_be_left_out=False),
}
assert set(TRANSPORT_KINDS) < set(KV_TRANSPORTS)


End = TypeVar("End", bound=TransportEnd, covariant=True)


class TransportTable(ABC, Generic[End]):
    """A worker's transports by name, best first. Belongs to one event loop."""

    def __init__(self, transports: Iterable[End]) -> None:
        self._transports = {transport.name: transport for transport in transports}

    def __iter__(self) -> Iterator[End]:
        return iter(tuple(self._transports.values()))

    def __len__(self) -> int:
        return len(self._transports)

    def get(self, name: str) -> End | None:
        return self._transports.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._transports)

    @property
    def ready(self) -> tuple[End, ...]:
        return tuple(transport for transport in self._transports.values() if transport.ready)

    @property
    def why_none(self) -> str:
        """Says why none of them is ready; empty if one is, or if there are none."""
        return "" if self.ready else "; ".join(f"{transport.name}: {transport.why_not_ready}" for transport in self)

    @abstractmethod
    async def start(self) -> None:
        """Starts those that do not run yet. Raises SetupError."""

    @abstractmethod
    async def close(self) -> None:
        """Idempotent."""

    @abstractmethod
    def pool(self, parts: EdgeParts) -> PoolSide:
        """Returns the side of the pool for an edge of these parts. Raises SetupError where KV cannot travel as the configuration says."""


class Transports(TransportTable[KvTransport]):
    """Those of the process that has the pool."""

    def __init__(self, transports: Iterable[KvTransport], *, optional: Iterable[str] = ()) -> None:
        """`optional`: names of those that are left out, with a warning, if they cannot start."""
        super().__init__(transports)
        self._optional = frozenset(optional)
        self._started: set[str] = set()
        # Of the role before: they end before those that take their place begin.
        self._replaced: list[KvTransport] = []

    def pool(self, parts: EdgeParts) -> PoolSide:
        assert isinstance(parts.engine, LocalEngine), "an engine of another process has its transports there"
        engine = parts.engine
        return LocalPool(engine.engine, engine.runner, engine.facts.layout, parts.config.kv_wire, self)

    async def start(self) -> None:
        while self._replaced:
            await self._replaced[-1].close()
            del self._replaced[-1]
        for transport in self:
            if transport.name in self._started:
                continue
            try:
                await transport.start()
            except SetupError as error:
                if transport.name not in self._optional:
                    raise
                log.warning("no KV transfer by %s here: %s", transport.name, error.message)
                del self._transports[transport.name]
                await transport.close()
            else:
                self._started.add(transport.name)

    async def close(self) -> None:
        for transport in (*self._replaced, *self):
            await transport.close()
        self._replaced.clear()
        self._started.clear()

    def in_role(self, make: Callable[[str], KvTransport]) -> Transports:
        """Returns the same for the worker's other role, to be started again: those that serve one role only are made anew by name. Raises
        SetupError, and then nothing has changed."""
        anew = {name: make(name) for name in self._transports if name in TRANSPORT_KINDS and TRANSPORT_KINDS[name].of_one_role}
        self._replaced += [self._transports[name] for name in anew]
        self._started -= anew.keys()
        self._transports |= anew
        return self


def make_transports(parts: TransportParts) -> Transports:
    """Makes them, to be started. What an edge of its other role has left is used again.
    Raises SetupError where one that was asked for by name cannot be."""
    if parts.carried is not None:
        if parts.config.both_roles:
            return parts.carried
        return parts.carried.in_role(lambda name: _make(name, parts))
    asked = parts.config.kv_transfer
    if asked == "auto":
        optional = [name for name, kind in TRANSPORT_KINDS.items() if kind.may_be_left_out]
        return Transports(_possible(optional, parts), optional=optional)
    if asked == "none":
        return Transports([])
    names = asked.split(",")
    if "local" in names:
        raise SetupError("--kv-transfer local joins workers of one process only; give cuda_ipc, nixl, ray or auto to worker processes")
    return Transports([_make(name, parts) for name in names])


def _possible(optional: list[str], parts: TransportParts) -> Iterator[KvTransport]:
    for name in TRANSPORT_KINDS:
        try:
            yield _make(name, parts)
        except SetupError as error:
            if name not in optional:
                raise
            log.info("no KV transfer by %s here: %s", name, error.message)


def _make(name: str, parts: TransportParts) -> KvTransport:
    """Raises SetupError with why it cannot exist here."""
    try:
        return TRANSPORT_KINDS[name].make(parts)
    except ImportError as error:
        raise SetupError(f"--kv-transfer {name}: {error}; install what is missing, or leave {name} out") from error
