"""The observers of hand-overs that operators look at: metrics, one log line each, and whoever traces.

Every hand-over is told three times from one record (kv_transfer.observer.Transfer): counted without names, logged with the request's id,
and handed to a tracer, which makes an event of it in the request's span.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kv_transfer.observer import Direction, Observers, ProbeResult, Transfer, TransferLedger
from twostep.metrics import transfer as families
from twostep.metrics.registry import MetricsRegistry

log = logging.getLogger(__name__)

# Called on the event loop with every finished or failed hand-over; must return at once.
Tracer = Callable[[Transfer], None]

# Worker ids come and go with their processes; the latest probes are kept.
_MAX_PROBED = 256


def worker_observers(registry: MetricsRegistry, ledger: TransferLedger, tracer: Tracer | None = None) -> Observers:
    """Everything a worker tells of its hand-overs; `ledger` is its edge's own."""
    return Observers((ledger, registry.once(TransferMetrics), TransferLog(tracer)))


class TransferMetrics:
    """See kv_transfer.observer.TransferObserver."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._transfers = registry.counter(families.TRANSFERS)
        self._failures = registry.counter(families.FAILURES)
        self._retries = registry.counter(families.RETRIES)
        self._bytes = registry.counter(families.BYTES)
        self._chunks = registry.counter(families.CHUNKS)
        self._blocks = registry.counter(families.BLOCKS)
        self._queue = registry.histogram(families.QUEUE)
        self._copy = registry.histogram(families.COPY)
        self._scatter = registry.histogram(families.SCATTER)
        self._total = registry.histogram(families.TOTAL)
        self._exposed = registry.histogram(families.EXPOSED)
        self._rate = registry.histogram(families.RATE)
        self._probe = registry.gauge(families.PROBE)
        self._probes = registry.counter(families.PROBES)
        self._probed: OrderedDict[tuple[str, str], None] = OrderedDict()

    def transfer(self, transfer: Transfer) -> None:
        labels = (transfer.transport, transfer.direction.value)
        self._transfers.labels(*labels, "failed" if transfer.failure else "ok").inc()
        if transfer.direction is Direction.FETCH:
            # There before anything is damaged, so that the first time shows as an increase.
            self._retries.labels(transfer.transport, "data_loss")
        self._bytes.labels(*labels).inc(transfer.num_bytes)
        self._chunks.labels(*labels).inc(transfer.num_chunks)
        self._blocks.labels(*labels).inc(transfer.num_blocks)
        if transfer.failure:
            # Its times would tell how long something broken was waited for, not what a hand-over takes.
            self._failures.labels(*labels, transfer.failure).inc()
            return
        self._queue.labels(*labels).observe(transfer.queue_s)
        # Where the decode worker held all of the prompt already, nothing was copied.
        if transfer.num_bytes:
            self._copy.labels(*labels).observe(transfer.copy_s)
            self._total.labels(*labels).observe(transfer.total_s)
            self._exposed.labels(*labels).observe(transfer.exposed_s)
            if transfer.scatter_s:
                self._scatter.labels(transfer.transport).observe(transfer.scatter_s)
            # What one-sided transports publish is copied by the reader.
            if transfer.bytes_per_s and transfer.direction is Direction.FETCH:
                self._rate.labels(transfer.transport).observe(transfer.bytes_per_s)

    def retry(self, transport: str, reason: str) -> None:
        self._retries.labels(transport, reason).inc()

    def probe(self, result: ProbeResult) -> None:
        key = (result.transport, result.worker_id)
        self._probe.labels(*key).set(result.bytes_per_s)
        self._probes.labels(result.transport, "ok" if result.usable else "failed").inc()
        self._probed[key] = None
        self._probed.move_to_end(key)
        while len(self._probed) > _MAX_PROBED:
            self._probe.remove(*self._probed.popitem(last=False)[0])


class TransferLog:
    """One line a hand-over, and the tracer's call. See kv_transfer.observer.TransferObserver."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    def transfer(self, transfer: Transfer) -> None:
        # A client that goes away is no news.
        level = logging.INFO if transfer.failure not in ("", "cancelled") else logging.DEBUG
        if log.isEnabledFor(level):
            told = attributes(transfer)
            log.log(level, "transfer %s", " ".join(f"{name}={value}" for name, value in told.items()), extra={"data": told})
        if self._tracer is not None:
            try:
                self._tracer(transfer)
            except Exception:
                log.exception("the tracer failed; the hand-over goes on without it")

    def retry(self, transport: str, reason: str) -> None:
        log.debug("retry transport=%s reason=%s", transport, reason)

    def probe(self, result: ProbeResult) -> None:
        log.debug(
            "probe transport=%s peer=%s epoch=%d bytes_per_s=%.3g error=%r",
            result.transport,
            result.worker_id,
            result.epoch,
            result.bytes_per_s,
            result.error,
        )


def attributes(transfer: Transfer) -> dict[str, Any]:
    """A hand-over as attributes of a log line or a span event; what is empty is left out, seconds are rounded to microseconds."""
    found: dict[str, Any] = {
        "request": transfer.request_id,
        "direction": transfer.direction.value,
        "transport": transfer.transport,
        "peer": transfer.peer,
        "failure": transfer.failure,
        "bytes": transfer.num_bytes,
        "chunks": transfer.num_chunks,
        "blocks": transfer.num_blocks,
        "retries": transfer.num_retries,
        "queue_s": round(transfer.queue_s, 6),
        "copy_s": round(transfer.copy_s, 6),
        "scatter_s": round(transfer.scatter_s, 6),
        "total_s": round(transfer.total_s, 6),
        "exposed_s": round(transfer.exposed_s, 6),
        "gb_per_s": round(transfer.bytes_per_s / 1e9, 3),
    }
    return {name: value for name, value in found.items() if value != ""}
