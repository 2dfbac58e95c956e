"""Which workers hold how much of a prompt's prefix: one pipelined round trip to Redis, and never more than 2 ms of waiting
(--prefix-lookup-timeout).

A late answer is no answer, but its command is left to end (cancelling it would cost the connection). While one is overdue, and
for a second after an error, requests go without hints at once: a dead Redis costs its 2 ms about once a second, not per request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from twostep.cluster.records import WorkerRecord, prefix_key

log = logging.getLogger(__name__)

_OPEN_S = 1.0
# Bounds of one lookup: of more workers only the first are asked, and hashes beyond the share of each worker are probed at every
# second, third ... unit.
_MAX_PROBES = 8192
_MAX_WORKERS = 128
_MAX_PENDING = 64
# Fewer than the client's connections.
_MAX_CONCURRENT = 6


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """A worker between one start and the next: what a restart forgets belongs to it."""

    worker_id: str
    epoch: int

    @classmethod
    def of(cls, record: WorkerRecord) -> WorkerLife:
        return cls(record.worker_id, record.epoch)


NO_HINTS: Mapping[WorkerLife, int] = {}


class PrefixIndex:
    def __init__(self, redis: Redis, hash_unit: int, *, timeout_s: float) -> None:
        self._redis = redis
        self._unit = hash_unit
        self._timeout_s = timeout_s
        self._pending: set[asyncio.Task[dict[WorkerLife, int]]] = set()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._overdue = 0
        self._open_until = 0.0
        self._failing = False

    async def lookup(self, hashes_of: Mapping[WorkerLife, Sequence[bytes]]) -> Mapping[WorkerLife, int]:
        """Tokens of the longest prefix that each worker holds, given the prompt's unit hashes under each worker's key. Workers
        with none are left out. Empty if Redis is slow or away; never raises."""
        asked = {life: hashes for life, hashes in list(hashes_of.items())[:_MAX_WORKERS] if hashes}
        if not asked or self._overdue or len(self._pending) >= _MAX_PENDING or time.monotonic() < self._open_until:
            return NO_HINTS
        task = asyncio.create_task(self._ask(asked))
        self._pending.add(task)
        task.add_done_callback(self._finished)
        await asyncio.wait((task,), timeout=self._timeout_s)
        if not task.done():
            self._overdue += 1
            task.add_done_callback(self._caught_up)
            return NO_HINTS
        return NO_HINTS if task.exception() is not None else task.result()

    async def close(self) -> None:
        """Ends lookups still under way."""
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def _ask(self, asked: Mapping[WorkerLife, Sequence[bytes]]) -> dict[WorkerLife, int]:
        pipeline = self._redis.pipeline(transaction=False)
        strides: list[int] = []
        share = _MAX_PROBES // len(asked)
        for life, hashes in asked.items():
            stride = -(-len(hashes) // share)
            strides.append(stride)
            pipeline.smismember(prefix_key(life.worker_id, life.epoch), list(hashes[stride - 1 :: stride]))
        async with self._slots:
            replies = await pipeline.execute()
        held: dict[WorkerLife, int] = {}
        for life, stride, flags in zip(asked, strides, replies, strict=True):
            # A pool may have dropped the middle of a prefix: what counts is the unbroken run from the start.
            run = next((i for i, flag in enumerate(flags) if not flag), len(flags))
            if run:
                held[life] = run * stride * self._unit
        return held

    def _finished(self, task: asyncio.Task[dict[WorkerLife, int]]) -> None:
        self._pending.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._open_until = time.monotonic() + _OPEN_S
            if not isinstance(error, RedisError | OSError | TimeoutError):
                log.error("prefix lookup failed", exc_info=error)
            elif not self._failing:
                log.warning("prefix lookups fail (%s): requests are placed without prefix hints", str(error) or type(error).__name__)
            self._failing = True
        elif not task.cancelled():
            self._failing = False

    def _caught_up(self, task: asyncio.Task[dict[WorkerLife, int]]) -> None:
        self._overdue -= 1
