"""Keeps what one side has published: objects by lease, their bytes against a budget, and when each lease's time is up.

    publish   waits for room ──▶ reserves it ──▶ makes the object ──▶ fills it in          given up at any point: the room is free again
    drop      by the source, or by `expire` once nothing was published or fetched for the lease's `ttl_s`

Transports that copy nothing out publish a mark instead of an object, and have no budget: the pool bounds what is published.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kv_transfer.transport import TransportStats
from kv_transfer.waiting import FifoGate
from twostep.errors import InvalidRequest, NotFound

T = TypeVar("T")

NO_BUDGET = 1 << 62
_MAX_DROPPED = 4096


@dataclass(slots=True)
class BookEntry(Generic[T]):
    """Room for one object, and the object once it is there."""

    lease_id: str
    index: int
    num_bytes: int
    value: T | None = None


@dataclass(slots=True)
class _Lease(Generic[T]):
    ttl_s: float
    deadline: float
    entries: dict[int, BookEntry[T]] = field(default_factory=dict)


class ObjectBook(Generic[T]):
    """Not thread-safe: one event loop owns it. Dropping a lease lets go of its values, which frees them.

    A dropped lease stays dropped: what is published under it later, by a task that had not heard of it, is refused with NotFound.
    """

    def __init__(
        self, budget_bytes: int = NO_BUDGET, *, check: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`check` runs before each try to publish, also of those that wait: what it raises ends the wait."""
        self.budget_bytes = budget_bytes
        self._check = check
        self._clock = clock
        self._room = FifoGate("published KV")
        self._leases: dict[str, _Lease[T]] = {}
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._stored_bytes = 0

    @property
    def stats(self) -> TransportStats:
        return TransportStats(
            num_leases=len(self._leases),
            num_objects=sum(len(lease.entries) for lease in self._leases.values()),
            stored_bytes=self._stored_bytes,
        )

    async def publish(
        self, lease_id: str, index: int, num_bytes: int, make: Callable[[], Awaitable[tuple[T, int]]], *, ttl_s: float, deadline: float
    ) -> int:
        """Waits for room and puts into it the object that `make` returns; returns the checksum that comes with it. If `make` fails or is
        cancelled, nothing is published. Raises ResourceExhausted at the deadline, and as `reserve` and `fill` do."""

        def attempt() -> BookEntry[T] | None:
            self._check()
            return self.reserve(lease_id, index, num_bytes, ttl_s=ttl_s)

        entry = await self._room.take(attempt, deadline=deadline)
        try:
            value, digest = await make()
            self.fill(entry, value)
        except BaseException:
            self.cancel(entry)
            raise
        return digest

    def reserve(self, lease_id: str, index: int, num_bytes: int, *, ttl_s: float) -> BookEntry[T] | None:
        """Takes room for an object, or returns None while there is none. Raises InvalidRequest (it can never fit, or is there already)
        and NotFound (the lease was dropped)."""
        if num_bytes > self.budget_bytes:
            raise InvalidRequest(
                f"a chunk of {num_bytes} bytes exceeds the whole budget of {self.budget_bytes}; raise it or make chunks smaller"
            )
        if lease_id in self._dropped:
            raise NotFound(f"lease {lease_id} was dropped; prefill again")
        lease = self._leases.get(lease_id)
        if lease is not None and index in lease.entries:
            raise InvalidRequest(f"chunk {index} of lease {lease_id} is published already; abort the lease and prefill again")
        if self._stored_bytes + num_bytes > self.budget_bytes:
            return None
        now = self._clock()
        if lease is None:
            lease = self._leases[lease_id] = _Lease(ttl_s, now + ttl_s)
        lease.deadline = max(lease.deadline, now + ttl_s)
        entry = lease.entries[index] = BookEntry[T](lease_id, index, num_bytes)
        self._stored_bytes += num_bytes
        return entry

    def fill(self, entry: BookEntry[T], value: T) -> None:
        """Puts the object into its room. Raises NotFound if the lease was dropped meanwhile: let go of the value."""
        lease = self._leases.get(entry.lease_id)
        if lease is None or lease.entries.get(entry.index) is not entry:
            raise NotFound(f"lease {entry.lease_id} was dropped while its chunk {entry.index} was being published; prefill again")
        entry.value = value
        lease.deadline = max(lease.deadline, self._clock() + lease.ttl_s)

    def cancel(self, entry: BookEntry[T]) -> None:
        """Gives back the room of an object that did not come."""
        lease = self._leases.get(entry.lease_id)
        if lease is not None and lease.entries.get(entry.index) is entry:
            del lease.entries[entry.index]
            self._stored_bytes -= entry.num_bytes
            if not lease.entries:
                del self._leases[entry.lease_id]
        self.try_again()

    def get(self, lease_id: str, index: int) -> T | None:
        """Returns the object, and renews the lease; None if it is not there (yet)."""
        lease = self._leases.get(lease_id)
        entry = lease.entries.get(index) if lease is not None else None
        if lease is None or entry is None or entry.value is None:
            return None
        lease.deadline = max(lease.deadline, self._clock() + lease.ttl_s)
        return entry.value

    def drop(self, lease_id: str) -> int:
        """Frees everything of a lease, for good; returns how many objects. Idempotent."""
        self._dropped[lease_id] = None
        self._dropped.move_to_end(lease_id)
        while len(self._dropped) > _MAX_DROPPED:
            self._dropped.popitem(last=False)
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self._stored_bytes -= sum(e.num_bytes for e in lease.entries.values())
        self.try_again()
        return len(lease.entries) if lease is not None else 0

    def expire(self, *, for_good: bool = True) -> list[str]:
        """Drops the leases whose time is up, and names them. To be called a few times a second. `for_good=False` is for a book that only
        mirrors another one and does not see all that renews a lease: what is published later is then not refused here."""
        now = self._clock()
        due = [lease_id for lease_id, lease in self._leases.items() if now >= lease.deadline]
        for lease_id in due:
            self.drop(lease_id)
            if not for_good:
                del self._dropped[lease_id]
        return due

    def drop_all(self) -> None:
        for lease_id in list(self._leases):
            self.drop(lease_id)
        self.try_again()

    def try_again(self) -> None:
        """Lets the first publisher that waits for room try again: room was freed, or `check` would raise now."""
        self._room.pump()
