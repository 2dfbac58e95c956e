"""One process's metrics: made once at its start, handed to whatever counts, read by its `/metrics`. Nothing here is global.

    registry.counter(FAMILY).labels("ray").inc()          counted where it happens; prometheus_client's own objects, any thread
    registry.tally(FAMILY)                                a histogram for the hottest paths: one writing thread, a third of the cost
    registry.on_scrape([FAMILY, ...], read)               values that are somewhere already: read when somebody asks

A family that several of these name is a bug: prometheus_client raises ValueError.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from twostep.metrics.family import Family, MetricKind

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MetricSample:
    """A value that a scrape asked for. `labels` in the family's order."""

    family: Family
    value: float
    labels: Sequence[str] = ()


class MetricsRegistry:
    def __init__(self) -> None:
        self.collectors = CollectorRegistry(auto_describe=True)
        self._made: dict[Callable[[MetricsRegistry], Any], Any] = {}
        ProcessCollector(registry=self.collectors)

    def once(self, make: Callable[[MetricsRegistry], T]) -> T:
        """Calls `make` with this registry the first time and returns the same result at every later call: for what is counted on through
        changes of a worker's role."""
        if make not in self._made:
            self._made[make] = make(self)
        made: T = self._made[make]
        return made

    def counter(self, family: Family) -> Counter:
        assert family.kind is MetricKind.COUNTER, family
        return Counter(family.name, family.help, family.labels, registry=self.collectors)

    def gauge(self, family: Family) -> Gauge:
        assert family.kind is MetricKind.GAUGE, family
        return Gauge(family.name, family.help, family.labels, registry=self.collectors)

    def histogram(self, family: Family) -> Histogram:
        assert family.kind is MetricKind.HISTOGRAM, family
        return Histogram(family.name, family.help, family.labels, registry=self.collectors, buckets=family.buckets)

    def tally(self, family: Family) -> Tally:
        assert family.kind is MetricKind.HISTOGRAM, family
        assert not family.labels, f"{family.name}: a tally has no labels"
        tally = Tally(family)
        self.collectors.register(tally)
        return tally

    def on_scrape(self, families: Sequence[Family], read: Callable[[], Iterable[MetricSample]]) -> None:
        """`read` is called in a scrape's thread and must return at once; copy what other threads change. If it raises, its families
        are missing from that scrape and the log says why. Histograms cannot be read."""
        assert all(family.kind is not MetricKind.HISTOGRAM for family in families), families
        self.collectors.register(_Read(families, read))


class Tally(Collector):
    """A histogram that one thread writes, without locks: 20,000 tokens a second are counted one by one."""

    __slots__ = ("_bounds", "_counts", "_family", "_sum")

    def __init__(self, family: Family) -> None:
        self._family = family
        self._bounds = family.buckets
        self._counts = [0] * (len(family.buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        yield HistogramMetricFamily(self._family.name, self._family.help)

    def collect(self) -> Iterable[Metric]:
        # The copy is one step of the interpreter; the sum may be one observation ahead or behind.
        counts, total = self._counts.copy(), self._sum
        buckets, below = [], 0
        for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
            below += count
            buckets.append((str(floatToGoString(bound)), float(below)))  # type: ignore[no-untyped-call]
        yield HistogramMetricFamily(self._family.name, self._family.help, buckets=buckets, sum_value=total)


class _Read(Collector):
    def __init__(self, families: Sequence[Family], read: Callable[[], Iterable[MetricSample]]) -> None:
        self._families = families
        self._read = read
        self._lock = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        return [_empty(family) for family in self._families]

    def collect(self) -> Iterable[Metric]:
        metrics = {family.name: _empty(family) for family in self._families}
        try:
            # One scrape at a time: what is read need not expect two.
            with self._lock:
                for reading in self._read():
                    metrics[reading.family.name].add_metric(reading.labels, reading.value)
        except Exception:
            log.exception("these metrics could not be read: %s", ", ".join(metrics))
            return []
        return list(metrics.values())


def _empty(family: Family) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
    return kind(family.name, family.help, labels=family.labels)
