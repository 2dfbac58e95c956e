"""What transports and the two workers tell of hand-overs: one observer, called on the event loop, that must return at once.

    who                when                                             what
    prefill worker     a lease's publishing ended, well or not          transfer(Transfer, direction PUBLISH)
    decode worker      a hand-over's fetching ended, well or not        transfer(Transfer, direction FETCH)
    both               a chunk was asked for again                      retry(transport, reason)
    decode worker      a path from a peer was tried                     probe(ProbeResult)

Labels are few and fixed: transports' names, `Direction`, and reasons, which are the names of twostep.errors' classes in snake case
("data_loss", "unavailable", ...) or "cancelled".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class Direction(Enum):
    PUBLISH = "publish"  # this worker is the source
    FETCH = "fetch"  # this worker is the reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
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


class TransferObserver(Protocol):
    def transfer(self, transfer: Transfer) -> None: ...

    def retry(self, transport: str, reason: str) -> None: ...

    def probe(self, result: ProbeResult) -> None: ...


@dataclass(slots=True)
class TransferStats:
    """Since the process started, of one transport and direction."""

    num_transfers: int = 0
    num_bytes: int = 0
    num_chunks: int = 0
    num_blocks: int = 0
    queue_s: float = 0.0
    copy_s: float = 0.0
    scatter_s: float = 0.0
    exposed_s: float = 0.0
    retries: dict[str, int] = field(default_factory=dict)  # by reason
    failures: dict[str, int] = field(default_factory=dict)


class TransferLedger:
    """The observer every worker has: plain counters, for WorkerStats and for tests."""

    def __init__(self) -> None:
        self._stats: dict[tuple[str, Direction], TransferStats] = {}

    def of(self, transport: str, direction: Direction) -> TransferStats:
        return self._stats.setdefault((transport, direction), TransferStats())

    def __iter__(self) -> Iterator[tuple[str, Direction, TransferStats]]:
        return ((name, direction, stats) for (name, direction), stats in self._stats.items())

    def transfer(self, transfer: Transfer) -> None:
        stats = self.of(transfer.transport, transfer.direction)
        if transfer.failure:
            stats.failures[transfer.failure] = stats.failures.get(transfer.failure, 0) + 1
        else:
            stats.num_transfers += 1
        stats.num_bytes += transfer.num_bytes
        stats.num_chunks += transfer.num_chunks
        stats.num_blocks += transfer.num_blocks
        stats.queue_s += transfer.queue_s
        stats.copy_s += transfer.copy_s
        stats.scatter_s += transfer.scatter_s
        stats.exposed_s += transfer.exposed_s

    def retry(self, transport: str, reason: str) -> None:
        retries = self.of(transport, Direction.FETCH).retries
        retries[reason] = retries.get(reason, 0) + 1

    def probe(self, result: ProbeResult) -> None:
        """Kept by whoever probes."""


class Observers:
    """Tells several, in order."""

    def __init__(self, observers: Sequence[TransferObserver]) -> None:
        self._observers = tuple(observers)

    def transfer(self, transfer: Transfer) -> None:
        for observer in self._observers:
            observer.transfer(transfer)

    def retry(self, transport: str, reason: str) -> None:
        for observer in self._observers:
            observer.retry(transport, reason)

    def probe(self, result: ProbeResult) -> None:
        for observer in self._observers:
            observer.probe(result)


def reason_of(error: BaseException) -> str:
    """DataLoss -> "data_loss"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower().replace("cancelled_error", "cancelled")
