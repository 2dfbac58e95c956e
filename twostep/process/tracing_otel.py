"""Spans by OpenTelemetry's SDK, to a collector over OTLP (gRPC). Imported only where tracing is on: see twostep/process/tracing.py.

OpenTelemetry's own variables are the SDK's to read: OTEL_TRACES_SAMPLER and its argument, OTEL_BSP_* (bounds of the queue),
OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT, OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from twostep.errors import SetupError
from twostep.process.tracing import Attributes, Metadata, SpanCounts

log = logging.getLogger(__name__)

_PROPAGATOR = TraceContextTextMapPropagator()
_NONE: Attributes = {}
_NS = 1_000_000_000
# The SDK's own defaults.
_MAX_QUEUED, _MAX_BATCH = 2048, 512
# The exporter says the same of every batch that fails; the wrapper below says it once.
_CHATTY = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")


class OtelTracer:
    """See twostep.process.tracing.Tracer."""

    def __init__(self, endpoint: str, *, role: str, instance: str, version: str, exporter: SpanExporter | None = None) -> None:
        """`exporter`: instead of OTLP's, to `endpoint`. Raises SetupError for an endpoint that is none."""
        url = _url(endpoint)
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._exporter = _Exporter(exporter or OTLPSpanExporter(endpoint=url), url)
        try:
            self._processor = _Processor(self._exporter, max_queued=_max_queued())
        except ValueError as error:
            raise SetupError(f"the OTEL_BSP_ variables do not fit together: {error}") from error
        self._instance, self._version = instance, version
        self._providers: dict[str, trace.Tracer] = {}
        self.serve(role)

    def serve(self, role: str) -> None:
        """A role is a service of its own to whoever looks at traces, and one exporter sends the spans of all."""
        if role not in self._providers:
            provider = TracerProvider(resource=self._resource(role), shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            self._providers[role] = provider.get_tracer("twostep", self._version)
        self._tracer = self._providers[role]

    def _resource(self, role: str) -> Resource:
        ours = {"service.name": f"twostep-{role}", "service.instance.id": self._instance, "service.version": self._version}
        # What the operator says goes before.
        return Resource.create(ours | dict(OTELResourceDetector().detect().attributes))

    def start(self, name: str, metadata: Metadata, *, at: float | None = None) -> OtelSpan:
        parent = _PROPAGATOR.extract(dict(metadata), context=Context())
        # Of one request all instants are shifted alike, so that its spans fit together.
        now = time.monotonic()
        shift_ns = time.time_ns() - int(now * _NS)
        start = int((now if at is None else at) * _NS) + shift_ns
        span = self._tracer.start_span(name, context=parent, kind=trace.SpanKind.SERVER, start_time=start)
        return OtelSpan(self._tracer, span, shift_ns)

    def counts(self) -> SpanCounts:
        return SpanCounts(exported=self._exporter.num_exported, lost=self._exporter.num_lost + self._processor.num_dropped)

    def close(self, timeout_s: float) -> None:
        # The SDK's own shutdown waits for half a minute for a collector that is gone.
        closing = threading.Thread(target=self._processor.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(timeout_s)


class OtelSpan:
    """See twostep.process.tracing.Span."""

    __slots__ = ("_context", "_shift_ns", "_span", "_tracer", "metadata", "recording", "trace_id")

    def __init__(self, tracer: trace.Tracer, span: trace.Span, shift_ns: int) -> None:
        self._tracer, self._span, self._shift_ns = tracer, span, shift_ns
        self._context = trace.set_span_in_context(span, Context())
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=self._context)
        self.metadata: Metadata = tuple(carrier.items())
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        self.recording = span.is_recording()

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, at: float, attributes: Attributes = _NONE) -> None:
        self._span.add_event(name, attributes, timestamp=self._ns(at))

    def child(self, name: str, start: float, end: float, attributes: Attributes = _NONE, *, failure: str = "") -> None:
        if not self.recording:
            return
        child = self._tracer.start_span(name, context=self._context, attributes=attributes, start_time=self._ns(start))
        _fail(child, failure)
        child.end(self._ns(max(start, end)))

    def end(self, *, at: float | None = None, failure: str = "") -> None:
        _fail(self._span, failure)
        self._span.end(self._ns(time.monotonic() if at is None else at))

    def _ns(self, at: float) -> int:
        return int(at * _NS) + self._shift_ns


def _fail(span: trace.Span, failure: str) -> None:
    if failure:
        span.set_status(trace.StatusCode.ERROR, failure)


class _Processor(BatchSpanProcessor):
    """Counts what the queue has no room for: the SDK drops the oldest."""

    def __init__(self, exporter: _Exporter, *, max_queued: int) -> None:
        super().__init__(exporter, max_queue_size=max_queued)
        self._out = exporter
        self._max_queued = max_queued
        self._num_ended = 0
        self.num_dropped = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            if self._num_ended - self._out.num_taken - self.num_dropped >= self._max_queued:
                self.num_dropped += 1
                self._out.say_lost("they come faster than it takes them")
            self._num_ended += 1
        super().on_end(span)


def _max_queued() -> int:
    """As the SDK reads it, and never less than it sends at once."""
    try:
        return max(_MAX_BATCH, int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, _MAX_QUEUED)))
    except ValueError:
        return _MAX_QUEUED


class _Exporter(SpanExporter):
    """Says once that spans are lost, and once that they are taken again."""

    def __init__(self, inner: SpanExporter, url: str) -> None:
        self._inner, self._url = inner, url
        self._losing = False
        self.num_taken = self.num_exported = self.num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """In the processor's thread."""
        self.num_taken += len(spans)
        try:
            result = self._inner.export(spans)
        except Exception as error:
            log.debug("exporting %d spans failed", len(spans), exc_info=error)
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.num_exported += len(spans)
            if self._losing:
                self._losing = False
                log.warning("the collector at %s takes spans again; %d were lost", self._url, self.num_lost)
        else:
            self.num_lost += len(spans)
            self.say_lost("it does not take them")
        return result

    def say_lost(self, why: str) -> None:
        if not self._losing:
            self._losing = True
            log.warning(
                "spans for the collector at %s are lost: %s; serving goes on, and see that --otlp-endpoint is right", self._url, why
            )

    def shutdown(self) -> None:
        with contextlib.suppress(Exception):
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _url(endpoint: str) -> str:
    """`host:port` and vLLM's `grpc://host:port` are plaintext, as http:// is. Raises SetupError."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    url = url.replace("grpc://", "http://", 1)
    parts = urlsplit(url)
    try:
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine:
        raise SetupError(f"--otlp-endpoint is {endpoint!r}; give the collector's gRPC port as http://HOST:4317, or https:// for TLS")
    return url
