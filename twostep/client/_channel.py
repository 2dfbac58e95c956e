"""Where the server is, how the channel to it is set up, and which failures may be tried again. Shared by both clients."""

from __future__ import annotations

import ipaddress
import json
import random
import re
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from twostep.client._pool import ConnectionLease, RouterEndpoint
from twostep.client._types import Compression
from twostep.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ResourceExhausted,
    TwostepError,
    Unavailable,
    error_from_grpc,
)
from twostep.rpc.channel import channel_options, client_credentials
from twostep.settings.tls import TlsFiles

DEFAULT_TARGET = "localhost:50051"
DEFAULT_TIMEOUT_S = 600.0
UNARY_TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = 64 << 20

# Shorter requests are not compressed: it would take longer than it saves.
_MIN_COMPRESSED_BYTES = 1024
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_MAX_RETRY_AFTER_S = 30.0
_RETRY_AFTER_SPREAD = 0.25
_LOOPBACK = ("localhost:", "127.", "[::1]:", "unix:", "ipv4:127.", "ipv6:[::1]:")
# gRPC's own notations. A list of addresses has commas in it.
SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "xds:")
# Calls go to all addresses behind a name in turn, not to one of them until it fails.
_ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
_NOBODY = ("failed to connect", "DNS resolution failed", "connections to all backends failing")
# What gRPC says of a server that speaks HTTP/1, without and with TLS.
_HTTP_ANSWERS = ("connect an http1.x server", "missing selected ALPN property")
_API_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")

W = TypeVar("W")
Metadata = tuple[tuple[str, str], ...]


def credentials_of(tls: bool, ca: str | Path | None, cert: str | Path | None, key: str | Path | None) -> grpc.ChannelCredentials | None:
    """None: plaintext. Any file asks for TLS; `tls` alone trusts the system's authorities. Raises SetupError for unreadable files."""
    if ca or cert or key:
        files = TlsFiles(ca=Path(ca) if ca else None, cert=Path(cert) if cert else None, key=Path(key) if key else None)
        return client_credentials(files)
    return grpc.ssl_channel_credentials() if tls else None


def checked_target(target: str) -> str:
    if not isinstance(target, str) or not target or ("://" in target and not target.startswith(SCHEMES)):
        raise InvalidRequest(f"target is {target!r}; give host:port, for example {DEFAULT_TARGET}")
    if not target.startswith(SCHEMES) and not target.rpartition(":")[2].isdecimal():
        raise InvalidRequest(f"target {target!r} has no port; give host:port, for example {DEFAULT_TARGET}")
    port = target.rpartition(":")[2]
    if port.isdecimal() and int(port) > 65535:
        raise InvalidRequest(f"target {target!r} has no such port; give one from 1 to 65535")
    return target


def routers_of(target: str | Sequence[str]) -> list[RouterEndpoint[Any]]:
    """One for each address that was given, any of which answers any request. Raises InvalidRequest."""
    targets = (target,) if isinstance(target, str) else tuple(target)
    if not targets:
        raise InvalidRequest("there is no target; give at least one host:port")
    return [RouterEndpoint(checked, is_name=_is_name(checked)) for checked in dict.fromkeys(checked_target(t) for t in targets)]


def _is_name(target: str) -> bool:
    """Returns whether `target` is a name: its addresses may change, and be several."""
    if target.startswith("dns:"):
        return True
    if target.startswith((*SCHEMES, "localhost:")):
        return False
    try:
        ipaddress.ip_address(target.rpartition(":")[0].strip("[]"))
    except ValueError:
        return True
    return False


def targets_repr(targets: Sequence[str]) -> str:
    return repr(targets[0] if len(targets) == 1 else list(targets))


def checked_connections(max_connections: int) -> int:
    if isinstance(max_connections, bool) or not isinstance(max_connections, int) or not 1 <= max_connections <= 64:
        raise InvalidRequest(f"max_connections is {max_connections!r:.100}; give the connections to each router, from 1 to 64")
    return max_connections


def key_metadata(api_key: str | None, targets: Sequence[str], *, tls: bool) -> Metadata:
    """The header that shows the key. Over a network without TLS it can be read by whoever is on the way, and that is worth a warning; not
    a refusal, because inside a cluster something else often encrypts what goes between machines."""
    if not api_key:
        return ()
    if not isinstance(api_key, str) or not _API_KEY.fullmatch(api_key):
        raise InvalidRequest("api_key has characters that no header can carry, a line's end perhaps; give the key as it was issued")
    far = [target for target in targets if not target.startswith(_LOOPBACK)]
    if far and not tls:
        warnings.warn(f"the API key goes to {far[0]} unencrypted; give tls=True or tls_ca if the router has TLS", stacklevel=3)
    return (("authorization", f"Bearer {api_key}"),)


def trace_of(traceparent: str | None) -> Metadata:
    """The trace that a call belongs to: the given one, else that of OpenTelemetry's current span, if the program uses it."""
    if not traceparent:
        return trace_metadata()
    if not isinstance(traceparent, str) or not _TRACEPARENT.fullmatch(traceparent):
        raise InvalidRequest(f"traceparent is {traceparent!r:.100}; give version-trace-span-flags as W3C's trace context has it")
    return (("traceparent", traceparent),)


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """The context of OpenTelemetry's active span as `traceparent`, and `tracestate` if there is one; nothing without. Never raises, and
    imports nothing: an application that traces has imported OpenTelemetry's API itself."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ()
    try:
        context = api.get_current_span().get_span_context()
        if not context.is_valid:
            return ()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 0xFF:02x}"
        state = context.trace_state.to_header()
    except AttributeError:  # another version's API, or a module half imported: a call is not worth losing for it
        return ()
    return (("traceparent", parent), ("tracestate", state)) if state else (("traceparent", parent),)


def checked_compression(compression: Compression) -> grpc.Compression | None:
    if compression not in ("none", "gzip"):
        raise InvalidRequest(f"compression is {compression!r}; give 'none' or 'gzip'")
    return grpc.Compression.Gzip if compression == "gzip" else None


def compression_for(num_bytes: int, compression: grpc.Compression | None) -> grpc.Compression | None:
    return compression if num_bytes >= _MIN_COMPRESSED_BYTES else None


def options_for(target: str) -> list[tuple[str, int | str]]:
    options: dict[str, int | str] = dict(channel_options(MAX_MESSAGE_BYTES))
    if target.startswith(_LOOPBACK):
        # A proxy set for the internet knows nothing of this machine.
        options["grpc.enable_http_proxy"] = 0
    # A local name's two addresses are the same router, or one of them is nobody's.
    if not target.startswith(("unix:", "xds:", "localhost:")):
        options["grpc.service_config"] = _ROUND_ROBIN
    return list(options.items())


# grpc.health.v1, whose generated code the base install has not: HealthCheckRequest{service: "readiness"}, and the status of its response.
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
HEALTH_REQUEST = b"\x0a\x09readiness"
HEALTH_TIMEOUT_S = 2.0
_SERVING = b"\x08\x01"


def same_bytes(message: bytes) -> bytes:
    return message


def is_well(response: bytes | None, error: grpc.RpcError | None) -> bool:
    """Returns whether a router's health check finds it well. A router that has no such check, or that asks for a key first, counts as
    well."""
    if error is None:
        return response == _SERVING
    return error.code() in (
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    )


def judge(lease: ConnectionLease[W], error: TwostepError, *, heard: bool) -> None:
    """Records what a call's failure says of the router it went to. UNAVAILABLE, or a deadline that passed before the router sent anything,
    counts as its failure. Any other error counts as its answer, but CANCELLED and INTERNAL only if it had sent something before
    (`heard`)."""
    if isinstance(error, Unavailable) or (isinstance(error, DeadlineExceeded) and not heard):
        lease.failed()
    elif heard or not isinstance(error, DeadlineExceeded | Cancelled | InternalError):
        lease.answered()


def error_of(target: str, error: grpc.RpcError, *, own: bool) -> TwostepError:
    """Our exception for what grpc raised. `own`: this side has ended the call."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.CANCELLED and not own:
        # A server that stops, or a proxy before it, has no better word for calls that are still running then.
        return Unavailable(f"the server at {target} gave the call up; it may be stopping: ask again, or ask another ({details})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        # grpc's own limit, not a full server: repeating cannot help.
        return InvalidRequest(f"the request or its answer is too large for one message ({details}); send less")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"the answer was not complete within the timeout; allow more, or ask for fewer tokens ({details})")
    if any(sign in details for sign in _HTTP_ANSWERS):
        return InvalidRequest(
            f"{target} is an HTTP port, and this client speaks gRPC; give the router's gRPC port, which is "
            f"{target.rpartition(':')[0]}:{DEFAULT_TARGET.rpartition(':')[2]} unless its --grpc-port says otherwise"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequest(f"the server at {target} does not know this call ({details}); is it a router, and as new as this client?")
    # Where it begins so: a router that tells of a worker's failure has words in front.
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith(_NOBODY):
        return Unavailable(
            f"no server answers at {target}; start one with `twostep up`, give the address of another, or align the TLS options of both "
            f"({details})"
        )
    behind = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    return error_from_grpc(code.name, details or f"the server at {target} gave no reason ({code.name})", behind)


@dataclass(slots=True)
class Attempts:
    """One request's tries: how much time is left, and whether and when to try again. `num_retries`: since its answer last grew.

    Half to the whole of a span that doubles from 0.1 s to 5 s, drawn at random, so that clients refused together do not return together.
    A server that says when it is worth trying again is not asked before, nor by all at once then. One that asks for more patience than
    half a minute gets none, and so does one that says that it is of no use: its error goes to the caller, with what it said.
    """

    timeout_s: float
    max_retries: int
    num_retries: int = 0
    started: float = field(default_factory=time.monotonic)

    def remaining_s(self) -> float:
        return max(0.0, self.started + self.timeout_s - time.monotonic())

    def delay_s(self, error: TwostepError, *, elsewhere: bool = False) -> float | None:
        """Seconds to wait before the next try; None: raise the error. `elsewhere`: it can go to another router, one that is well and has
        not been tried, for which there is nothing to wait; such tries are bounded by the number of routers and not counted."""
        if elsewhere and isinstance(error, Unavailable) and self.max_retries and self.remaining_s() > 0:
            return 0.0
        if not isinstance(error, Unavailable | ResourceExhausted) or self.num_retries >= self.max_retries:
            return None
        if isinstance(error, ResourceExhausted) and error.hopeless:
            return None
        span = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2**self.num_retries)
        delay = random.uniform(span / 2, span)
        if isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
            if error.retry_after_s > _MAX_RETRY_AFTER_S:
                return None
            delay = max(delay, error.retry_after_s * random.uniform(1.0, 1.0 + _RETRY_AFTER_SPREAD))
        if delay >= self.remaining_s():
            return None
        self.num_retries += 1
        return delay

    def progressed(self) -> None:
        """More of the answer has come: what broke before it does not count against what may break yet."""
        self.num_retries = 0


def checked_timeout(timeout: float | None, default: float) -> float:
    value = default if timeout is None else timeout
    if not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InvalidRequest(f"timeout is {timeout!r}; give seconds above 0")
    return float(value)


def request_id_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    value = dict(metadata or ()).get("x-request-id", "")
    return value if isinstance(value, str) else value.decode("ascii", "replace")


def seed_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """The seed the router sampled with; None if it does not tell."""
    value = dict(metadata or ()).get("x-twostep-seed", "")
    text = value if isinstance(value, str) else value.decode("ascii", "replace")
    try:
        return int(text)
    except ValueError:
        return None
