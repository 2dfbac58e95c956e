"""The client side of every connection between processes, and of the SDK: grpcio only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import grpc
import grpc.aio

from twostep import __version__
from twostep.errors import TwostepError, error_from_grpc
from twostep.settings.tls import PLAINTEXT, TlsFiles
from twostep.version_skew import user_agent

MAX_MESSAGE_BYTES = 16 << 20

Signature = tuple[tuple[str, bytes], ...]


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of every client channel. The server's keepalive policy (twostep.rpc.server) allows these pings."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # A dead peer is noticed within 15 s even if its machine vanished without a word.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # A frozen one within 20 s: its kernel still acknowledges what it gets, and only the ping's own answer is missing.
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # In gRPC's core this is how long a connection may take to come about. It needs three round trips with TLS, the other end of the
        # world is 0.3 s away, and a peer that is busy is not one that is away.
        ("grpc.min_reconnect_backoff_ms", 3_000),
        # A worker that comes back is found within a second.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Channels to one address would share its connection otherwise, and the pause after its last failure: a worker that starts where
        # another one was has nothing to do with that.
        ("grpc.use_local_subchannel_pool", 1),
        # Repeating is decided where it is known to be safe, never by the channel.
        ("grpc.enable_retries", 0),
    ]


def client_credentials(tls: TlsFiles) -> grpc.ChannelCredentials | None:
    """None: plaintext. Raises SetupError for unreadable files."""
    if not tls.enabled:
        return None
    cert, key, ca = tls.read()
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def compression_of(name: str) -> grpc.Compression:
    """One of COMPRESSIONS, as gRPC calls it."""
    return {"none": grpc.Compression.NoCompression, "gzip": grpc.Compression.Gzip}[name]


def open_channel(
    address: str,
    *,
    tls: TlsFiles = PLAINTEXT,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    compression: grpc.Compression = grpc.Compression.NoCompression,
    signature: Signature = (),
) -> grpc.aio.Channel:
    """A channel to `host:port`; connects on first use and reconnects by itself. `compression` is that of what is sent on it. Each of its
    calls says this process's version (twostep/rpc/version_gate.py), and carries `signature` (twostep/rpc/call_signing.py)."""
    credentials = client_credentials(tls)
    options = [*channel_options(max_message_bytes), ("grpc.primary_user_agent", user_agent(__version__))]
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options, compression=compression)
    else:
        named = [("grpc.ssl_target_name_override", tls.peer_name)] if tls.peer_name else []
        channel = grpc.aio.secure_channel(address, credentials, options=[*options, *named], compression=compression)
    return SignedChannel(channel, signature) if signature else channel


class SignedChannel(grpc.aio.Channel):
    """A channel whose every call carries `signature` in its metadata. Interceptors of gRPC could do that for the price of a task a call."""

    def __init__(self, channel: grpc.aio.Channel, signature: Signature) -> None:
        self._channel = channel
        self._signature = signature

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *given: Any, **named: Any) -> Any:
        return self._signed(self._channel.unary_unary(*given, **named))

    def unary_stream(self, *given: Any, **named: Any) -> Any:
        return self._signed(self._channel.unary_stream(*given, **named))

    def stream_unary(self, *given: Any, **named: Any) -> Any:
        return self._signed(self._channel.stream_unary(*given, **named))

    def stream_stream(self, *given: Any, **named: Any) -> Any:
        return self._signed(self._channel.stream_stream(*given, **named))

    def _signed(self, call: Any) -> Any:
        signature = self._signature

        def signed(*given: Any, metadata: Iterable[tuple[str, str | bytes]] | None = None, **named: Any) -> Any:
            return call(*given, metadata=(*(metadata or ()), *signature), **named)

        return signed


def error_from_rpc(error: grpc.RpcError) -> TwostepError:
    """The exception behind a failed call, with the server's message."""
    if isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return error_from_grpc(error.code().name, error.details() or "the peer gave no reason", error.trailing_metadata())
    return error_from_grpc("UNKNOWN", str(error))
