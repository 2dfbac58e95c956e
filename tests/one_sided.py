"""A one-sided transport within one process, and a block store that is a plain array.

As on real ones a reader cannot be stopped: it looks at the source's store whether the lease is still there or not, so all that keeps it
from using what it saw is the checksum and the source's answer after the read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.checksum import checksum
from kv_transfer.chunk_checks import check_blocks, chunk_info, part_bytes, write_verified
from kv_transfer.object_book import ObjectBook
from kv_transfer.transport import BlockStore, ChunkInfo, ProbeTiming, TransportStats
from twostep.engine.batch import LayerRange
from twostep.errors import Unavailable


class ArrayStore:
    """A BlockStore on an array: `blocks` is uint8 [num_blocks, block_bytes], of `num_layers` equal parts each."""

    def __init__(self, blocks: npt.NDArray[np.uint8], num_layers: int = 1) -> None:
        self.blocks = blocks
        self.num_layers = num_layers
        self._layer_bytes = blocks.shape[1] // num_layers

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        np.take(self.blocks[:, self._columns(layers)], list(block_ids), axis=0, out=out)

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        self.blocks[list(block_ids), self._columns(layers)] = data

    def _columns(self, layers: LayerRange | None) -> slice:
        return slice(None) if layers is None else slice(layers.first * self._layer_bytes, layers.stop * self._layer_bytes)


async def _nothing(chunk: ChunkInfo) -> None:
    """The hooks' default."""


class OneSidedHub:
    """Memory that readers can look into, by endpoint. It stays there after its worker has ended: `forget` takes it away."""

    def __init__(self) -> None:
        self.stores: dict[str, BlockStore] = {}

    def forget(self, endpoint: str) -> None:
        self.stores.pop(endpoint, None)


class OneSidedTransport:
    """See kv_transfer.transport for the contract. The hooks are awaited in every fetch, before the read and after the verified write;
    `rate` is what probes find."""

    def __init__(
        self,
        store: BlockStore,
        block_bytes: int,
        hub: OneSidedHub,
        *,
        worker_id: str,
        epoch: int = 0,
        name: str = "one_sided",
        num_layers: int = 1,
        rate: float = 100e9,
    ) -> None:
        self.before_read: Callable[[ChunkInfo], Awaitable[None]] = _nothing
        self.after_write: Callable[[ChunkInfo], Awaitable[None]] = _nothing
        self.rate = rate
        self.broken = ""
        self._store = store
        self._block_bytes = block_bytes
        self._num_layers = num_layers
        self._hub = hub
        self._name = name
        self._endpoint = f"{name}:{worker_id}/{epoch}"
        self._book: ObjectBook[bool] = ObjectBook()
        self._started = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def copies_out(self) -> bool:
        return False

    @property
    def checksum_name(self) -> str:
        return "xxh3_64"

    @property
    def endpoint(self) -> str:
        return self._endpoint

    @property
    def ready(self) -> bool:
        return self._started

    @property
    def why_not_ready(self) -> str:
        return "it is starting"

    @property
    def max_lease_bytes(self) -> int:
        return 0

    async def start(self) -> None:
        self._hub.stores[self._endpoint] = self._store
        self._started = True

    async def close(self) -> None:
        self._started = False
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
        data = np.empty((len(block_ids), part_bytes(self._block_bytes, self._num_layers, layers)), np.uint8)

        async def summed() -> tuple[bool, int]:
            await asyncio.to_thread(self._store.read_blocks, block_ids, data, layers)
            return True, checksum(data.reshape(-1))

        digest = await self._book.publish(lease_id, index, data.size, summed, ttl_s=ttl_s, deadline=deadline)
        return chunk_info(index, first_block, block_ids, layers, num_bytes=data.size, digest=digest, in_place=True)

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float) -> None:
        check_blocks(chunk, block_ids, self._block_bytes, self._num_layers)
        await self.before_read(chunk)
        store = self._find(endpoint)
        data = np.empty((chunk.num_blocks, chunk.num_bytes // chunk.num_blocks), np.uint8)
        await asyncio.to_thread(store.read_blocks, chunk.source_blocks, data, chunk.layers)
        await asyncio.to_thread(write_verified, self._store, chunk, tuple(block_ids), data.reshape(-1))
        await self.after_write(chunk)

    async def probe(self, endpoint: str, *, deadline: float) -> ProbeTiming:
        self._find(endpoint)
        return ProbeTiming(num_bytes=1 << 20, seconds=(1 << 20) / self.rate)

    async def drop(self, lease_id: str) -> None:
        self._book.drop(lease_id)

    async def stats(self) -> TransportStats:
        return self._book.stats

    def _find(self, endpoint: str) -> BlockStore:
        """Raises Unavailable."""
        if self.broken:
            raise Unavailable(self.broken)
        try:
            return self._hub.stores[endpoint]
        except KeyError:
            raise Unavailable(f"no memory at {endpoint}; prefill again") from None
