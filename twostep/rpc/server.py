"""The gRPC server of every process: limits, TLS, keepalive, health, reflection, guarded handlers, graceful drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from twostep.errors import SetupError
from twostep.rpc.channel import MAX_MESSAGE_BYTES
from twostep.rpc.guard import Admit, Guard
from twostep.rpc.health import READINESS, HealthBoard, HealthServicer
from twostep.settings.tls import PLAINTEXT, TlsFiles

log = logging.getLogger(__name__)

# For calls that are told so to say it to their callers.
_LAST_WORD_S = 1.0
# Of the health port, which anybody may ask who reaches it.
_HEALTH_CONNECTIONS = 256
_HEALTH_CALLS = 64
_HEALTH_MESSAGE_BYTES = 4 << 10
# A connection on which nothing is under way for so long is closed, with a word to its client, which opens another with its next call.
_IDLE_MS = 30 * 60_000
# One that does not come about, with or without TLS.
_HANDSHAKE_MS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """`port` 0: any free port. `health_port` None: port + 1 (any free one if `port` is 0); -1: none. `max_concurrent_rpcs`
    counts open streams too; calls above it get RESOURCE_EXHAUSTED, and those whose message has not come give way to others (see
    twostep.rpc.slots). Connections above `max_connections` are closed at once. `compression` is that of what is sent; whatever comes is
    understood."""

    host: str = "127.0.0.1"
    port: int = 0
    health_port: int | None = None
    tls: TlsFiles = PLAINTEXT
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_concurrent_rpcs: int = 1024
    max_connections: int = 4096
    compression: grpc.Compression = grpc.Compression.NoCompression


class GrpcServer:
    """add() services, start(), drain(). `health` starts not ready: set READINESS once the process can serve."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        alive: Callable[[], bool] = lambda: True,
        admit: Sequence[Admit] = (),
    ) -> None:
        """Needs a running event loop. `admit` are asked about every call but those of health (twostep.rpc.guard). Raises SetupError for
        unreadable TLS files."""
        self.config = config
        self.health = HealthBoard(alive)
        self.port = 0
        self.health_port = 0
        self._credentials = _credentials(config.tls)
        self._names: list[str] = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        self._guard = Guard(config.max_concurrent_rpcs, admit)
        self._server = grpc.aio.server(
            interceptors=[self._guard],
            options=server_options(
                config.max_message_bytes, max_connections=config.max_connections, max_streams=config.max_concurrent_rpcs
            ),
            compression=config.compression,
        )
        self._health_server: grpc.aio.Server | None = None
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(self.health), self._server)

    def add(self, servicer: Any, add_to_server: Callable[[Any, grpc.aio.Server], None], full_name: str) -> None:
        """Before start. For example `add(prefill, add_PrefillServicer_to_server, "twostep.v1.Prefill")`. Handlers are
        `async def` (unary) or async generators (streams)."""
        add_to_server(servicer, self._server)
        self._names.append(full_name)

    async def start(self) -> int:
        reflection.enable_server_reflection(self._names, self._server)
        self.port = _bind(self._server, self.config.host, self.config.port, self._credentials, "--grpc-port")
        await self._server.start()
        if self.config.health_port != -1:
            wanted = self.config.health_port
            if wanted is None:
                wanted = self.config.port + 1 if self.config.port else 0
            self._health_server = health_server(self.health)
            try:
                self.health_port = _bind(self._health_server, self.config.host, wanted, None, "--health-port")
            except SetupError:
                await self._server.stop(None)
                raise
            await self._health_server.start()
        return self.port

    async def drain(self, grace_s: float) -> None:
        """Not ready from now on; no new call is accepted, running ones have `grace_s` to end and then end with UNAVAILABLE. Returns when
        all have ended. The health port answers to the last."""
        self.health.set(READINESS, False)
        # What gRPC itself ends looks to its caller as if the caller had cancelled it.
        stopping = asyncio.ensure_future(self._server.stop(grace_s + _LAST_WORD_S))
        await asyncio.wait((stopping,), timeout=grace_s)
        self._guard.end_all()
        await stopping
        if self._health_server is not None:
            await self._health_server.stop(None)

    async def wait(self) -> None:
        await self._server.wait_for_termination()


def health_server(board: HealthBoard) -> grpc.aio.Server:
    """For a port that says how a process is, and nothing else."""
    options = server_options(_HEALTH_MESSAGE_BYTES, max_connections=_HEALTH_CONNECTIONS, max_streams=_HEALTH_CALLS)
    server = grpc.aio.server(interceptors=[Guard(_HEALTH_CALLS)], options=options)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(board), server)
    return server


def server_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES, *, max_connections: int = 4096, max_streams: int = 1024
) -> Sequence[tuple[str, int]]:
    """Options of every server; `max_streams` are those of one connection. Its keepalive policy allows the pings of twostep.rpc.channel."""
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", max_streams),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # What is not read yet is 64 KiB of each stream at most, whatever rate its connection has shown.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Two processes on one port would each get half of the calls; better to fail at start.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients ping every 10 s (twostep.rpc.channel).
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ]


def _credentials(tls: TlsFiles) -> grpc.ServerCredentials | None:
    if not tls.enabled:
        return None
    cert, key, ca = tls.read()
    if cert is None or key is None:
        raise SetupError("--tls-ca alone cannot serve TLS; give --tls-cert and --tls-key too")
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=ca is not None)


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None, flag: str) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # gRPC does not say which of these it is.
    why = "" if credentials is None else ", or --tls-cert, --tls-key and --tls-ca hold no matching certificates"
    refusal = SetupError(f"cannot listen on {address}: the port may be in use{why}; choose another with {flag}, or another --host")
    try:
        bound = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise refusal from error
    if bound == 0:
        raise refusal
    log.debug("listening on %s:%d", host, bound)
    return bound
