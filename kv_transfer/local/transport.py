"""The `local` transport: both sides live in one process. The same rules as across machines, one copy out and one copy in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from kv_transfer.checksum import checksum
from kv_transfer.object_book import Entry, ObjectBook
from kv_transfer.probing import PROBE_BYTES, probe_pattern
from kv_transfer.scattering import scattering
from kv_transfer.transport import BlockStore, ChunkInfo, Probe, TransportStats
from kv_transfer.waiting import FifoGate, finish
from twostep.engine.batch import LayerRange
from twostep.errors import DataLoss, InvalidRequest, NotFound, Unavailable

Bytes = npt.NDArray[np.uint8]
P = ParamSpec("P")
R = TypeVar("R")

_SWEEP_S = 0.1
_NUM_THREADS = 4


def part_bytes(block_bytes: int, num_layers: int, layers: LayerRange | None) -> int:
    """Bytes of some layers, None: all, of a block of `num_layers`. Raises InvalidRequest if it has no such layers."""
    if layers is None:
        return block_bytes
    if not 0 <= layers.first < layers.stop <= num_layers:
        raise InvalidRequest(f"layers {layers.first} + {layers.num_layers} are not among {num_layers}; compare the layouts before fetching")
    return block_bytes // num_layers * layers.num_layers


def check_blocks(chunk: ChunkInfo, block_ids: Sequence[int], block_bytes: int, num_layers: int = 1) -> None:
    """Raises InvalidRequest unless the chunk fills exactly its layers of these blocks."""
    each = part_bytes(block_bytes, num_layers, chunk.layers)
    if len(block_ids) != chunk.num_blocks or chunk.num_bytes != chunk.num_blocks * each:
        raise InvalidRequest(
            f"chunk {chunk.index} holds {chunk.num_blocks} blocks in {chunk.num_bytes} bytes, "
            f"but was to fill {len(block_ids)} blocks of {each} bytes; compare the layouts before fetching"
        )


def check_sum(chunk: ChunkInfo, data: Bytes) -> None:
    """Raises DataLoss. Runs in a thread."""
    if checksum(data) != chunk.checksum:
        raise DataLoss(f"chunk {chunk.index} does not match its checksum; fetch it again once, then prefill again")


def write_verified(store: BlockStore, chunk: ChunkInfo, block_ids: Sequence[int], data: Bytes) -> None:
    """Writes uint8 [num_bytes] into the blocks if its checksum is the chunk's. Raises DataLoss. Runs in a thread."""
    check_sum(chunk, data)
    store.write_blocks(block_ids, data.reshape(chunk.num_blocks, -1), chunk.layers)


def _copy_pattern(num_bytes: int) -> Probe:
    """Times one copy within this process. Runs in a thread."""
    source, target = probe_pattern(num_bytes), np.zeros(num_bytes, np.uint8)
    start = time.perf_counter()
    target[:] = source
    return Probe(num_bytes=num_bytes, seconds=max(time.perf_counter() - start, 1e-9))


class LocalHub:
    """Where the transports of one process, on one event loop, find each other."""

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
    ) -> None:
        """`num_layers` of a block, which chunks may take some of."""
        self._store = store
        self._block_bytes = block_bytes
        self._num_layers = num_layers
        self._hub = hub
        self._endpoint = f"local:{worker_id}/{epoch}"
        self._book: ObjectBook[Bytes] = ObjectBook(budget_bytes)
        self._room = FifoGate("published KV")
        self._threads: ThreadPoolExecutor | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return "local"

    @property
    def copies_out(self) -> bool:
        return True

    @property
    def checksum_name(self) -> str:
        return "xxh3_64"

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def ready(self) -> bool:
        return self._threads is not None

    @property
    def why_not_ready(self) -> str:
        return "it is starting"

    @property
    def max_lease_bytes(self) -> int:
        return self._book.budget_bytes

    async def start(self) -> None:
        self._hub.add(self)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kv-local")
        self._sweeper = asyncio.create_task(self._sweep(), name="kv-local-sweep")

    async def close(self) -> None:
        self._hub.remove(self._endpoint)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        self._book.drop_all()
        self._room.pump()
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)

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
        copy_out = partial(self._copy_out, tuple(block_ids), num_bytes, layers)
        digest = await self._publish(lease_id, index, num_bytes, copy_out, ttl_s=ttl_s, deadline=deadline)
        return ChunkInfo(
            index=index,
            first_block=first_block,
            num_blocks=len(block_ids),
            num_bytes=num_bytes,
            checksum=digest,
            first_layer=layers.first if layers else 0,
            num_layers=layers.num_layers if layers else 0,
        )

    async def publish_bytes(self, lease_id: str, index: int, data: Bytes, *, ttl_s: float, deadline: float) -> int:
        return await self._publish(lease_id, index, data.size, lambda: (data, checksum(data)), ttl_s=ttl_s, deadline=deadline)

    async def _publish(
        self, lease_id: str, index: int, num_bytes: int, make: Callable[[], tuple[Bytes, int]], *, ttl_s: float, deadline: float
    ) -> int:
        """`make`: the chunk's bytes and their checksum, in a thread. Returns the latter."""

        def attempt() -> Entry[Bytes] | None:
            self._running_threads()
            return self._book.reserve(lease_id, index, num_bytes, ttl_s=ttl_s, now=time.monotonic())

        entry = await self._room.take(attempt, deadline=deadline)
        try:
            data, digest = await finish(self._in_thread(make))
            self._book.fill(entry, data, now=time.monotonic())
        except BaseException:
            self._book.cancel(entry)
            self._room.pump()
            raise
        return digest

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float) -> None:
        check_blocks(chunk, block_ids, self._block_bytes, self._num_layers)
        data = self._hub.find(endpoint)._published(lease_id, chunk)
        with scattering():
            await finish(self._in_thread(write_verified, self._store, chunk, tuple(block_ids), data))

    async def fetch_bytes(self, endpoint: str, lease_id: str, chunk: ChunkInfo, *, deadline: float) -> Bytes:
        data = self._hub.find(endpoint)._published(lease_id, chunk)
        await finish(self._in_thread(check_sum, chunk, data))
        return data.copy()

    async def probe(self, endpoint: str, *, deadline: float) -> Probe:
        if not self._hub.find(endpoint).ready:
            raise Unavailable(f"KV source {endpoint} is closed; its worker ended")
        return await finish(self._in_thread(_copy_pattern, PROBE_BYTES))

    async def drop(self, lease_id: str) -> None:
        self._book.drop(lease_id)
        self._room.pump()

    async def stats(self) -> TransportStats:
        return self._book.stats

    def _published(self, lease_id: str, chunk: ChunkInfo) -> Bytes:
        data = self._book.get(lease_id, chunk.index, now=time.monotonic())
        if data is None:
            raise NotFound(f"chunk {chunk.index} of lease {lease_id} is not published at {self._endpoint}; the lease ended: prefill again")
        if data.size != chunk.num_bytes:
            raise DataLoss(f"chunk {chunk.index} has {data.size} bytes where {chunk.num_bytes} were announced; prefill again")
        return data

    def _copy_out(self, block_ids: Sequence[int], num_bytes: int, layers: LayerRange | None) -> tuple[Bytes, int]:
        data = np.empty(num_bytes, np.uint8)
        if num_bytes:
            self._store.read_blocks(block_ids, data.reshape(len(block_ids), -1), layers)
        return data, checksum(data)

    def _running_threads(self) -> ThreadPoolExecutor:
        if self._threads is None:
            raise Unavailable("the local transport is closed; try another worker")
        return self._threads

    async def _in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._running_threads(), partial(function, *args, **kwargs))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            if self._book.expire(time.monotonic()):
                self._room.pump()
