"""KV from a worker of another layout: fetched into host memory, dealt out to blocks of ours (kv_transfer.convert), written whole.

Only the cut into blocks may differ. KV whose numbers would be rounded, or were rounded before, must not stand under the prefix hashes of
exact KV, which name the pool's own dtype: such pairs are refused.
"""

from __future__ import annotations

import asyncio

import numpy as np

from decode_worker.target import Target
from kv_transfer.convert import Assembler, block_bytes
from kv_transfer.local import part_bytes
from kv_transfer.scattering import scattering
from kv_transfer.transport import BlockStore, Bytes, ChunkInfo, HostFetch, KvTransport
from kv_transfer.waiting import finish
from twostep.cluster.convertible import check_convertible, joinable
from twostep.cluster.records import LayoutRecord
from twostep.errors import Incompatible, InvalidRequest


class Conversion:
    """Of one hand-over. Chunks may come in any order, and twice; a target block is written once it is whole."""

    def __init__(self, source: LayoutRecord, ours: LayoutRecord, store: BlockStore, transport: KvTransport, target: Target) -> None:
        """Raises Incompatible."""
        check_convertible(source, ours)
        if not joinable(source, ours):
            raise Incompatible(
                f"KV is {source.dtype}, quantization {source.quantization}, {source.tp_size} parts there and {ours.dtype}, quantization "
                f"{ours.quantization}, {ours.tp_size} parts here; start both workers with the same --dtype and --kv-cache-dtype"
            )
        if not isinstance(transport, HostFetch):
            raise Incompatible(f"{transport.name} moves blocks as they are, and these differ in size; allow ray, or use one --block-size")
        self._source = source
        self._store = store
        self._transport = transport
        self._target = target
        self._assembler = Assembler(ours, first_block=target.num_cached_blocks, num_tokens=target.num_tokens)
        self._cached_tokens = target.num_cached_blocks * ours.block_size
        # The assembler is of one thread at a time.
        self._turn = asyncio.Lock()

    @property
    def source_span(self) -> tuple[int, int]:
        """Blocks of the source that hold what is missing, as (first, stop)."""
        size = self._source.block_size
        return self._cached_tokens // size, -(-self._target.num_tokens // size)

    async def fetch(self, endpoint: str, lease_id: str, chunk: ChunkInfo, *, deadline: float) -> None:
        """As KvTransport.fetch: nothing is written any more when it ends. Raises InvalidRequest for a chunk of another size besides."""
        each = part_bytes(block_bytes(self._source), self._source.num_layers, chunk.layers)
        if chunk.num_bytes != each * chunk.num_blocks:
            raise InvalidRequest(
                f"chunk {chunk.index} has {chunk.num_bytes} bytes, not {chunk.num_blocks} blocks of {each}; run one version"
            )
        data = await self._transport.fetch_bytes(endpoint, lease_id, chunk, deadline=deadline)
        async with self._turn:
            with scattering():
                await finish(asyncio.to_thread(self._write, chunk, data.reshape(chunk.num_blocks, each)))

    def _write(self, chunk: ChunkInfo, blocks: Bytes) -> None:
        done = self._assembler.add(
            self._source, chunk.first_block, blocks, first_layer=chunk.first_layer, num_layers=chunk.num_layers or self._source.num_layers
        )
        if done:
            ids = [self._target.block_ids[block.index] for block in done]
            self._store.write_blocks(ids, np.stack([block.data for block in done]))
