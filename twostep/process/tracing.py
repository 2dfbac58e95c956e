"""Traces: what the processes tell of a request, whoever collects it. Nothing here knows OpenTelemetry; tracing_otel.py does, and is
imported only where spans are to be sent somewhere.

    client's span (its own, in its traceparent)
      └─ router: the request            route · queue · prefill · hand_over · decode         router/request/report.py
           ├─ prefill worker: its part  queue · compute · publish                            prefill_worker/service.py
           └─ decode worker: its part   reserved · fetch · decode                            decode_worker/tracing.py

Trace context travels as W3C headers (https://www.w3.org/TR/trace-context/) in the metadata of every call. Where nothing is traced, a
process has no Tracer, its requests have no Span, and what came with a call goes on to the next one as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Metadata = tuple[tuple[str, str], ...]
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
_NONE: Attributes = {}
# How long the end of a process may take for its last spans.
TRACES_FLUSH_S = 3.0

# Version, trace id, parent id, flags. Version ff is invalid, and so are ids of zeros.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class Span(Protocol):
    """Instants are time.monotonic() seconds of this process. Nothing here blocks or raises."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        ...

    @property
    def metadata(self) -> Metadata:
        """Returns what calls made on its behalf carry, so that their spans are its children. A span that is not sampled has it too."""
        ...

    @property
    def recording(self) -> bool:
        """False: it is not sampled, and nothing that it is told is kept."""
        ...

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, at: float, attributes: Attributes = _NONE) -> None: ...

    def child(self, name: str, start: float, end: float, attributes: Attributes = _NONE, *, failure: str = "") -> None:
        """A part of it, that is over; told before or after its own end."""
        ...

    def end(self, *, at: float | None = None, failure: str = "") -> None:
        """Once; now if not given. `failure`: why it did not come to what was asked for; empty: it did."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanCounts:
    """Since the start: spans that the collector took, and those that it did not or that there was no room for."""

    exported: int
    lost: int


class Tracer(Protocol):
    """One process's. Spans are exported by a thread of its own, out of a bounded queue; what does not fit is lost and counted."""

    def start(self, name: str, metadata: Metadata, *, at: float | None = None) -> Span:
        """The span of what was asked for with this metadata: a child of its traceparent, or the root of a new trace."""
        ...

    def serve(self, role: str) -> None:
        """Spans from now on are those of this role: "router", "prefill" or "decode"."""
        ...

    def counts(self) -> SpanCounts:
        """From any thread."""
        ...

    def close(self, timeout_s: float) -> None:
        """Sends what is left, for so long at most. Blocks; spans that end later are lost."""
        ...


def context_of(given: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """The trace context among a call's metadata, as it came."""
    if not given:
        return ()
    found = [(key, value) for key, value in given if key in (TRACEPARENT, TRACESTATE)]
    return tuple([(key, value if isinstance(value, str) else value.decode("ascii", "replace")) for key, value in found])


def trace_id_of(metadata: Metadata) -> str:
    """Empty without a traceparent that is one."""
    for key, value in metadata:
        if key == TRACEPARENT and (match := _TRACEPARENT.fullmatch(value)) is not None:
            return match.group(1)
    return ""


def metadata_of(context: Any) -> Metadata:
    """The trace context that a gRPC call came with."""
    return context_of(context.invocation_metadata())
