"""The bases of the transports: KV that is copied out of the pool when it is published, and KV that readers take from the pool itself.

PoolTransport         the pool's blocks, the parts of them that a chunk takes, threads
  CopyingTransport    local, ray: its bytes pass host memory, under an xxh3_64
  InPlaceTransport    cuda_ipc, nixl: only a checksum, sum64, is published
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

from kv_transfer.checksums import checksum
from kv_transfer.object_book import ObjectBook
from kv_transfer.transport import BlockStore, Bytes, ChunkInfo, TransportStats
from kv_transfer.waiting import TransportThreads
from twostep.engine.batch import LayerRange
from twostep.errors import DataLoss, InvalidRequest


class PoolTransport(ABC):
    """Moves a pool's blocks, which have `block_bytes` in `num_layers` equal parts, which chunks may take some of. `sweep` is called every
    `sweep_s` seconds, `enter` first in each of its threads."""

    name: str

    def __init__(
        self, block_bytes: int, num_layers: int, *, num_threads: int, sweep_s: float, enter: Callable[[], None] = lambda: None
    ) -> None:
        self._block_bytes = block_bytes
        self._num_layers = num_layers
        self._threads = TransportThreads(self.name, num_threads, sweep=self._sweep, sweep_s=sweep_s, enter=enter)

    @abstractmethod
    async def _sweep(self) -> None: ...

    def _part(self, layers: LayerRange | None) -> slice:
        """Returns which bytes of a block hold some layers, None: all. Raises InvalidRequest if it has no such layers."""
        if layers is None:
            return slice(0, self._block_bytes)
        if not 0 <= layers.first < layers.stop <= self._num_layers:
            raise InvalidRequest(
                f"layers {layers.first} + {layers.num_layers} are not among {self._num_layers}; compare the layouts before fetching"
            )
        layer_bytes = self._block_bytes // self._num_layers
        return slice(layers.first * layer_bytes, layers.stop * layer_bytes)

    def _size(self, num_blocks: int, layers: LayerRange | None) -> int:
        """Returns the bytes of some layers of so many blocks. Raises InvalidRequest."""
        part = self._part(layers)
        return num_blocks * int(part.stop - part.start)

    def _check_blocks(self, chunk: ChunkInfo, block_ids: Sequence[int]) -> None:
        """Raises InvalidRequest unless the chunk fills exactly its layers of these blocks."""
        each = self._size(1, chunk.layers)
        if len(block_ids) != chunk.num_blocks or chunk.num_bytes != chunk.num_blocks * each:
            raise InvalidRequest(
                f"chunk {chunk.index} holds {chunk.num_blocks} blocks in {chunk.num_bytes} bytes, "
                f"but was to fill {len(block_ids)} blocks of {each} bytes; compare the layouts before fetching"
            )


class CopyingTransport(PoolTransport):
    """Copies a chunk out of the pool when it is published, and into the reader's when it is fetched: `_publish` and `_fetched` do what
    comes between."""

    copies_out = True
    checksum_name = "xxh3_64"

    def __init__(self, store: BlockStore, block_bytes: int, num_layers: int, *, num_threads: int, sweep_s: float) -> None:
        super().__init__(block_bytes, num_layers, num_threads=num_threads, sweep_s=sweep_s)
        self._store = store

    @abstractmethod
    async def _publish(
        self, lease_id: str, index: int, num_bytes: int, fill: Callable[[Bytes], int], *, ttl_s: float, deadline: float
    ) -> int:
        """`fill`, in a thread, puts the chunk's bytes into memory it is given and returns their checksum, as this does."""

    @abstractmethod
    def _fetched(self, endpoint: str, lease_id: str, chunk: ChunkInfo, *, deadline: float) -> AbstractAsyncContextManager[Bytes]:
        """Gives a published chunk's bytes, not verified yet."""

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
        num_bytes = self._size(len(block_ids), layers)
        fill = partial(self._copy_out, tuple(block_ids), layers)
        digest = await self._publish(lease_id, index, num_bytes, fill, ttl_s=ttl_s, deadline=deadline)
        return ChunkInfo.of(index, first_block, block_ids, layers, num_bytes=num_bytes, checksum=digest)

    async def publish_bytes(self, lease_id: str, index: int, data: Bytes, *, ttl_s: float, deadline: float) -> int:
        """Publishes as a chunk's bytes KV that travels in another form than the pool's, uint8 [n]; returns their checksum. `data` must not
        change before this ends."""

        def fill(out: Bytes) -> int:
            out[:] = data
            return checksum(out)

        return await self._publish(lease_id, index, data.size, fill, ttl_s=ttl_s, deadline=deadline)

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float) -> float:
        self._check_blocks(chunk, block_ids)
        async with self._fetched(endpoint, lease_id, chunk, deadline=deadline) as data:
            start = time.monotonic()
            await self._threads.run(self._write_verified, chunk, tuple(block_ids), data)
            return time.monotonic() - start

    async def fetch_bytes(self, endpoint: str, lease_id: str, chunk: ChunkInfo, *, deadline: float) -> Bytes:
        """Returns a chunk for the caller to convert, verified, uint8 [num_bytes] of its own; blocks of whatever size. Raises as `fetch`."""
        async with self._fetched(endpoint, lease_id, chunk, deadline=deadline) as data:
            copied: Bytes = await self._threads.run(data.copy)
        await self._threads.run(_check_sum, chunk, copied)
        return copied

    def _copy_out(self, block_ids: Sequence[int], layers: LayerRange | None, out: Bytes) -> int:
        if block_ids:
            self._store.read_blocks(block_ids, out.reshape(len(block_ids), -1), layers)
        return checksum(out)

    def _write_verified(self, chunk: ChunkInfo, block_ids: Sequence[int], data: Bytes) -> None:
        """Verifies what was written by what it was read from, afterwards: if that has not changed by then, it had not before."""
        self._store.write_blocks(block_ids, data.reshape(chunk.num_blocks, -1), chunk.layers)
        _check_sum(chunk, data)


def _check_sum(chunk: ChunkInfo, data: Bytes) -> None:
    check_arrived(chunk, checksum(data))


class SourcePool(Protocol):
    """A source's pool, as its endpoint describes it."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...


class InPlaceTransport(PoolTransport):
    """Publishes the checksum of blocks that stay where they are until the lease ends; the pool bounds what is published."""

    copies_out = False
    checksum_name = "sum64"
    max_lease_bytes = 0

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        num_layers: int,
        *,
        num_threads: int,
        sweep_s: float,
        enter: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: by which leases end."""
        super().__init__(block_bytes, num_layers, num_threads=num_threads, sweep_s=sweep_s, enter=enter)
        self._num_blocks = num_blocks
        self._book: ObjectBook[bool] = ObjectBook(check=self._threads.check, clock=clock)
        self.endpoint = ""

    @abstractmethod
    async def _checksum(self, block_ids: Sequence[int], layers: LayerRange | None, *, deadline: float) -> int:
        """Returns that of some layers of our blocks."""

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
        ids = self._own_blocks(block_ids)
        num_bytes = self._size(len(ids), layers)

        async def summed() -> tuple[bool, int]:
            return True, await self._checksum(ids, layers, deadline=deadline)

        digest = await self._book.publish(lease_id, index, num_bytes, summed, ttl_s=ttl_s, deadline=deadline)
        return ChunkInfo.of(index, first_block, ids, layers, num_bytes=num_bytes, checksum=digest, source_blocks=ids)

    async def drop(self, lease_id: str) -> None:
        self._book.drop(lease_id)

    async def stats(self) -> TransportStats:
        return self._book.stats

    async def _sweep(self) -> None:
        self._book.expire()

    def _own_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """Raises InvalidRequest for blocks that our pool does not have."""
        ids = tuple(block_ids)
        if ids and not 0 <= min(ids) <= max(ids) < self._num_blocks:
            raise InvalidRequest(f"block ids must be from 0 to {self._num_blocks - 1}")
        return ids

    def _check_fetch(self, chunk: ChunkInfo, block_ids: Sequence[int], source: SourcePool) -> tuple[int, ...]:
        """Checks, before any of it is read, that the chunk fits these blocks of ours, which are returned, and lies in the source's pool.
        Raises InvalidRequest for blocks of another size than ours, DataLoss for blocks that the source does not have: no fault of the
        request's, and another attempt may succeed. Raises Unavailable if the transport does not run."""
        self._check_blocks(chunk, block_ids)
        if source.block_bytes != self._block_bytes:
            raise InvalidRequest(
                f"the source's blocks have {source.block_bytes} bytes, ours {self._block_bytes}; compare the layouts before fetching"
            )
        if len(chunk.source_blocks) != chunk.num_blocks:
            raise DataLoss(f"chunk {chunk.index} names {len(chunk.source_blocks)} source blocks for {chunk.num_blocks}; prefill again")
        if chunk.source_blocks and not 0 <= min(chunk.source_blocks) <= max(chunk.source_blocks) < source.num_blocks:
            raise DataLoss(f"chunk {chunk.index} names source blocks that are not among {source.num_blocks}; prefill again")
        self._threads.check()
        return self._own_blocks(block_ids)


def check_arrived(chunk: ChunkInfo, digest: int) -> None:
    """Raises DataLoss unless what arrived has the chunk's checksum."""
    if digest != chunk.checksum:
        raise DataLoss(f"chunk {chunk.index} does not match its checksum; fetch it again once, then prefill again")
