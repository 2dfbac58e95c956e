"""The application's trace goes on through the router: the context of its active OpenTelemetry span, as W3C headers.

Nothing is imported: an application that traces has imported OpenTelemetry's API itself, and one that has not has no active span.
"""

from __future__ import annotations

import sys

# As OpenTelemetry's modules are named in sys.modules.
_API = "opentelemetry.trace"


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata of one call: `traceparent`, and `tracestate` if there is one; nothing without an active span. Never raises."""
    api = sys.modules.get(_API)
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
