"""Where the server is, how the channel to it is set up, and which failures may be tried again. Shared by both clients."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import grpc

from twostep.client._types import Compression
from twostep.errors import DeadlineExceeded, InvalidRequest, ResourceExhausted, TwostepError, Unavailable, error_from_grpc
from twostep.rpc.channel import TlsFiles, channel_options, client_credentials

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
_LOOPBACK = ("localhost:", "127.", "[::1]:", "unix:")


def credentials_of(tls: bool, ca: str | Path | None, cert: str | Path | None, key: str | Path | None) -> grpc.ChannelCredentials | None:
    """None: plaintext. Any file asks for TLS; `tls` alone trusts the system's authorities. Raises SetupError for unreadable files."""
    if ca or cert or key:
        files = TlsFiles(ca=Path(ca) if ca else None, cert=Path(cert) if cert else None, key=Path(key) if key else None)
        return client_credentials(files)
    return grpc.ssl_channel_credentials() if tls else None


def checked_target(target: str) -> str:
    if not isinstance(target, str) or not target or "://" in target.replace("unix://", ""):
        raise InvalidRequest(f"target is {target!r}; give host:port, for example {DEFAULT_TARGET}")
    if not target.startswith(("unix:", "dns:", "ipv4:", "ipv6:", "xds:")) and not target.rpartition(":")[2].isdecimal():
        raise InvalidRequest(f"target {target!r} has no port; give host:port, for example {DEFAULT_TARGET}")
    port = target.rpartition(":")[2]
    if port.isdecimal() and int(port) > 65535:
        raise InvalidRequest(f"target {target!r} has no such port; give one from 1 to 65535")
    return target


class Routers:
    """Addresses of routers, any of which answers any request. The one in use stays in use until it fails."""

    def __init__(self, target: str | Sequence[str]) -> None:
        """Raises InvalidRequest."""
        targets = (target,) if isinstance(target, str) else tuple(target)
        if not targets:
            raise InvalidRequest("there is no target; give at least one host:port")
        self.targets: tuple[str, ...] = tuple(dict.fromkeys(checked_target(t) for t in targets))
        self._at = 0

    @property
    def current(self) -> str:
        return self.targets[self._at]

    def skip(self, failed: str) -> None:
        """The next one is in use now, unless somebody else has said so already."""
        if self.current == failed:
            self._at = (self._at + 1) % len(self.targets)

    def __repr__(self) -> str:
        return repr(self.targets[0] if len(self.targets) == 1 else list(self.targets))


def checked_compression(compression: Compression) -> grpc.Compression | None:
    if compression not in ("none", "gzip"):
        raise InvalidRequest(f"compression is {compression!r}; give 'none' or 'gzip'")
    return grpc.Compression.Gzip if compression == "gzip" else None


def compression_for(num_bytes: int, compression: grpc.Compression | None) -> grpc.Compression | None:
    """How a request of so many bytes is sent."""
    return compression if num_bytes >= _MIN_COMPRESSED_BYTES else None


def options_for(target: str) -> list[tuple[str, int]]:
    options = channel_options(MAX_MESSAGE_BYTES)
    if target.startswith(_LOOPBACK):
        # A proxy set for the internet knows nothing of this machine.
        options.append(("grpc.enable_http_proxy", 0))
    return options


def error_of(target: str, error: grpc.RpcError) -> TwostepError:
    """Our exception for what grpc raised."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        # grpc's own limit, not a full server: repeating cannot help.
        return InvalidRequest(f"the request or its answer is too large for one message ({details}); send less")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"the answer was not complete within the timeout; allow more, or ask for fewer tokens ({details})")
    # Where it begins so: a router that tells of a worker's failure has words in front.
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith(("failed to connect", "DNS resolution failed")):
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
    half a minute gets none: its error goes to the caller, with what it said.
    """

    timeout_s: float
    max_retries: int
    num_retries: int = 0
    started: float = field(default_factory=time.monotonic)

    def remaining_s(self) -> float:
        return max(0.0, self.started + self.timeout_s - time.monotonic())

    def delay_s(self, error: TwostepError) -> float | None:
        """Seconds to wait before the next try; None: raise the error."""
        if not isinstance(error, Unavailable | ResourceExhausted) or self.num_retries >= self.max_retries:
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
    """The name the router gave to the request."""
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
