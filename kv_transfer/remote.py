"""KV transports of an engine in another process: what its edge sees of them, and the inside that serves it.

What a transport says of itself (ready, endpoint) is told when it changes, and before the answer to whatever was asked meanwhile: an edge
that hears of a failure knows whose side it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kv_transfer.chunking import ChunkRange
from kv_transfer.conversion import BlockTarget, ConversionPlan
from kv_transfer.encoder import check_wire
from kv_transfer.pool_side import LocalPool, PoolSide
from kv_transfer.transport import ChunkInfo, ProbeTiming, TransportEnd, TransportStats
from kv_transfer.transports import TransportParts, Transports, TransportTable, make_transports
from twostep.engine.batch import LayerRange
from twostep.errors import TwostepError, Unavailable
from twostep.worker.config import WorkerConfig
from twostep.worker.engine_process import Plane
from twostep.worker.link import Call, Link
from twostep.worker.local_engine import LocalEngine
from twostep.worker.remote_engine import RemoteEngine
from twostep.worker.serialization import register_types

if TYPE_CHECKING:
    # As in transports.py.
    from twostep.worker.edge import EdgeParts

# Transports get ready and lose that within so long after it is noticed.
_LOOK_EVERY_S = 0.05
# Kernels are compiled, agents are started.
_START_S = 120.0
_CLOSE_S = 15.0
# For an answer beyond the deadline of what was asked for.
_GRACE_S = 5.0
_NOTHING = TransportStats(num_leases=0, num_objects=0, stored_bytes=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportState:
    """Holds what a TransportEnd says of itself."""

    name: str
    copies_out: bool
    checksum_name: str
    endpoint: str
    ready: bool
    why_not_ready: str
    max_lease_bytes: int

    @classmethod
    def of(cls, end: TransportEnd) -> TransportState:
        return cls(
            name=end.name,
            copies_out=end.copies_out,
            checksum_name=end.checksum_name,
            endpoint=end.endpoint,
            ready=end.ready,
            why_not_ready="" if end.ready else end.why_not_ready,
            max_lease_bytes=end.max_lease_bytes,
        )


register_types(BlockTarget, ChunkInfo, ChunkRange, ConversionPlan, LayerRange, ProbeTiming, TransportState, TransportStats)


def transports_of(parts: EdgeParts) -> TransportTable[TransportEnd]:
    """Returns an edge's transports, to be started, wherever its engine is; those of the worker's other role go on. Raises SetupError where
    one that was asked for by name cannot be (of another process, `start` does)."""
    if isinstance(parts.engine, RemoteEngine):
        carried = parts.carried if isinstance(parts.carried, RemoteTransports) else RemoteTransports(parts.engine)
        return carried.of(parts)
    assert isinstance(parts.engine, LocalEngine)
    local = TransportParts(
        config=parts.config,
        worker_id=parts.worker_id,
        epoch=parts.epoch,
        runner=parts.engine.runner,
        carried=parts.carried if isinstance(parts.carried, Transports) else None,
    )
    return make_transports(local)


class RemoteTransport:
    """See TransportEnd."""

    def __init__(self, engine: RemoteEngine, state: TransportState) -> None:
        self._engine = engine
        self.name, self.copies_out, self.checksum_name = state.name, state.copies_out, state.checksum_name
        self.state = state

    @property
    def endpoint(self) -> str:
        return self.state.endpoint

    @property
    def ready(self) -> bool:
        return self.state.ready

    @property
    def why_not_ready(self) -> str:
        return self.state.why_not_ready

    @property
    def max_lease_bytes(self) -> int:
        return self.state.max_lease_bytes

    async def probe(self, endpoint: str, *, deadline: float) -> ProbeTiming:
        timing: ProbeTiming = await self._engine.call("kv.probe", self.name, endpoint, deadline, deadline=deadline + _GRACE_S)
        return timing

    async def drop(self, lease_id: str) -> None:
        # Gone with the process, if that does not answer.
        with suppress(Unavailable):
            await self._engine.call("kv.drop", self.name, lease_id)

    async def stats(self) -> TransportStats:
        try:
            stats: TransportStats = await self._engine.call("kv.stats", self.name)
        except Unavailable:
            return _NOTHING
        return stats


class RemoteTransports(TransportTable[RemoteTransport]):
    """Those of an engine's process, and its PoolSide."""

    def __init__(self, engine: RemoteEngine) -> None:
        super().__init__([])
        self._engine = engine
        self._life: tuple[WorkerConfig, str, int] | None = None
        self._started: tuple[WorkerConfig, str, int] | None = None
        engine.on("kv.states", self._told)

    def of(self, parts: EdgeParts) -> RemoteTransports:
        """The same for an edge of these parts, to be started."""
        check_wire(parts.config.kv_wire, parts.engine.facts.layout)
        self._life = (parts.config, parts.worker_id, parts.epoch)
        return self

    async def start(self) -> None:
        if self._started == self._life:
            return
        assert self._life is not None
        self._started = None
        states = await self._engine.call("kv.start", *self._life, deadline=time.monotonic() + _START_S)
        self._transports = {state.name: RemoteTransport(self._engine, state) for state in states}
        self._started = self._life

    async def close(self) -> None:
        with suppress(TwostepError):
            await self._engine.call("kv.close", deadline=time.monotonic() + _CLOSE_S)
        self._told([replace(transport.state, ready=False, endpoint="", why_not_ready="it is closed") for transport in self])

    def pool(self, parts: EdgeParts) -> PoolSide:
        return self

    async def publish(
        self, transport: str, lease_id: str, seq_id: str, chunk: ChunkRange, *, wire: str, ttl_s: float, deadline: float
    ) -> ChunkInfo:
        arguments = (transport, lease_id, seq_id, chunk, wire, ttl_s, deadline)
        info: ChunkInfo = await self._engine.call("kv.publish", *arguments, deadline=deadline + _GRACE_S, settle=True)
        return info

    async def fetch(
        self, transport: str, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float
    ) -> float:
        arguments = (transport, endpoint, lease_id, chunk, block_ids, deadline)
        seconds: float = await self._engine.call("kv.fetch", *arguments, deadline=deadline + _GRACE_S, settle=True)
        return seconds

    async def convert(
        self, transport: str, endpoint: str, lease_id: str, chunk: ChunkInfo, plan: ConversionPlan, *, deadline: float
    ) -> float:
        arguments = (transport, endpoint, lease_id, chunk, plan, deadline)
        seconds: float = await self._engine.call("kv.convert", *arguments, deadline=deadline + _GRACE_S, settle=True)
        return seconds

    def end(self, plan: ConversionPlan) -> None:
        self._engine.tell("kv.end", plan)

    def _told(self, states: Sequence[TransportState]) -> None:
        for state in states:
            if (transport := self._transports.get(state.name)) is not None:
                transport.state = state


class RemoteKv:
    """The inside: makes the transports of an engine's process when the edge starts them, and does what it asks of them."""

    def __init__(self, engine: LocalEngine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._transports: Transports | None = None
        self._pool: LocalPool | None = None
        self._told: list[TransportState] = []
        self._watching: asyncio.Task[None] | None = None

    @property
    def plane(self) -> Plane:
        asked: dict[str, Call] = {
            "start": self._start,
            "publish": self._publish,
            "fetch": self._fetch,
            "convert": self._convert,
            "probe": self._probe,
            "drop": self._drop,
            "stats": self._stats,
            "close": self._close,
        }
        return Plane({f"kv.{name}": self._telling(call) for name, call in asked.items()}, {"kv.end": self._end}, self._close)

    def _telling(self, call: Call) -> Call:
        async def answer(*arguments: object) -> object:
            try:
                return await call(*arguments)
            finally:
                self._tell_changes()

        return answer

    async def _start(self, config: WorkerConfig, worker_id: str, epoch: int) -> list[TransportState]:
        engine = self._engine
        parts = TransportParts(config=config, worker_id=worker_id, epoch=epoch, runner=engine.runner, carried=self._transports)
        self._transports = make_transports(parts)
        self._pool = LocalPool(engine.engine, engine.runner, engine.facts.layout, config.kv_wire, self._transports)
        await self._transports.start()
        self._told = self._states()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="kv-states")
        return self._told

    async def _publish(
        self, transport: str, lease_id: str, seq_id: str, chunk: ChunkRange, wire: str, ttl_s: float, deadline: float
    ) -> ChunkInfo:
        return await self._here.publish(transport, lease_id, seq_id, chunk, wire=wire, ttl_s=ttl_s, deadline=deadline)

    async def _fetch(
        self, transport: str, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], deadline: float
    ) -> float:
        return await self._here.fetch(transport, endpoint, lease_id, chunk, block_ids, deadline=deadline)

    async def _convert(
        self, transport: str, endpoint: str, lease_id: str, chunk: ChunkInfo, plan: ConversionPlan, deadline: float
    ) -> float:
        return await self._here.convert(transport, endpoint, lease_id, chunk, plan, deadline=deadline)

    def _end(self, plan: ConversionPlan) -> None:
        self._here.end(plan)

    async def _probe(self, transport: str, endpoint: str, deadline: float) -> ProbeTiming:
        return await self._here.by(transport).probe(endpoint, deadline=deadline)

    async def _drop(self, transport: str, lease_id: str) -> None:
        await self._here.by(transport).drop(lease_id)

    async def _stats(self, transport: str) -> TransportStats:
        return await self._here.by(transport).stats()

    async def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._transports is not None:
            await self._transports.close()

    @property
    def _here(self) -> LocalPool:
        assert self._pool is not None, "it is started first"
        return self._pool

    def _states(self) -> list[TransportState]:
        return [TransportState.of(transport) for transport in self._transports or ()]

    def _tell_changes(self) -> None:
        if (states := self._states()) != self._told:
            self._told = states
            self._link.tell("kv.states", states)

    async def _watch(self) -> None:
        while True:
            self._tell_changes()
            await asyncio.sleep(_LOOK_EVERY_S)
