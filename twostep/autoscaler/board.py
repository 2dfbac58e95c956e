"""The decision that this replica answers from: its own if it leads, else the leader's as last read. Old ones answer nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from twostep.cluster.scaling import ScalingRecord
from twostep.errors import ResourceExhausted, Unavailable


class DecisionBoard:
    """`stale_s`: age from which a decision is no answer. `clock` in seconds, does not go back."""

    def __init__(self, *, stale_s: float, max_listeners: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.stale_s = stale_s
        self._max_listeners = max_listeners
        self._clock = clock
        self._record: ScalingRecord | None = None
        # By the board's clock.
        self._made_at = 0.0
        self._listeners: set[asyncio.Event] = set()
        self._closed = False

    @property
    def record(self) -> ScalingRecord | None:
        """However old."""
        return self._record

    @property
    def age_s(self) -> float | None:
        """None: there has been no decision."""
        return None if self._record is None else max(0.0, self._clock() - self._made_at)

    @property
    def fresh(self) -> bool:
        age_s = self.age_s
        return age_s is not None and age_s < self.stale_s

    def show(self, record: ScalingRecord, age_s: float) -> None:
        """Shows the decision that was made `age_s` ago. An older decision than the one shown changes nothing, unless the one shown is stale
        and this one is not: Redis may have lost everything, and a leader that saw nothing may have begun with small tokens again."""
        if self._record is not None and record.order < self._record.order and (self.fresh or age_s >= self.stale_s):
            return
        if self._record is None or record.order != self._record.order:
            self._made_at = self._clock() - max(0.0, age_s)
        changed = self._record is None or record != self._record
        self._record = record
        if changed:
            self._tell()

    def answer(self) -> ScalingRecord:
        """Raises Unavailable: there is no decision, or it is too old to be true."""
        if self._record is None:
            raise Unavailable("nothing has been decided yet; keep what there is")
        if not self.fresh:
            raise Unavailable(f"the last decision is {self.age_s:.0f} s old: no autoscaler leads, or Redis is away; keep what there is")
        return self._record

    def close(self) -> None:
        """Listeners end."""
        self._closed = True
        self._tell()

    async def changes(self) -> AsyncIterator[ScalingRecord]:
        """The decision now, if it may answer, and each later one that differs from the one before; who is slow misses some. Raises
        ResourceExhausted: too many listen."""
        if len(self._listeners) >= self._max_listeners:
            raise ResourceExhausted(f"{self._max_listeners} callers listen to this autoscaler already; use IsActive", retry_after_s=5.0)
        told = asyncio.Event()
        told.set()
        self._listeners.add(told)
        try:
            while True:
                await told.wait()
                told.clear()
                if self._closed:
                    return
                if self._record is not None and self.fresh:
                    yield self._record
        finally:
            self._listeners.discard(told)

    def _tell(self) -> None:
        for told in self._listeners:
            told.set()
