"""The `local` transport: both sides live in one process. The same rules as across machines, one copy out and one copy in.

publish   1 room in the budget   2 pool -> an array, checksum (thread)
fetch     1 the array, from the source's book of what it has published   2 checksum, array -> pool (thread)
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np

from kv_transfer.checksum import checksum
from kv_transfer.chunk_checks import check_blocks, check_sum, chunk_info, part_bytes, write_verified
from kv_transfer.object_book import ObjectBook
from kv_transfer.probing import PROBE_BYTES, probe_pattern
from kv_transfer.scattering import scattering
from kv_transfer.transport import BlockStore, Bytes, ChunkInfo, ProbeTiming, TransportStats
from kv_transfer.waiting import TransportThreads
from twostep.engine.batch import LayerRange
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


class LocalTransport:
    """See kv_transfer.transport for the contract."""

    name = "local"
    copies_out = True
    checksum_name = "xxh3_64"
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
        """`num_layers` of a block, which chunks may take some of. `clock`: by which leases end."""
        self._store = store
        self._block_bytes = block_bytes
        self._num_layers = num_layers
        self._hub = hub
        self.endpoint = f"local:{worker_id}/{epoch}"
        self._threads = TransportThreads("local", _NUM_THREADS, sweep=self._sweep, sweep_s=_SWEEP_S)
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

    async def publish(
        self,
        lease_id: str,
        index: int,
        first_block: int,
        block_ids: Sequence[int],
        *,
        layers: LayerRange | None = None,
        ttl_s: float,
        deadline: float,
    ) -> ChunkInfo:
        num_bytes = len(block_ids) * part_bytes(self._block_bytes, self._num_layers, layers)
        make = partial(self._threads.run, self._copy_out, tuple(block_ids), num_bytes, layers)
        digest = await self._book.publish(lease_id, index, num_bytes, make, ttl_s=ttl_s, deadline=deadline)
        return chunk_info(index, first_block, block_ids, layers, num_bytes=num_bytes, digest=digest)

    async def publish_bytes(self, lease_id: str, index: int, data: Bytes, *, ttl_s: float, deadline: float) -> int:
        def make() -> Awaitable[tuple[Bytes, int]]:
            return self._threads.run(lambda: (data, checksum(data)))

        return await self._book.publish(lease_id, index, data.size, make, ttl_s=ttl_s, deadline=deadline)

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float) -> None:
        check_blocks(chunk, block_ids, self._block_bytes, self._num_layers)
        data = self._hub.find(endpoint).published(lease_id, chunk)
        with scattering():
            await self._threads.run(write_verified, self._store, chunk, tuple(block_ids), data)

    async def fetch_bytes(self, endpoint: str, lease_id: str, chunk: ChunkInfo, *, deadline: float) -> Bytes:
        data = self._hub.find(endpoint).published(lease_id, chunk)
        await self._threads.run(check_sum, chunk, data)
        return data.copy()

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

    def _copy_out(self, block_ids: Sequence[int], num_bytes: int, layers: LayerRange | None) -> tuple[Bytes, int]:
        data = np.empty(num_bytes, np.uint8)
        if num_bytes:
            self._store.read_blocks(block_ids, data.reshape(len(block_ids), -1), layers)
        return data, checksum(data)

    async def _sweep(self) -> None:
        self._book.expire()


def _copy_pattern() -> ProbeTiming:
    """Times one copy within this process. Runs in a thread."""
    source, target = probe_pattern(PROBE_BYTES), np.zeros(PROBE_BYTES, np.uint8)
    start = time.perf_counter()
    target[:] = source
    return ProbeTiming(num_bytes=PROBE_BYTES, seconds=max(time.perf_counter() - start, 1e-9))
