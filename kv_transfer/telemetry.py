"""Hand-overs as operators see them: counters, metrics, one log line each, and a part of the request's span.

    worker             when                                             call
    prefill            a lease's publishing ended, well or not          transfer(TransferRecord, direction PUBLISH)
    decode             a hand-over's fetching ended, well or not        transfer(TransferRecord, direction FETCH)
    both               a chunk was asked for again                      retry(transport, reason)
    decode             a path from a peer was tried                     probe(ProbeResult)

Labels are few and fixed: transports' names, `Direction`, and reasons, which are the names of twostep.errors' classes in snake case
("data_loss", "unavailable", ...) or "cancelled". Requests and peers are named in log lines and spans only.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kv_transfer.transport import TransportEnd
from twostep.metrics import transfer as families
from twostep.metrics.registry import MetricsRegistry
from twostep.process.tracing import Span
from twostep.rpc.v1 import worker_pb2

log = logging.getLogger(__name__)

# Worker ids come and go with their processes; the latest probes are kept.
_MAX_PROBED = 256
# Attributes that are in the span's own name, or of the request that it is a part of.
_OF_THE_SPAN = frozenset({"request", "direction", "failure"})


class Direction(Enum):
    PUBLISH = "publish"  # this worker is the source
    FETCH = "fetch"  # this worker is the reader


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRecord:
    """One side of one hand-over, complete or failed. Seconds are wall time; chunks overlap, so the three parts may add up to more than
    `total_s`.

    queue_s     PUBLISH: waiting for room in the transport's budget. FETCH: chunks waiting for their turn
    copy_s      PUBLISH: from the pool to where readers find it. FETCH: from there to this worker, verified, written into its pool
    busy_s      of total_s, when at least one chunk was being copied
    scatter_s   FETCH: the part of copy_s that verified and wrote the blocks, where the transport tells it apart; else 0
    total_s     PUBLISH: from the first final block to the last chunk published. FETCH: from the manifest to the last block in place
    exposed_s   PUBLISH: what of it came after the first token. FETCH: from Complete to the last block in place

    `request_id` (with the attempt behind a slash) and `peer` (the prefill worker's id; empty: unknown) are for logs and spans; neither may
    become a label.
    """

    transport: str
    direction: Direction
    num_bytes: int
    num_chunks: int
    num_blocks: int
    queue_s: float = 0.0
    copy_s: float = 0.0
    busy_s: float = 0.0
    scatter_s: float = 0.0
    total_s: float = 0.0
    exposed_s: float = 0.0
    # Chunks that were asked for again.
    num_retries: int = 0
    # Empty: it succeeded.
    failure: str = ""
    request_id: str = ""
    peer: str = ""

    @property
    def bytes_per_s(self) -> float:
        """While it copied; 0: nothing was moved."""
        return self.num_bytes / self.busy_s if self.busy_s > 0 else 0.0


class CopyClock:
    """For chunks that overlap, on one event loop.

        chunk 0   |-----|                       summed_s   all three
        chunk 1      |------|                   busy_s     from the first's start to the second's end, and the third:
        chunk 2                     |---|                  pauses, in which the next chunk is computed, do not count

    Not thread-safe.
    """

    def __init__(self) -> None:
        self.summed_s = 0.0
        self.busy_s = 0.0
        self._num_running = 0
        self._busy_since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Times the copy of one chunk, as a context around it."""
        started = time.monotonic()
        if not self._num_running:
            self._busy_since = started
        self._num_running += 1
        try:
            yield
        finally:
            ended = time.monotonic()
            self._num_running -= 1
            self.summed_s += ended - started
            if not self._num_running:
                self.busy_s += ended - self._busy_since


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """A path from one life of a peer. `bytes_per_s` 0: it does not work, or is too slow to be what it claims; `error` says why."""

    worker_id: str
    epoch: int
    transport: str
    bytes_per_s: float = 0.0
    error: str = ""

    @property
    def usable(self) -> bool:
        return self.bytes_per_s > 0


class TransferSpans:
    """Keeps the open spans of a worker's requests by the engine's name of the sequence, and adds hand-overs to them."""

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def open(self, seq_id: str, span: Span) -> None:
        self._spans[seq_id] = span

    def close(self, seq_id: str) -> None:
        """Notes that nothing more is added to the span. Idempotent."""
        self._spans.pop(seq_id, None)

    def add(self, transfer: TransferRecord) -> None:
        """Adds the span of a hand-over that has ended now."""
        span = self._spans.get(transfer.request_id)
        if span is None or not span.recording:
            return
        now = time.monotonic()
        found = {f"twostep.{name}": value for name, value in attributes(transfer).items() if name not in _OF_THE_SPAN}
        span.child(transfer.direction.value, now - transfer.total_s, now, found, failure=transfer.failure)


class TransferMetrics:
    """The metrics of one process, whichever roles its worker has had."""

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

    def transfer(self, transfer: TransferRecord) -> None:
        labels = (transfer.transport, transfer.direction.value)
        self._transfers.labels(*labels, "failed" if transfer.failure else "ok").inc()
        if transfer.direction is Direction.FETCH:
            # There before anything is damaged, so that the first time shows as an increase.
            self._retries.labels(transfer.transport, "data_loss")
        self._bytes.labels(*labels).inc(transfer.num_bytes)
        self._chunks.labels(*labels).inc(transfer.num_chunks)
        self._blocks.labels(*labels).inc(transfer.num_blocks)
        if transfer.failure:
            # Its times would say how long something broken was waited for, not what a hand-over takes.
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


class TransferTelemetry:
    """One worker's, in one role. Belongs to one event loop; nothing here waits."""

    def __init__(self, metrics: TransferMetrics | None = None, spans: TransferSpans | None = None) -> None:
        self._metrics = metrics
        self._spans = spans
        # What was moved since the process started.
        self._totals: dict[tuple[str, Direction], worker_pb2.TransportStats] = {}

    def transfer(self, transfer: TransferRecord) -> None:
        totals = self._totals_of(transfer.transport, transfer.direction)
        if transfer.failure:
            totals.failures[transfer.failure] += 1
        else:
            totals.num_transfers += 1
        totals.num_bytes += transfer.num_bytes
        totals.num_chunks += transfer.num_chunks
        totals.queue_s += transfer.queue_s
        totals.copy_s += transfer.copy_s
        totals.scatter_s += transfer.scatter_s
        totals.exposed_s += transfer.exposed_s
        if self._metrics is not None:
            self._metrics.transfer(transfer)
        # A client that goes away is no news.
        level = logging.INFO if transfer.failure not in ("", "cancelled") else logging.DEBUG
        if log.isEnabledFor(level):
            found = attributes(transfer)
            log.log(level, "transfer %s", " ".join(f"{name}={value}" for name, value in found.items()), extra={"data": found})
        if self._spans is not None:
            self._spans.add(transfer)

    def retry(self, transport: str, reason: str) -> None:
        self._totals_of(transport, Direction.FETCH).retries[reason] += 1
        if self._metrics is not None:
            self._metrics.retry(transport, reason)

    def probe(self, result: ProbeResult) -> None:
        if self._metrics is not None:
            self._metrics.probe(result)
        log.debug("probe %s", result)

    async def stats(self, transport: TransportEnd, direction: Direction) -> worker_pb2.TransportStats:
        """Returns what the transport holds now, and what it has moved."""
        held, stats = await transport.stats(), worker_pb2.TransportStats(ready=transport.ready)
        stats.MergeFrom(self._totals_of(transport.name, direction))
        stats.num_leases, stats.num_objects, stats.stored_bytes = held.num_leases, held.num_objects, held.stored_bytes
        return stats

    def _totals_of(self, transport: str, direction: Direction) -> worker_pb2.TransportStats:
        return self._totals.setdefault((transport, direction), worker_pb2.TransportStats(name=transport))


def attributes(transfer: TransferRecord) -> dict[str, Any]:
    """Returns a hand-over as attributes of a log line or a span event; what is empty is left out, seconds are rounded to microseconds."""
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


def reason_of(error: BaseException) -> str:
    """DataLoss -> "data_loss"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower().replace("cancelled_error", "cancelled")
