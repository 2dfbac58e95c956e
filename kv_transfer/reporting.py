"""What both workers say of a transport in WorkerStats."""

from __future__ import annotations

from kv_transfer.observer import TransferStats
from kv_transfer.transport import KvTransport
from twostep.rpc.v1 import worker_pb2


async def transport_stats(transport: KvTransport, totals: TransferStats) -> worker_pb2.TransportStats:
    """What it holds now, and what it has moved."""
    held = await transport.stats()
    return worker_pb2.TransportStats(
        name=transport.name,
        ready=transport.ready,
        num_leases=held.num_leases,
        num_objects=held.num_objects,
        stored_bytes=held.stored_bytes,
        num_transfers=totals.num_transfers,
        num_bytes=totals.num_bytes,
        num_chunks=totals.num_chunks,
        queue_s=totals.queue_s,
        copy_s=totals.copy_s,
        scatter_s=totals.scatter_s,
        exposed_s=totals.exposed_s,
        retries=totals.retries,
        failures=totals.failures,
    )
