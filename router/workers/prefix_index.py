"""Which workers hold how much of a prompt's prefix, in the pool or below it in host memory: a pipelined round trip to Redis, or two, over
a connection that all lookups share, and never more than 2 ms of waiting (--prefix-lookup-timeout).

Of a long prompt the first trip asks for units 1, 2, 4, 8 ... of it: the first one that a worker has not bounds what it holds. The second
asks for all below that bound, of those workers alone that have the first unit. Most workers hold nothing of most prompts, and every unit
that is asked for costs this router about 2 us.

Workers whose models keep states, or have windows, tell of units that stand alone: those that have a state, or that all layers hold. These
are asked for in one trip: of a long prompt the first ones,
where prompts part, and the last ones, where its last turn ended.

The index lives in Redis alone: a router that starts knows at once what the one before it knew.

A late answer is no answer, but its command is left to end. While one is overdue, and for a second after an error, requests go without
hints at once: a dead Redis costs its 2 ms about once a second, not per request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, cast

from redis.exceptions import RedisError, ResponseError

from router.request.job import RequestJob
from twostep.cluster.records import LayoutRecord, WorkerRecord, host_prefix_key, prefix_key
from twostep.cluster.shared_connection import Command
from twostep.keys.secret import DeploymentSecret
from twostep.prefix import derive_key, prefix_hashes

log = logging.getLogger(__name__)

# Hashing so many tokens takes about a millisecond: more is done in a thread.
_MAX_INLINE_TOKENS = 16384
_CONNECT_S = 1.0
# So long nothing is asked after lookups that came too late.
_PAUSE_S = 1.0
# Bounds of one lookup: of more workers only the first are asked, and hashes beyond the share of each worker are probed at every
# second, third ... unit.
_MAX_PROBES = 8192
_MAX_WORKERS = 128
_MAX_PENDING = 64
# Prompts up to here are asked for in one trip.
_MAX_AT_ONCE = 16
# Where units stand alone: so many of the first ones are asked for, and of the last.
_FIRST, _LAST = 16, 48


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """A worker between one start and the next: what a restart forgets belongs to it."""

    worker_id: str
    epoch: int

    @classmethod
    def of(cls, record: WorkerRecord) -> WorkerLife:
        return cls(record.worker_id, record.epoch)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Tokens of a prompt's prefix that a worker holds: the first `pool_tokens` where steps read them, the next `host_tokens` in its host
    memory, which have to be copied up first."""

    pool_tokens: int
    host_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.pool_tokens + self.host_tokens


NOT_CACHED = CachedPrefix(0)
NO_HINTS: Mapping[WorkerLife, CachedPrefix] = {}


class Answering(Protocol):
    """See twostep.cluster.shared_connection.SharedConnection."""

    async def ask(self, commands: Sequence[Command]) -> Sequence[object]: ...

    async def close(self) -> None: ...


class PrefixIndex:
    def __init__(
        self, redis: Answering, secret: DeploymentSecret, hash_unit: int, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`redis`: closed with the index. `secret`: the deployment's, from which the keys of hashes are derived."""
        self._clock = clock
        self._redis = redis
        self._secret = secret
        self._unit = hash_unit
        self._timeout_s = timeout_s
        self._pending: set[asyncio.Task[dict[WorkerLife, CachedPrefix]]] = set()
        self._overdue = 0
        self._open_until = 0.0
        self._failing = False

    async def open(self) -> None:
        """Makes the connection that lookups take, which would make the first ones late. Takes a second at most; never raises."""
        ping = asyncio.create_task(self._redis.ask([("PING",)]))
        await asyncio.wait((ping,), timeout=_CONNECT_S)
        ping.cancel()
        await asyncio.gather(ping, return_exceptions=True)

    async def cached_tokens(self, job: RequestJob, workers: Sequence[WorkerRecord]) -> Mapping[WorkerLife, CachedPrefix]:
        """Returns how much of the job's prompt each worker that takes work holds; empty without an answer in time."""
        # The last token is always computed: its logits are what the first new token is sampled from.
        usable = len(job.prompt) - 1
        if usable < self._unit:
            return NO_HINTS
        records = [record for record in workers if record.ready and not record.draining]
        keys = {record.layout: self._key(job, record.layout) for record in records}
        hashes: dict[bytes, Sequence[bytes]] = {}
        for key in set(keys.values()):
            if usable <= _MAX_INLINE_TOKENS:
                hashes[key] = prefix_hashes(key, job.prompt[:usable], self._unit)
            else:
                hashes[key] = await asyncio.to_thread(prefix_hashes, key, job.prompt[:usable], self._unit)
        tiered = {WorkerLife.of(r) for r in records if r.num_host_blocks}
        sparse = {WorkerLife.of(r) for r in records if r.layout.num_state_blocks or r.layout.num_windowed}
        return await self.lookup({WorkerLife.of(r): hashes[keys[r.layout]] for r in records}, tiered, sparse)

    def _key(self, job: RequestJob, layout: LayoutRecord) -> bytes:
        return derive_key(
            self._secret,
            tenant=job.tenant,
            salt=job.cache_salt,
            model_fingerprint=layout.model_fingerprint,
            dtype=layout.dtype,
            quantization=layout.quantization,
        )

    async def lookup(
        self,
        hashes_of: Mapping[WorkerLife, Sequence[bytes]],
        tiered: Set[WorkerLife] = frozenset(),
        sparse: Set[WorkerLife] = frozenset(),
    ) -> Mapping[WorkerLife, CachedPrefix]:
        """Returns the longest prefix that each worker holds, given the prompt's unit hashes under each worker's key; of the `tiered` ones,
        those in host memory too; of the `sparse` ones, which tell only of boundaries where a state is, whatever they lack before. Workers
        with none are left out. Empty if Redis is slow or away; never raises."""
        asked = {life: hashes for life, hashes in list(hashes_of.items())[:_MAX_WORKERS] if hashes}
        if not asked or self._overdue or len(self._pending) >= _MAX_PENDING or self._clock() < self._open_until:
            return NO_HINTS
        task = asyncio.create_task(self._ask(asked, tiered, sparse))
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
        await self._redis.close()

    async def _ask(
        self, asked: Mapping[WorkerLife, Sequence[bytes]], tiered: Set[WorkerLife], sparse: Set[WorkerLife]
    ) -> dict[WorkerLife, CachedPrefix]:
        share = _MAX_PROBES // sum(1 + (life in tiered) for life in asked)
        probes = [
            PrefixProbe(life, hashes, 1 if life in sparse else -(-len(hashes) // share), tiered=life in tiered, sparse=life in sparse)
            for life, hashes in asked.items()
        ]
        await self._probe({probe: probe.first() for probe in probes})
        rest = {probe: indices for probe in probes if (indices := probe.rest())}
        if rest:
            await self._probe(rest)
        return {probe.life: held for probe in probes if (held := probe.held(self._unit)).num_tokens}

    async def _probe(self, wanted: Mapping[PrefixProbe, Sequence[int]]) -> None:
        commands: list[Command] = []
        for probe, indices in wanted.items():
            hashes = [probe.hashes[i] for i in indices]
            commands.append(("SMISMEMBER", prefix_key(probe.life.worker_id, probe.life.epoch), *hashes))
            if probe.tiered:
                commands.append(("SMISMEMBER", host_prefix_key(probe.life.worker_id, probe.life.epoch), *hashes))
        replies = map(_flags, await self._redis.ask(commands))
        for probe, indices in wanted.items():
            in_pool = next(replies) or [0] * len(indices)
            probe.learn(indices, in_pool, (next(replies) or [0] * len(indices)) if probe.tiered else in_pool)

    def _finished(self, task: asyncio.Task[dict[WorkerLife, CachedPrefix]]) -> None:
        self._pending.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._open_until = self._clock() + _PAUSE_S
            if not isinstance(error, RedisError | OSError | TimeoutError):
                log.error("prefix lookup failed", exc_info=error)
            elif not self._failing:
                log.warning("prefix lookups fail (%s): requests are placed without prefix hints", str(error) or type(error).__name__)
            self._failing = True
        elif not task.cancelled():
            self._failing = False

    def _caught_up(self, task: asyncio.Task[dict[WorkerLife, CachedPrefix]]) -> None:
        self._overdue -= 1


def _flags(reply: object) -> Sequence[int]:
    """Returns nothing for a key that is no set: no worker wrote it. Raises RedisError for everything else that went wrong."""
    if isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE"):
        return ()
    if isinstance(reply, RedisError):
        raise reply
    return cast(Sequence[int], reply)


class PrefixProbe:
    """Keeps what is known of one worker: of every `stride`-th unit, whether it is in the pool, and whether it is there at all. `sparse`:
    one that is there does not need those before it."""

    def __init__(self, life: WorkerLife, hashes: Sequence[bytes], stride: int, *, tiered: bool, sparse: bool = False) -> None:
        self.life = life
        self.hashes = hashes if stride == 1 else hashes[stride - 1 :: stride]
        self.tiered = tiered
        self._stride = stride
        self._sparse = sparse
        self._in_pool = [False] * len(self.hashes)
        self._in_either = [False] * len(self.hashes)

    def first(self) -> Sequence[int]:
        """Indices to ask for first."""
        num = len(self.hashes)
        if self._sparse:
            return range(num) if num <= _FIRST + _LAST else [*range(_FIRST), *range(num - _LAST, num)]
        return range(num) if num <= _MAX_AT_ONCE else [(1 << k) - 1 for k in range(num.bit_length())]

    def rest(self) -> Sequence[int]:
        """Then: all others before the first that is known to be missing."""
        if self._sparse:
            return []
        asked = self.first()
        bound = next((i for i in asked if not self._in_either[i]), len(self.hashes))
        known = frozenset(asked)
        return [i for i in range(bound) if i not in known]

    def learn(self, indices: Sequence[int], in_pool: Sequence[int], in_host: Sequence[int]) -> None:
        for i, pool, host in zip(indices, in_pool, in_host, strict=True):
            self._in_pool[i], self._in_either[i] = bool(pool), bool(pool or host)

    def held(self, unit: int) -> CachedPrefix:
        length = last_length if self._sparse else run_length
        pool, either = length(self._in_pool), length(self._in_either)
        return CachedPrefix(pool * self._stride * unit, (either - pool) * self._stride * unit)


def run_length(flags: Sequence[int]) -> int:
    """Returns the length of the unbroken run of prefixes that are there. The middle of a prefix may be gone: what counts is the unbroken
    run from the start."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


def last_length(flags: Sequence[int]) -> int:
    """Returns the length of the longest prefix that is there; it stands for all that is before."""
    return next((i + 1 for i in reversed(range(len(flags))) if flags[i]), 0)
