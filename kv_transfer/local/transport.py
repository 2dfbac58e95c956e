"""The `local` transport: both sides live in one process. The same rules as across machines, one copy out and one copy in.

publish   1 room in the budget   2 pool -> an array, checksum (thread)
fetch     1 the array, from the source's book of what it has published   2 checksum, array -> pool (thread)
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from kv_transfer.object_book import ObjectBook
from kv_transfer.pool_transport import CopyingTransport
from kv_transfer.transport import PROBE_BYTES, BlockStore, Bytes, ChunkInfo, ProbeTiming, TransportStats, probe_pattern
from twostep.errors import DataLoss, InvalidRequest, NotFound, Unavailable

_SWEEP_S = 0.1
_NUM_THREADS = 4


class LocalHub:
    """The transports of one process, on one event loop, by endpoint: so they find each other."""

    def __init__(self) -> None:
        self._transports: dict[str, LocalTransport] = {}

    def add(self, transport: LocalTransport) -> None:
        if transport.endpoint in self._transports:
            raise InvalidRequest(f"endpoint {transport.endpoint} is in use; give every worker an id of its own")
        self._transports[transport.endpoint] = transport

    def remove(self, endpoint: str) -> None:
        self._transports.pop(endpoint, None)

    def find(self, endpoint: str) -> LocalTransport:
        """Raises Unavailable."""
        transport = self._transports.get(endpoint)
        if transport is None:
            raise Unavailable(f"no KV source {endpoint} in this process; its worker ended: prefill again")
        return transport


class LocalTransport(CopyingTransport):
    """See kv_transfer.transport for the contract."""

    name = "local"
    why_not_ready = "it is starting"

    def __init__(
        self,
        store: BlockStore,
        block_bytes: int,
        hub: LocalHub,
        *,
        worker_id: str,
        epoch: int = 0,
        num_layers: int = 1,
        budget_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: by which leases end."""
        super().__init__(store, block_bytes, num_layers, num_threads=_NUM_THREADS, sweep_s=_SWEEP_S)
        self._hub = hub
        self.endpoint = f"local:{worker_id}/{epoch}"
        self._book: ObjectBook[Bytes] = ObjectBook(budget_bytes, check=self._threads.check, clock=clock)

    @property
    def ready(self) -> bool:
        return self._threads.running

    @property
    def max_lease_bytes(self) -> int:
        return self._book.budget_bytes

    async def start(self) -> None:
        self._hub.add(self)
        self._threads.start()

    async def close(self) -> None:
        self._hub.remove(self.endpoint)
        await self._threads.close()
        self._book.drop_all()

    async def _publish(
        self, lease_id: str, index: int, num_bytes: int, fill: Callable[[Bytes], int], *, ttl_s: float, deadline: float
    ) -> int:
        async def make() -> tuple[Bytes, int]:
            data = np.empty(num_bytes, np.uint8)
            return data, await self._threads.run(fill, data)

        return await self._book.publish(lease_id, index, num_bytes, make, ttl_s=ttl_s, deadline=deadline)

    @asynccontextmanager
    async def _fetched(self, endpoint: str, lease_id: str, chunk: ChunkInfo, *, deadline: float) -> AsyncIterator[Bytes]:
        yield self._hub.find(endpoint).published(lease_id, chunk)

    async def probe(self, endpoint: str, *, deadline: float) -> ProbeTiming:
        if not self._hub.find(endpoint).ready:
            raise Unavailable(f"KV source {endpoint} is closed; its worker ended")
        return await self._threads.run(_copy_pattern)

    async def drop(self, lease_id: str) -> None:
        self._book.drop(lease_id)

    async def stats(self) -> TransportStats:
        return self._book.stats

    def published(self, lease_id: str, chunk: ChunkInfo) -> Bytes:
        """Returns the bytes of a chunk of ours, for the reader's side. Raises NotFound and DataLoss."""
        data = self._book.get(lease_id, chunk.index)
        if data is None:
            raise NotFound(f"chunk {chunk.index} of lease {lease_id} is not published at {self.endpoint}; the lease ended: prefill again")
        if data.size != chunk.num_bytes:
            raise DataLoss(f"chunk {chunk.index} has {data.size} bytes where {chunk.num_bytes} were announced; prefill again")
        return data

    async def _sweep(self) -> None:
        self._book.expire()


def _copy_pattern() -> ProbeTiming:
    """Times one copy within this process. Runs in a thread."""
    source, target = probe_pattern(PROBE_BYTES), np.zeros(PROBE_BYTES, np.uint8)
    start = time.perf_counter()
    target[:] = source
    return ProbeTiming(num_bytes=PROBE_BYTES, seconds=max(time.perf_counter() - start, 1e-9))
