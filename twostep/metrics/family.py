"""Describes a metric as data: name, help, labels, buckets. Each concern declares its own in a module beside this one; nothing is registered
by importing them.

Names are `twostep_*` in base units (seconds, bytes), counters end in `_total`. Labels have few values: roles, transports, reasons,
statuses, and workers of one deployment at most; never a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


# Copies between devices take 100 µs, those through a slow disk a minute.
TRANSFER_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# One step of an engine, or the gap between two tokens.
STEP_SECONDS = (1e-3, 2e-3, 5e-3, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
# What a client waits for.
REQUEST_SECONDS = (
    *(1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0),
    *(1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
# From a congested network to the memory of one GPU read by another.
BYTES_PER_SECOND = (1e7, 1e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 5e10, 1e11, 2e11, 3e11, 4e11, 8e11)
TOKENS = (1.0, 8.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric with all its label values. `name` is the one that is scraped (`buckets` in ascending order, of histograms only)."""

    kind: MetricKind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.startswith("twostep_"), self.name
        assert self.name.endswith("_total") == (self.kind is MetricKind.COUNTER), f"counters, and only they, end in _total: {self.name}"
        assert bool(self.buckets) == (self.kind is MetricKind.HISTOGRAM), f"histograms, and only they, have buckets: {self.name}"
        assert list(self.buckets) == sorted(set(self.buckets)), f"buckets of {self.name} are out of order"


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Family:
    return Family(kind=MetricKind.COUNTER, name=name, help=help, labels=tuple(labels))


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Family:
    return Family(kind=MetricKind.GAUGE, name=name, help=help, labels=tuple(labels))


def histogram(name: str, help: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Family:
    return Family(kind=MetricKind.HISTOGRAM, name=name, help=help, labels=tuple(labels), buckets=tuple(buckets))
