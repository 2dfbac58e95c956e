"""The application's active span is what the router's is a child of; without OpenTelemetry nothing is imported, and nothing sent."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import TraceState

from twostep.client._channel import trace_metadata
from twostep.process.tracing import trace_id_of

TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("application")


def test_the_active_span_goes_along() -> None:
    assert trace_metadata() == ()
    with TRACER.start_as_current_span("work") as span:
        context = span.get_span_context()
        told = trace_metadata()
        assert [key for key, _ in told] == ["traceparent"]
        version, trace_id, span_id, flags = told[0][1].split("-")
        assert (version, int(trace_id, 16), int(span_id, 16)) == ("00", context.trace_id, context.span_id)
        assert int(flags, 16) & 1, "sampled"
        assert trace_id_of(told) == trace_id
    assert trace_metadata() == ()


def test_what_others_added_to_the_trace_goes_along_too() -> None:
    remote = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(0), trace_state=TraceState([("vendor", "1")]))
    with trace.use_span(trace.NonRecordingSpan(remote)):
        assert trace_metadata() == (("traceparent", f"00-{1:032x}-{2:016x}-00"), ("tracestate", "vendor=1"))


@pytest.mark.parametrize("api", [SimpleNamespace(), SimpleNamespace(get_current_span=lambda: None)])
def test_an_api_that_is_another_one_costs_no_call(api: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", api)
    assert trace_metadata() == ()


def test_nothing_is_imported_for_it() -> None:
    code = (
        "import sys, twostep.client\n"
        "from twostep.client._channel import trace_metadata\n"
        "print(trace_metadata(), [m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "() []"
