"""Questions to running processes: is it ready, what does it hold. Each answers within two seconds and never raises."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from twostep.errors import TwostepError
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.call_signing import CallSigner, introduced
from twostep.rpc.channel import channel_options
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 2.0
_OPTIONS = [*channel_options(), ("grpc.enable_http_proxy", 0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """Holds what a worker has right now."""

    transport_ready: bool
    held: str
    """Empty if nothing is in flight, else what is."""


class Probes:
    """Connections to the processes of one system, kept open between questions."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def healthy(self, address: str, service: str) -> bool:
        """`service` is "readiness" or "liveness", asked of a health port."""
        check = self._channel(address).unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            response = await check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def worker(self, address: str, secret: DeploymentSecret, *, check_integrity: bool = False) -> WorkerState | None:
        """Asked of a worker's own port; None if it does not answer. `check_integrity`: it looks at all of its blocks, which takes it
        milliseconds, or a second if it has millions."""
        try:
            # Each time: it may have started again, or changed its role.
            channel = await introduced(self._channel(address), CallSigner(secret, "twostep up"))
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            stats = await stub.Stats(worker_pb2.WorkerStatsRequest(check_integrity=check_integrity), timeout=_TIMEOUT_S)
        except (grpc.RpcError, TwostepError):
            return None
        return WorkerState(transport_ready=any(transport.ready for transport in stats.transports), held=_held(stats))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, _OPTIONS)
        return self._channels[address]


def _held(stats: worker_pb2.WorkerStats) -> str:
    if stats.integrity_error:
        return stats.integrity_error
    counts = {
        "sequences running": stats.num_running,
        "sequences waiting": stats.num_waiting,
        "reservations": stats.num_reserved,
        "sequences held": stats.num_held,
        "leases": stats.num_leases,
        "sequences": stats.num_sequences,
        "blocks in use": stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks,
        "objects": sum(transport.num_objects for transport in stats.transports),
        "bytes in the object store": sum(transport.stored_bytes for transport in stats.transports),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


async def ray_up(directory: Path, host: str, port: int) -> bool:
    """`ray start` has written its address file, and its GCS listens."""
    if not (directory / "ray_current_cluster").is_file():
        return False
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
