"""All hand-overs of the decode worker: each one's fetching, and the word to its source how it ended. Nothing here touches the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from decode_worker.fetching import ACKNOWLEDGE_S, Fetched, Fetching, FetchParts
from decode_worker.paths import Paths, Source
from decode_worker.peers import Peers
from decode_worker.target import Target
from kv_transfer import layout as kv_layout
from kv_transfer.observer import TransferObserver
from kv_transfer.ticket import Ticket
from kv_transfer.transport import BlockStore
from kv_transfer.transports import Transports
from twostep.cluster.records import LayoutRecord
from twostep.process.tracing import Metadata
from twostep.rpc.v1 import kv_pb2, kv_pb2_grpc

__all__ = ["Fetched", "Fetcher", "Target"]

log = logging.getLogger(__name__)

_MAX_TOLD = 3
_TELL_AGAIN_S = 0.2


class Fetcher:
    def __init__(
        self,
        transports: Transports,
        layout: LayoutRecord,
        store: BlockStore,
        peers: Peers,
        paths: Paths,
        observer: TransferObserver,
        *,
        chunk_timeout_s: float = 30.0,
        wires: Sequence[str] = (),
    ) -> None:
        """`transports`: those this side can fetch with. `store`: the pool, of `layout`. `wires`: forms of KV taken besides raw, best first
        (kv_transfer.wire_encoding)."""
        self._layout = kv_layout.fingerprint(layout)
        self._peers = peers
        self._paths = paths
        self._parts = FetchParts(
            transports=transports,
            layout=layout,
            store=store,
            paths=paths,
            observer=observer,
            chunk_timeout_s=chunk_timeout_s,
            wires=tuple(wires),
        )

    async def fetch(self, ticket: Ticket, target: Target, *, ahead: Callable[[Sequence[int]], None], metadata: Metadata = ()) -> Fetched:
        """Returns when every block of the target holds verified KV that the source still held when it was read. Raises Incompatible,
        InvalidRequest (never worth repeating) and Unavailable, DataLoss, ... (another attempt may succeed). When it returns, raises or
        has been cancelled, nothing writes into the blocks any more. `ahead` is called with the output ids when all of it is here and
        verified and only the source's word is awaited. `metadata`, its trace context, goes along with what the source is asked."""
        source = Source(worker_id=ticket.worker_id, epoch=ticket.epoch, address=ticket.address)
        offered = await self._paths.offered(source, host_only=ticket.layout != self._layout)
        async with self._peers.channel(ticket) as channel:
            stub: kv_pb2_grpc.KvAsyncStub = kv_pb2_grpc.KvStub(channel)
            return await Fetching(self._parts, stub, ticket, source, target, offered, ahead=ahead, metadata=metadata).run()

    async def acknowledge(self, ticket: Ticket, outcome: kv_pb2.AcknowledgeRequest.Outcome.ValueType, reason: str = "") -> None:
        """Tells the prefill worker, three times at most. If it cannot be told, the lease expires there by itself."""
        request = kv_pb2.AcknowledgeRequest(ticket=ticket.to_proto(), outcome=outcome, reason=reason[:200])
        for attempt in range(_MAX_TOLD):
            try:
                async with self._peers.channel(ticket) as channel:
                    stub: kv_pb2_grpc.KvAsyncStub = kv_pb2_grpc.KvStub(channel)
                    await stub.Acknowledge(request, timeout=ACKNOWLEDGE_S)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    log.warning("%s does not take an acknowledgement: %s", ticket.worker_id, error.details())
                    return
                log.debug("acknowledgement %d of %s: %s", attempt, ticket.lease_id, error.details())
            await asyncio.sleep(_TELL_AGAIN_S * (attempt + 1))
