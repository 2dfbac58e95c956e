"""KV that does not come as it is to lie here: of another layout (kv_transfer.layout_conversion) or encoded (kv_transfer.wire_encoding).
Fetched into host memory, decoded, dealt out to blocks of ours, written whole.

What is not the KV that this worker would have computed (`exact`) is decoded from like any other, but must never stand under the prefix
hashes of the pool: see twostep.cluster.convertible.cache_key_fields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_transfer.layout_conversion import Assembler, TargetBlock, all_layers, block_bytes
from kv_transfer.pool_transport import CopyingTransport
from kv_transfer.transport import BlockStore, Bytes, ChunkInfo, KvTransport, TransportEnd
from kv_transfer.waiting import finish
from kv_transfer.wire_encoding import LOSSY, RAW, check_encoding, decode, wire_layout
from twostep.cluster.convertible import check_joinable, keeps_keys
from twostep.cluster.records import LayoutRecord
from twostep.errors import Incompatible, InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTarget:
    """Says where the KV of a prompt's `num_tokens` goes: its `num_blocks` blocks in the order of a hand-over (twostep/block_order.py), the
    first `num_cached_blocks` of which hold theirs already, all that there is of the first `num_cached_tokens`."""

    block_ids: Sequence[int]
    num_cached_blocks: int
    num_blocks: int
    num_tokens: int
    num_cached_tokens: int

    @property
    def num_missing_blocks(self) -> int:
        return self.num_blocks - self.num_cached_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """Says how one hand-over's KV becomes ours: plain data, for either process. `number`: that of the pull among this worker's."""

    number: int
    source: LayoutRecord
    ours: LayoutRecord
    target: BlockTarget
    wire: str = RAW

    def check(self, transport: TransportEnd) -> None:
        """Raises Incompatible."""
        check_joinable(self.source, self.ours)
        if not transport.copies_out:
            raise Incompatible(
                f"{transport.name} moves blocks as they are, and these must be converted on the way; allow ray on both workers, or start "
                "them with the same --block-size, --dtype and --kv-cache-dtype"
            )
        try:
            check_encoding(self.wire, self.source)
        except InvalidRequest as error:
            raise Incompatible(f"the prefill worker's blocks cannot have been encoded so: {error.message}; run one version") from error

    @property
    def exact(self) -> bool:
        return keeps_keys(self.source, self.ours) and self.wire not in LOSSY

    @property
    def encoded(self) -> tuple[LayoutRecord, str]:
        """The layout of the blocks that come, and their form. Lossy forms are blocks of a layout: where blocks are dealt out anyway, each
        number is rounded once."""
        again = self.wire in LOSSY and self.source != self.ours
        return (wire_layout(self.wire, self.source), RAW) if again else (self.source, self.wire)

    @property
    def source_span(self) -> tuple[int, int]:
        """Blocks of the source that hold what is missing, as (first, stop), in the order of its hand-over."""
        layout = self.encoded[0]
        order = layout.order(self.target.num_tokens)
        return order.before(self.target.num_cached_tokens // layout.block_size), order.count


class Conversion:
    """Converts one hand-over's KV. Chunks may come in any order, and twice; a target block is written once it is whole."""

    def __init__(self, plan: ConversionPlan, store: BlockStore) -> None:
        self._store = store
        self._target, self._ours, self._exact = plan.target, plan.ours, plan.exact
        self._source, self._wire = plan.encoded
        # None: whole blocks of ours come.
        self._assembler = None
        if plan.source != plan.ours:
            self._ordered = list(self._source.order(plan.target.num_tokens).places())
            self._order = plan.ours.order(plan.target.num_tokens)
            self._assembler = Assembler(
                all_layers(plan.ours),
                first_block=plan.target.num_cached_tokens // plan.ours.block_size,
                num_tokens=plan.target.num_tokens,
                num_unseen=self._order.num_unseen,
                num_unwindowed=self._order.num_full * plan.ours.num_layers,
            )
        # The assembler is of one thread at a time.
        self._turn = asyncio.Lock()

    async def fetch(self, transport: KvTransport, endpoint: str, lease_id: str, chunk: ChunkInfo, *, deadline: float) -> float:
        """Does as KvTransport.fetch: nothing is written any more when it ends. Raises InvalidRequest for a chunk of another size besides,
        and Incompatible where a number has no place in the pool's format."""
        assert isinstance(transport, CopyingTransport), "the plan was checked"
        num_layers = chunk.num_layers or self._source.num_layers
        most = chunk.num_blocks * block_bytes(self._source, num_layers)
        # What is encoded is never larger, and its size is checked once it is decoded.
        if chunk.num_bytes > most or (self._wire == RAW and chunk.num_bytes != most):
            raise InvalidRequest(f"chunk {chunk.index} has {chunk.num_bytes} bytes, {chunk.num_blocks} blocks have {most}; run one version")
        data = await transport.fetch_bytes(endpoint, lease_id, chunk, deadline=deadline)
        async with self._turn:
            start = time.monotonic()
            await finish(asyncio.to_thread(self._write, chunk, data, num_layers))
            return time.monotonic() - start

    def _write(self, chunk: ChunkInfo, data: Bytes, num_layers: int) -> None:
        """Decodes a chunk, converts it and writes the blocks that are whole. In a thread. Raises DataLoss for what cannot have been encoded
        so."""
        blocks = decode(self._wire, data, chunk.num_blocks, self._source, num_layers=num_layers)
        if self._assembler is None:
            ids = self._target.block_ids[chunk.first_block : chunk.first_block + chunk.num_blocks]
            self._store.write_blocks(ids, blocks, chunk.layers)
            return
        done: list[TargetBlock] = []
        places = self._ordered[chunk.first_block : chunk.first_block + chunk.num_blocks]
        for group in sorted({group for group, _ in places}):
            # One column after the other.
            rows = [row for row, place in enumerate(places) if place[0] == group]
            first_layer = group * self._source.num_layers + chunk.first_layer
            some = blocks if len(rows) == len(blocks) else blocks[rows]
            source, first_column = all_layers(self._source), places[rows[0]][1]
            done += self._assembler.add(source, first_column, some, first_layer=first_layer, num_layers=num_layers)
        if done:
            ids = [self._target.block_ids[first + i] for first, count in map(self._numbers, done) for i in range(count)]
            # A group's layers come one after the other.
            parts = [block.data.reshape(self._ours.num_groups, -1)[: self._numbers(block)[1]] for block in done]
            whole = np.concatenate(parts)
            self._check_range(whole)
            self._store.write_blocks(ids, whole)

    def _numbers(self, block: TargetBlock) -> tuple[int, int]:
        """Returns which blocks of the order a column of all layers is: the first, and how many."""
        first = self._order.before(block.index)
        return first, self._order.before(block.index + 1) - first

    def _check_range(self, blocks: Bytes) -> None:
        """Checks that all numbers have a place in float16, which ends at 65504 where other formats do not: what is beyond has become
        infinite. Raises Incompatible."""
        if (self._ours.dtype, self._ours.quantization) != ("float16", "none") or self._exact:
            return
        if not np.isfinite(blocks.view(np.float16)).all():
            raise Incompatible(
                f"KV of {self._source.dtype} holds numbers that float16 has not; start the decode worker with another --dtype"
            )
