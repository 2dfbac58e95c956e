"""One hand-over as the decode worker sees it: watch, pull, verify. Nothing here touches the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import grpc
import grpc.aio

from decode_worker.peers import Peers
from kv_transfer import layout as kv_layout
from kv_transfer.ticket import Ticket
from kv_transfer.transport import ChunkInfo, KvTransport
from twostep.cluster.records import LayoutRecord
from twostep.errors import DataLoss, Incompatible, InternalError, InvalidRequest, TwostepError, Unavailable
from twostep.rpc.channel import error_from_rpc
from twostep.rpc.v1 import kv_pb2, kv_pb2_grpc

log = logging.getLogger(__name__)

# Chunks of one sequence on their way in at once.
_MAX_FETCHING = 4
_ACKNOWLEDGE_S = 2.0
_RENEW_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a sequence's KV goes: its blocks in its own order, the first `num_cached_blocks` of which hold theirs already, and
    `num_blocks` of which the prompt fills."""

    block_ids: Sequence[int]
    num_cached_blocks: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A whole, verified KV cache, and the tokens that were sampled after it. `fetch_s`: seconds from the word that all is published
    to the last block in place; what was pulled before, while the prompt was still being computed, cost nobody any time."""

    output_ids: Sequence[int]
    transport: str
    num_bytes: int
    num_chunks: int
    num_blocks: int
    fetch_s: float


@dataclass(slots=True)
class _Progress:
    """What of one hand-over has been announced and fetched."""

    manifest: kv_pb2.Manifest | None = None
    # (block, layer)
    cells: set[tuple[int, int]] = field(default_factory=set)
    num_chunks: int = 0
    num_bytes: int = 0
    complete_at: float = 0.0
    renewed_at: float = field(default_factory=time.monotonic)


class Fetcher:
    def __init__(self, transports: Mapping[str, KvTransport], layout: LayoutRecord, peers: Peers, *, chunk_timeout_s: float = 30.0) -> None:
        """`transports` by name: those this side can fetch with."""
        self._transports = transports
        self._layout = layout
        self._peers = peers
        self._chunk_timeout_s = chunk_timeout_s

    async def fetch(self, ticket: Ticket, target: Target) -> Fetched:
        """Returns when every block of the target holds verified KV. Raises Incompatible, InvalidRequest (never worth repeating) and
        Unavailable, DataLoss, ... (another attempt may succeed). When it returns, raises or has been cancelled, nothing writes into the
        blocks any more."""
        life_s = ticket.expires_unix_ms / 1000 - time.time()
        async with self._peers.channel(ticket.address) as channel:
            stub: kv_pb2_grpc.KvAsyncStub = kv_pb2_grpc.KvStub(channel)
            room = asyncio.Semaphore(_MAX_FETCHING)
            state = _Progress()
            complete: kv_pb2.Complete | None = None
            watch = stub.Watch(kv_pb2.WatchRequest(ticket=ticket.to_proto()), timeout=life_s)
            try:
                async with asyncio.TaskGroup() as chunks:
                    async for event in watch:
                        match event.WhichOneof("event"):
                            case "manifest":
                                self._check_manifest(event.manifest, target)
                                state.manifest = event.manifest
                            case "chunk":
                                info = self._check_chunk(event.chunk, state, target)
                                chunks.create_task(self._fetch_chunk(stub, ticket, state, info, target, room))
                            case "complete":
                                complete = event.complete
                                state.complete_at = time.monotonic()
            except ExceptionGroup as group:
                raise _first_error(group) from group
            finally:
                watch.cancel()
            return self._check_complete(complete, state, target)

    async def acknowledge(self, ticket: Ticket, outcome: kv_pb2.AcknowledgeRequest.Outcome.ValueType, reason: str = "") -> None:
        """Tells the prefill worker, three times at most. If it cannot be told, the lease expires there by itself."""
        request = kv_pb2.AcknowledgeRequest(ticket=ticket.to_proto(), outcome=outcome, reason=reason[:200])
        for attempt in range(3):
            try:
                async with self._peers.channel(ticket.address) as channel:
                    stub: kv_pb2_grpc.KvAsyncStub = kv_pb2_grpc.KvStub(channel)
                    await stub.Acknowledge(request, timeout=_ACKNOWLEDGE_S)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    log.warning("%s does not take an acknowledgement: %s", ticket.worker_id, error.details())
                    return
                log.debug("acknowledgement %d of %s: %s", attempt, ticket.lease_id, error.details())
            await asyncio.sleep(0.2 * (attempt + 1))

    def _check_manifest(self, manifest: kv_pb2.Manifest, target: Target) -> None:
        kv_layout.check_compatible(self._layout, kv_layout.layout_from_proto(manifest.layout))
        transport = self._transports.get(manifest.transport)
        if transport is None:
            raise Incompatible(
                f"KV is published by {manifest.transport!r}, but here is only {sorted(self._transports)}; align --kv-transfer"
            )
        if not transport.ready:
            raise Unavailable(f"the {manifest.transport} KV transport is not ready on the decode worker; it comes back by itself")
        wanted = (target.num_cached_blocks, target.num_blocks - target.num_cached_blocks)
        if (manifest.first_block, manifest.num_blocks) != wanted:
            raise InvalidRequest(
                f"blocks {manifest.first_block} + {manifest.num_blocks} are published, but {wanted[0]} + {wanted[1]} are missing; "
                "give the reservation's num_cached_tokens as num_decode_cached_tokens"
            )

    def _check_chunk(self, chunk: kv_pb2.Chunk, state: _Progress, target: Target) -> ChunkInfo:
        """A chunk outside of the manifest, or of blocks announced before, must not be written anywhere."""
        if state.manifest is None:
            raise InvalidRequest("a chunk came before the manifest; the two workers run different versions")
        blocks = range(chunk.first_block, chunk.first_block + chunk.num_blocks)
        layers = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
        inside = target.num_cached_blocks <= blocks.start < blocks.stop <= target.num_blocks
        inside = inside and layers.start < layers.stop <= self._layout.num_layers
        cells = set(product(blocks, layers)) if inside else set()
        if not inside or not state.cells.isdisjoint(cells):
            raise InvalidRequest(f"chunk {chunk.index} does not fit the manifest; the two workers run different versions")
        state.cells.update(cells)
        state.num_chunks += 1
        return ChunkInfo(
            index=chunk.index,
            first_block=chunk.first_block,
            num_blocks=chunk.num_blocks,
            num_bytes=chunk.num_bytes,
            checksum=chunk.checksum,
            first_layer=chunk.first_layer,
            num_layers=0 if len(layers) == self._layout.num_layers else len(layers),
        )

    async def _fetch_chunk(
        self, stub: kv_pb2_grpc.KvAsyncStub, ticket: Ticket, state: _Progress, chunk: ChunkInfo, target: Target, room: asyncio.Semaphore
    ) -> None:
        assert state.manifest is not None
        transport = self._transports[state.manifest.transport]
        block_ids = target.block_ids[chunk.first_block : chunk.first_block + chunk.num_blocks]
        async with room:
            deadline = time.monotonic() + self._chunk_timeout_s
            try:
                await transport.fetch(state.manifest.endpoint, ticket.lease_id, chunk, block_ids, deadline=deadline)
            except DataLoss as error:
                log.warning("fetching chunk %d of %s again: %s", chunk.index, ticket.lease_id, error)
                await transport.fetch(state.manifest.endpoint, ticket.lease_id, chunk, block_ids, deadline=deadline)
        state.num_bytes += chunk.num_bytes
        if time.monotonic() - state.renewed_at > _RENEW_EVERY_S:
            state.renewed_at = time.monotonic()
            try:
                progress = kv_pb2.AcknowledgeRequest(ticket=ticket.to_proto(), outcome=kv_pb2.AcknowledgeRequest.OUTCOME_PROGRESS)
                await stub.Acknowledge(progress, timeout=_ACKNOWLEDGE_S)
            except grpc.aio.AioRpcError as error:
                # The next fetch tells whether the source is really gone.
                log.debug("lease %s could not be renewed: %s", ticket.lease_id, error.details())

    def _check_complete(self, complete: kv_pb2.Complete | None, state: _Progress, target: Target) -> Fetched:
        num_blocks = target.num_blocks - target.num_cached_blocks
        if complete is None or state.manifest is None:
            raise Unavailable("the prefill worker ended the hand-over before it was complete; prefill again")
        num_cells = num_blocks * self._layout.num_layers
        if complete.num_chunks != state.num_chunks or len(state.cells) != num_cells or not complete.output_ids:
            raise DataLoss(
                f"{len(state.cells)} of {num_cells} layers of blocks came in {state.num_chunks} of {complete.num_chunks} chunks; "
                "prefill again"
            )
        return Fetched(
            output_ids=tuple(complete.output_ids),
            transport=state.manifest.transport,
            num_bytes=state.num_bytes,
            num_chunks=state.num_chunks,
            num_blocks=num_blocks,
            fetch_s=time.monotonic() - state.complete_at,
        )


def _first_error(group: ExceptionGroup[Exception]) -> TwostepError:
    """What the first task failed with; the others were cancelled for it."""
    error = group.exceptions[0]
    if isinstance(error, TwostepError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return error_from_rpc(error)
    log.error("a hand-over failed unexpectedly", exc_info=error)
    return InternalError(f"the hand-over failed: {error!r}; see the decode worker's log")
