"""A worker's entry in Redis: the heartbeat that renews its record, and the sets of prefixes it holds, in its pool and in host memory.

Redis is for finding each other, not for serving: once started, a worker goes on without it, says so once, and
announces everything again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.records import (
    HEARTBEAT_S,
    HEARTBEAT_TTL_S,
    MAX_PREFIXES_PER_WORKER,
    PREFIX_TTL_S,
    WORKERS_KEY,
    WorkerRecord,
    host_prefix_key,
    prefix_key,
    worker_key,
)
from twostep.errors import SetupError

log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
_BATCH = 1000


class PrefixDelta(Protocol):
    @property
    def added(self) -> Sequence[bytes]: ...

    @property
    def removed(self) -> Sequence[bytes]: ...

    @property
    def host_added(self) -> Sequence[bytes]: ...

    @property
    def host_removed(self) -> Sequence[bytes]: ...


def connect(url: str) -> redis.asyncio.Redis:
    """A client that answers or fails within about a second: who calls decides what to repeat. Raises SetupError for a bad URL."""
    try:
        return redis.asyncio.Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0), max_connections=8
        )
    except ValueError as error:
        raise SetupError(f"--redis-url {_public(url)!r}: {error}; give for example redis://127.0.0.1:6379/0") from error


class Registration:
    """start(), then it beats by itself until close(). `describe` makes the record of this moment, `take_delta` gives the prefixes
    that came and went since the last call; both are called on the event loop and return at once."""

    def __init__(
        self, url: str, *, describe: Callable[[], WorkerRecord], take_delta: Callable[[], PrefixDelta], connect_timeout_s: float = 10.0
    ) -> None:
        self._url = url
        self._describe = describe
        self._take_delta = take_delta
        self._connect_timeout_s = connect_timeout_s
        self._redis = connect(url)
        # By tier, each bounded.
        self._in_pool = _Announced(MAX_PREFIXES_PER_WORKER)
        self._in_host = _Announced(MAX_PREFIXES_PER_WORKER)
        self._task: asyncio.Task[None] | None = None
        self._connected = False
        # Of the life that was announced last.
        self._record: WorkerRecord | None = None
        self._turn = asyncio.Lock()

    @property
    def connected(self) -> bool:
        """False while Redis is away."""
        return self._connected

    async def start(self) -> None:
        """Announces the worker. Tries for `connect_timeout_s`, then raises SetupError."""
        give_up = time.monotonic() + self._connect_timeout_s
        while True:
            try:
                await self._beat()
                break
            except (RedisError, OSError) as error:
                if time.monotonic() >= give_up:
                    await self._redis.aclose()
                    raise SetupError(f"no Redis at {_public(self._url)} ({error}); start one, or give another --redis-url") from error
            await asyncio.sleep(0.2)
        self._task = asyncio.create_task(self._beat_forever(), name="heartbeat")

    async def announce(self) -> None:
        """A heartbeat now, for what routers should not learn a second late. A worker of a new epoch stands under that from now on, with all
        the prefixes that it holds. Where Redis is away, a later heartbeat says it."""
        if self._task is not None:
            await self._try_beat()

    async def close(self) -> None:
        """Takes the worker out of Redis, if Redis is there; otherwise its record expires by itself. Idempotent."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        record = self._describe()
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.delete(worker_key(record.worker_id), *self._keys(record))
                pipe.srem(WORKERS_KEY, record.worker_id)
                await pipe.execute()
        except (RedisError, OSError) as error:
            log.warning("could not deregister (%s); the record expires within %g s", error, HEARTBEAT_TTL_S)
        self._connected = False
        await self._redis.aclose()

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._try_beat()
            end_if_cancelled()

    async def _try_beat(self) -> None:
        try:
            async with self._turn:
                await self._beat()
        except (RedisError, OSError) as error:
            if self._connected:
                self._connected = False
                log.warning("Redis is away (%s); serving goes on, trying again every %g s", error, HEARTBEAT_S)
            self._forget_sent()

    def _forget_sent(self) -> None:
        for announced in (self._in_pool, self._in_host):
            announced.forget_sent()

    async def _beat(self) -> None:
        record = self._describe()
        before, self._record = self._record, record
        delta = self._take_delta()
        self._in_pool.apply(delta.added, delta.removed)
        self._in_host.apply(delta.host_added, delta.host_removed)
        tiers = list(zip(self._keys(record), (self._in_pool, self._in_host), strict=True))
        async with self._redis.pipeline(transaction=False) as pipe:
            if before is not None and before.epoch != record.epoch:
                pipe.delete(*self._keys(before))
                self._forget_sent()
            pipe.set(worker_key(record.worker_id), record.to_json(), px=int(HEARTBEAT_TTL_S * 1000))
            pipe.sadd(WORKERS_KEY, record.worker_id)
            for key, announced in tiers:
                announced.write(pipe, key)
                pipe.expire(key, int(PREFIX_TTL_S))
            for key, _ in tiers:
                pipe.scard(key)
            replies = await pipe.execute()
        if not self._connected:
            self._connected = True
            log.info("registered in Redis as %s at %s", record.worker_id, record.address)
        # Someone emptied or restarted Redis, or a set expired while it was away: announce all at the next beat.
        for (_, announced), num_there in zip(tiers, replies[-len(tiers) :], strict=True):
            if num_there != announced.num_sent:
                announced.forget_sent()

    @staticmethod
    def _keys(record: WorkerRecord) -> tuple[str, str]:
        """Of its pool's prefixes, and of those in host memory."""
        return prefix_key(record.worker_id, record.epoch), host_prefix_key(record.worker_id, record.epoch)


class _Announced:
    """Prefixes as they should stand in Redis (the most recent ones up to a bound), and what of it still has to be sent."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        # A dict for its order: the oldest first.
        self._held: dict[bytes, None] = {}
        self._to_add: dict[bytes, None] = {}
        self._to_remove: dict[bytes, None] = {}
        self._resend = True
        self.num_sent = 0

    def apply(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for prefix in removed:
            self._drop(prefix)
        for prefix in added:
            if prefix not in self._held:
                self._held[prefix] = None
                self._to_add[prefix] = None
                self._to_remove.pop(prefix, None)
        while len(self._held) > self._bound:
            self._drop(next(iter(self._held)))

    def _drop(self, prefix: bytes) -> None:
        if prefix in self._held:
            del self._held[prefix]
            self._to_add.pop(prefix, None)
            self._to_remove[prefix] = None

    def forget_sent(self) -> None:
        """What Redis holds is unknown: the next write starts over."""
        self._resend = True

    def write(self, pipe: Pipeline, key: str) -> None:
        if self._resend:
            pipe.delete(key)
            self._to_add = dict(self._held)
            self._to_remove = {}
            self._resend = False
        for batch in _batches(self._to_remove):
            pipe.srem(key, *batch)
        for batch in _batches(self._to_add):
            pipe.sadd(key, *batch)
        self._to_add, self._to_remove = {}, {}
        self.num_sent = len(self._held)


def _batches(prefixes: dict[bytes, None]) -> Iterator[list[bytes]]:
    items = list(prefixes)
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]


def _public(url: str) -> str:
    """Without the password."""
    parts = urlsplit(url)
    return url if parts.password is None else url.replace(f":{parts.password}@", ":***@", 1)
