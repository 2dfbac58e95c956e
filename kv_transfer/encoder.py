"""Publishes blocks in another form than they lie in the pool (--kv-wire): read, encoded and given to the transport as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from kv_transfer.chunking import ChunkRange
from kv_transfer.layout_conversion import block_bytes
from kv_transfer.pool_transport import CopyingTransport
from kv_transfer.transport import BlockStore, Bytes, ChunkInfo, KvTransport
from kv_transfer.waiting import FifoGate, finish
from kv_transfer.wire_encoding import check_encoding, encode
from twostep.cluster.records import LayoutRecord
from twostep.errors import InvalidRequest, SetupError

# Each holds its blocks twice, and a core while it encodes them.
_MAX_CHUNKS = 4


def check_wire(encoding: str, layout: LayoutRecord) -> None:
    """Raises SetupError where blocks of this layout cannot travel so."""
    try:
        check_encoding(encoding, layout)
    except InvalidRequest as error:
        raise SetupError(f"--kv-wire {encoding}: {error.message}") from error


class WireEncoder:
    """Encodes one worker's chunks. Belongs to one event loop."""

    def __init__(self, store: BlockStore, layout: LayoutRecord, encoding: str) -> None:
        """Raises SetupError where blocks of this layout cannot travel so."""
        check_wire(encoding, layout)
        self._store = store
        self._layout = layout
        self._encoding = encoding
        self._num_running = 0
        self._turns = FifoGate("chunks that are encoded")

    async def publish(
        self, transport: KvTransport, lease_id: str, chunk: ChunkRange, block_ids: Sequence[int], *, ttl_s: float, deadline: float
    ) -> ChunkInfo:
        """Does as KvTransport.publish; nothing reads the blocks any more when it ends."""
        assert isinstance(transport, CopyingTransport), "chosen by the publisher"
        await self._turns.take(self._take, deadline=deadline)
        try:
            data = await finish(asyncio.to_thread(self._encoded, chunk, tuple(block_ids)))
            checksum = await transport.publish_bytes(lease_id, chunk.index, data, ttl_s=ttl_s, deadline=deadline)
        finally:
            self._num_running -= 1
            self._turns.pump()
        return ChunkInfo(
            index=chunk.index,
            first_block=chunk.first_block,
            num_blocks=len(block_ids),
            num_bytes=data.size,
            checksum=checksum,
            first_layer=chunk.layers.first if chunk.layers else 0,
            num_layers=chunk.layers.num_layers if chunk.layers else 0,
        )

    def _take(self) -> bool | None:
        if self._num_running == _MAX_CHUNKS:
            return None
        self._num_running += 1
        return True

    def _encoded(self, chunk: ChunkRange, block_ids: Sequence[int]) -> Bytes:
        """Returns the blocks' encoded bytes. In a thread."""
        num_layers = chunk.layers.num_layers if chunk.layers else self._layout.num_layers
        blocks = np.empty((len(block_ids), block_bytes(self._layout, num_layers)), np.uint8)
        self._store.read_blocks(block_ids, blocks, chunk.layers)
        return encode(self._encoding, blocks, self._layout, num_layers=num_layers)
