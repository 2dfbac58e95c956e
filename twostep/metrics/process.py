"""Who a process is, and what becomes of its spans."""

from __future__ import annotations

from collections.abc import Iterable

from twostep import __version__
from twostep.metrics.family import counter, gauge
from twostep.metrics.registry import MetricSample, MetricsRegistry
from twostep.process.tracing import Tracer

INFO = gauge("twostep_process_info", "1, with the process's role and the version it runs.", ["role", "version"])
SPANS = counter(
    "twostep_trace_spans_total",
    "Spans by status: exported (the collector took them), lost (it did not, or there was no room). Only where something is traced.",
    ["status"],
)


def register_process(registry: MetricsRegistry, role: str, tracer: Tracer | None = None) -> ProcessMetrics:
    """`role`: "router", "prefill", "decode" or "autoscaler"."""
    return ProcessMetrics(registry, role, tracer)


class ProcessMetrics:
    def __init__(self, registry: MetricsRegistry, role: str, tracer: Tracer | None) -> None:
        self._info = registry.gauge(INFO)
        self._tracer = tracer
        registry.on_scrape([SPANS], self._read)
        self.serve(role)

    def _read(self) -> Iterable[MetricSample]:
        if self._tracer is not None:
            counts = self._tracer.counts()
            yield MetricSample(SPANS, counts.exported, ("exported",))
            yield MetricSample(SPANS, counts.lost, ("lost",))

    def serve(self, role: str) -> None:
        """The process has this role from now on."""
        self._info.clear()
        self._info.labels(role, package_version()).set(1)


def package_version() -> str:
    return __version__
