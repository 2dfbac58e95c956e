"""Declares the metrics of what the HTTP front answers, by route: paths are those of its table, never a client's."""

from __future__ import annotations

from twostep.metrics.family import counter, gauge
from twostep.metrics.registry import MetricsRegistry

HTTP_REQUESTS = counter(
    "twostep_http_requests_total",
    "HTTP requests by handler (the route, such as /v1/models/{model}; other: no route), method and status (2xx, 4xx, ...; cancelled: the "
    "client went away first). A stream that fails after its first event is a 2xx: twostep_requests_total has how it ended.",
    ["handler", "method", "status"],
)
HTTP_STREAMS = gauge("twostep_http_open_streams", "Streams of server-sent events that are open.", ["handler"])


class HttpMetrics:
    """Belongs to the event loop."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self.requests = registry.counter(HTTP_REQUESTS)
        self.streams = registry.gauge(HTTP_STREAMS)
