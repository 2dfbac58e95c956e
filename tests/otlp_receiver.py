"""An OpenTelemetry collector's gRPC port: takes spans, and keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


def dict_of(attributes: Any) -> dict[str, Any]:
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: value_of(pair.value) for pair in pairs}


@dataclass(frozen=True, kw_only=True)
class Received:
    """A span as the wire has it; ids are hexadecimal, instants nanoseconds since 1970."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: Mapping[str, Any]
    failed: bool
    start: int
    end: int
    proto: Span

    @classmethod
    def of(cls, service: str, instance: str, span: Span) -> Received:
        return cls(
            service=service,
            instance=instance,
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            attributes=dict_of(span.attributes),
            failed=span.status.code == Status.STATUS_CODE_ERROR,
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            proto=span,
        )


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """`refusal`: it takes nothing, and says so."""

    port: int = 0
    spans: list[Received] = field(default_factory=list)
    refusal: grpc.StatusCode | None = None
    num_calls: int = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, context: Any) -> Any:
        self.num_calls += 1
        if self.refusal is not None:
            context.abort(self.refusal, "not now")
        for group in request.resource_spans:
            resource = dict_of(group.resource.attributes)
            for scope in group.scope_spans:
                for span in scope.spans:
                    self.spans.append(Received.of(resource["service.name"], resource["service.instance.id"], span))
        return trace_service_pb2.ExportTraceServiceResponse()

    def one(self, name: str, service: str = "") -> Received:
        found = [span for span in self.spans if span.name == name and service in ("", span.service)]
        assert len(found) == 1, (name, [(span.service, span.name) for span in self.spans])
        return found[0]

    def children(self, parent: Received) -> dict[str, Received]:
        """By name; each is there once."""
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        assert len({(span.service, span.name) for span in found}) == len(found), [span.name for span in found]
        return {span.name: span for span in found}


@contextmanager
def collecting() -> Iterator[Collector]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), options=[("grpc.so_reuseport", 0)])
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
