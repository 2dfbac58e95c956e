"""Defines what edges ask of the side where the pool is: blocks out of it and into it, by a transport's name.

An edge knows sequences, tickets and leases; the pool, what encodes and converts its blocks, and the transports may be in another process
(kv_transfer/remote.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kv_transfer.chunking import ChunkRange
from kv_transfer.conversion import Conversion, ConversionPlan
from kv_transfer.encoder import WireEncoder
from kv_transfer.transport import BlockStore, ChunkInfo, KvTransport
from kv_transfer.wire_encoding import RAW
from twostep.cluster.records import LayoutRecord
from twostep.errors import Unavailable


class PoolSide(Protocol):
    """All but `end` as KvTransport's methods: what is cancelled has ended when its coroutine has."""

    async def publish(
        self, transport: str, lease_id: str, seq_id: str, chunk: ChunkRange, *, wire: str, ttl_s: float, deadline: float
    ) -> ChunkInfo:
        """Publishes blocks of a sequence, which are final, in the form `wire`. What is read where it lies comes with its blocks and their
        generations. Raises NotFound besides: the sequence has ended."""
        ...

    async def fetch(
        self, transport: str, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float
    ) -> float: ...

    async def convert(
        self, transport: str, endpoint: str, lease_id: str, chunk: ChunkInfo, plan: ConversionPlan, *, deadline: float
    ) -> float:
        """Fetches a chunk of another layout or form, and writes what blocks of ours it makes whole. See Conversion."""
        ...

    def end(self, plan: ConversionPlan) -> None:
        """Notes that nothing of this hand-over is converted any more."""
        ...


class SequenceBlocks(Protocol):
    """An engine, as far as publishing needs it."""

    def block_ids(self, seq_id: str) -> Sequence[int]: ...

    def generations(self, block_ids: Sequence[int]) -> Sequence[int]: ...


class TransportsByName(Protocol):
    def get(self, name: str) -> KvTransport | None: ...


class LocalPool:
    """A PoolSide of this process. Belongs to one event loop."""

    def __init__(
        self, sequences: SequenceBlocks, store: BlockStore, layout: LayoutRecord, encoding: str, transports: TransportsByName
    ) -> None:
        """Raises SetupError where blocks of this layout cannot travel as `encoding`."""
        self._sequences = sequences
        self._store = store
        self._transports = transports
        self._encoder = WireEncoder(store, layout, encoding)
        self._conversions: dict[int, Conversion] = {}

    async def publish(
        self, transport: str, lease_id: str, seq_id: str, chunk: ChunkRange, *, wire: str, ttl_s: float, deadline: float
    ) -> ChunkInfo:
        by = self.by(transport)
        block_ids = self._sequences.block_ids(seq_id)[chunk.first_block : chunk.stop_block]
        if wire != RAW:
            return await self._encoder.publish(by, lease_id, chunk, block_ids, ttl_s=ttl_s, deadline=deadline)
        info = await by.publish(lease_id, chunk.index, chunk.first_block, block_ids, layers=chunk.layers, ttl_s=ttl_s, deadline=deadline)
        if by.copies_out:
            return info
        # What the reader will say that it read. The lease's sequence owns the blocks: they cannot change now.
        return replace(info, source_blocks=tuple(block_ids), generations=tuple(self._sequences.generations(block_ids)))

    async def fetch(
        self, transport: str, endpoint: str, lease_id: str, chunk: ChunkInfo, block_ids: Sequence[int], *, deadline: float
    ) -> float:
        return await self.by(transport).fetch(endpoint, lease_id, chunk, block_ids, deadline=deadline)

    async def convert(
        self, transport: str, endpoint: str, lease_id: str, chunk: ChunkInfo, plan: ConversionPlan, *, deadline: float
    ) -> float:
        by, conversion = self.by(transport), self._conversions.get(plan.number)
        if conversion is None:
            conversion = self._conversions[plan.number] = Conversion(plan, self._store)
        return await conversion.fetch(by, endpoint, lease_id, chunk, deadline=deadline)

    def end(self, plan: ConversionPlan) -> None:
        self._conversions.pop(plan.number, None)

    def by(self, name: str) -> KvTransport:
        """Raises Unavailable."""
        transport = self._transports.get(name)
        if transport is None:
            raise Unavailable(f"there is no KV transport {name} here any more; prefill again")
        return transport
