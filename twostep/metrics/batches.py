"""Declares the metrics of what a router with --batch-dir does about batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from twostep.metrics.family import counter, gauge
from twostep.metrics.registry import MetricSample, MetricsRegistry

OPEN = gauge(
    "twostep_batch_jobs_open",
    "Batches that are not over, as this router last looked, whoever runs them; of routers that share a --batch-dir each says so: take the "
    "maximum.",
)
JOBS = gauge("twostep_batch_jobs", "Those of them that this router runs, by state (validating, in_progress, finalizing).", ["state"])
ENDED = counter(
    "twostep_batch_jobs_ended_total",
    "Batches that this router brought to an end, by status (completed, failed: the input was no batch, expired, cancelled).",
    ["status"],
)
REQUESTS = counter(
    "twostep_batch_requests_total",
    "Requests of batches whose outcome is on disk, by status: ok, failed (the answer is an error), unanswered (the batch was cancelled or "
    "expired, or the answer was lost).",
    ["status"],
)
RETRIES = counter(
    "twostep_batch_request_retries_total", "Requests of batches asked once more, because there was no room, no worker, or none left."
)


RUNNING_STATES = ("validating", "in_progress", "finalizing")
ENDS = ("completed", "failed", "expired", "cancelled")
OUTCOMES = ("ok", "failed", "unanswered")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """A moment of a router. `running`: batches by state."""

    num_open: int
    running: Mapping[str, int]


class BatchMetrics:
    """Belongs to the event loop. Every series is there from the start: a rate of what first happens now would miss it."""

    def __init__(self, registry: MetricsRegistry, state: Callable[[], BatchState]) -> None:
        """`state` is called from scrapes' threads."""
        self._state = state
        ended, requests = registry.counter(ENDED), registry.counter(REQUESTS)
        self.ended = {name: ended.labels(name) for name in ENDS}
        self.requests = {name: requests.labels(name) for name in OUTCOMES}
        self.retries = registry.counter(RETRIES)
        registry.on_scrape((OPEN, JOBS), self._read)

    def _read(self) -> Iterable[MetricSample]:
        state = self._state()
        yield MetricSample(OPEN, state.num_open)
        yield from (MetricSample(JOBS, state.running.get(name, 0), (name,)) for name in RUNNING_STATES)
