"""A one-sided transport within one process, and a block store that is a plain array.

As on real ones a reader cannot be stopped: it looks at the source's store whether the lease is still there or not, so all that keeps it
from using what it saw is the checksum and the source's answer after the read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.checksums import checksum
from kv_transfer.pool_transport import InPlaceTransport, check_arrived
from kv_transfer.transport import BlockStore, ChunkInfo, ProbeTiming
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


class OneSidedTransport(InPlaceTransport):
    """See kv_transfer.transport for the contract. The hooks are awaited in every fetch, before the read and after the verified write;
    `rate` is what probes find; `broken` says why no source can be read."""

    checksum_name = "xxh3_64"
    why_not_ready = "it is starting"

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
        self.name = name
        super().__init__(1 << 30, block_bytes, num_layers, num_threads=2, sweep_s=0.1)
        self.before_read: Callable[[ChunkInfo], Awaitable[None]] = _nothing
        self.after_write: Callable[[ChunkInfo], Awaitable[None]] = _nothing
        self.rate = rate
        self.broken = ""
        self.endpoint = f"{name}:{worker_id}/{epoch}"
        self._store = store
        self._hub = hub

    @property
    def ready(self) -> bool:
        return self._threads.running

    async def start(self) -> None:
        self._hub.stores[self.endpoint] = self._store
        self._threads.start()

    async def close(self) -> None:
        await self._threads.close()
        self._book.drop_all()

    async def _checksum(self, block_ids: Sequence[int], layers: LayerRange | None, *, deadline: float) -> int:
        return checksum(await self._read(self._store, block_ids, layers))

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float) -> float:
        self._check_blocks(chunk, block_ids)
        await self.before_read(chunk)
        data = await self._read(self._find(endpoint), chunk.source_blocks, chunk.layers)
        check_arrived(chunk, checksum(data))
        await self._threads.run(self._store.write_blocks, tuple(block_ids), data, chunk.layers)
        await self.after_write(chunk)
        return 0.0

    async def _read(self, store: BlockStore, block_ids: Sequence[int], layers: LayerRange | None) -> npt.NDArray[np.uint8]:
        data = np.empty((len(block_ids), self._size(1, layers)), np.uint8)
        await self._threads.run(store.read_blocks, tuple(block_ids), data, layers)
        return data

    async def probe(self, endpoint: str, *, deadline: float) -> ProbeTiming:
        self._find(endpoint)
        return ProbeTiming(num_bytes=1 << 20, seconds=(1 << 20) / self.rate)

    def _find(self, endpoint: str) -> BlockStore:
        """Raises Unavailable."""
        if self.broken:
            raise Unavailable(self.broken)
        try:
            return self._hub.stores[endpoint]
        except KeyError:
            raise Unavailable(f"no memory at {endpoint}; prefill again") from None
