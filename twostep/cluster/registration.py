"""A worker's entry in Redis: the heartbeat that renews its record, and the sets of prefixes it holds, in its pool and in host memory.

Redis is for finding each other, not for serving: once started, a worker goes on without it, says so once, and
announces everything again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.connection import connect, public
from twostep.cluster.epochs import next_epoch
from twostep.cluster.records import (
    HEARTBEAT_S,
    HEARTBEAT_TTL_S,
    MAX_PREFIXES_PER_WORKER,
    PREFIX_TTL_S,
    WORKERS_KEY,
    WorkerRecord,
    claim_key,
    host_prefix_key,
    prefix_key,
    worker_key,
)
from twostep.cluster.signed import RECORDS, Signer
from twostep.errors import SetupError
from twostep.keys.secret import DeploymentSecret

log = logging.getLogger(__name__)

_BATCH = 1000
_AGAIN_S = 0.2
# A heartbeat that takes long makes the record last longer; by so much at most.
_MOST_LONGER_S = 26.0
# What a claim's life may last beyond what Redis says, before its worker is known to live.
_CLAIM_MARGIN_S = 0.5

# A claim is "{life} {epoch} {address}". Another life's stands as long as it lasts; but at its start, a worker that listens where that one
# did knows that it is gone. Of one life's words the late ones, of an epoch that is over, are not heard.
# KEYS: claim, record, workers. ARGV: life, epoch, address, milliseconds, record, worker id, 1: this is the start.
_BEAT = """
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'string' then
    local life, epoch, address = string.match(held, '^(%S+) (%d+) (.*)$')
    if life and life ~= ARGV[1] and not (ARGV[7] == '1' and address == ARGV[3]) then return {address, redis.call('PTTL', KEYS[1])} end
    if life == ARGV[1] and tonumber(epoch) > tonumber(ARGV[2]) then return {'', 0} end
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[2] .. ' ' .. ARGV[3], 'PX', ARGV[4])
redis.call('SET', KEYS[2], ARGV[5], 'PX', ARGV[4])
local kind = redis.call('TYPE', KEYS[3]).ok
if kind ~= 'set' and kind ~= 'none' then redis.call('DEL', KEYS[3]) end
redis.call('SADD', KEYS[3], ARGV[6])
return false
"""
# KEYS as above. ARGV: life, worker id.
_LEAVE = """
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'string' and string.match(held, '^%S+') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('SREM', KEYS[3], ARGV[2])
return 1
"""


class PrefixChanges(Protocol):
    @property
    def added(self) -> Sequence[bytes]: ...
    @property
    def removed(self) -> Sequence[bytes]: ...
    @property
    def host_added(self) -> Sequence[bytes]: ...
    @property
    def host_removed(self) -> Sequence[bytes]: ...


class NameTaken(Exception):
    """Another worker lives under this one's id. `for_s`: how long its claim still lasts, unless it is renewed."""

    def __init__(self, address: str, for_s: float) -> None:
        super().__init__(address, for_s)
        self.address = address
        self.for_s = for_s


class Registration:
    """start(), then it beats by itself until close(). `describe` makes the record of this moment, `take_delta` gives the prefixes
    that came and went since the last call; both are called on the event loop and return at once.

    A worker's id is one process' at a time: it is claimed with every heartbeat, in one step of Redis with the record. Who finds it taken
    waits until the claim is over, as that of a process that was killed soon is, and then does not start. One whose claim lapsed while Redis
    was away, and was taken meanwhile, says so and writes nothing until it has it again."""

    def __init__(
        self,
        url: str,
        *,
        secret: DeploymentSecret,
        describe: Callable[[], WorkerRecord],
        take_delta: Callable[[], PrefixChanges],
        connect_timeout_s: float = 10.0,
    ) -> None:
        self._url = url
        self._signer = Signer(secret, RECORDS)
        self._describe = describe
        self._take_delta = take_delta
        self._connect_timeout_s = connect_timeout_s
        self._redis = connect(url)
        self._life = secrets.token_hex(8)
        # By tier, each bounded.
        self._in_pool = _Announced(MAX_PREFIXES_PER_WORKER)
        self._in_host = _Announced(MAX_PREFIXES_PER_WORKER)
        self._task: asyncio.Task[None] | None = None
        self._connected = False
        # Of the life that was announced last.
        self._record: WorkerRecord | None = None
        self._turn = asyncio.Lock()
        self._num_beats = 0
        self._beat_s = 0.0
        # Who has the id instead; empty: nobody.
        self._rival = ""

    @property
    def connected(self) -> bool:
        """False while Redis is away, or another worker has the id."""
        return self._connected

    async def new_epoch(self, after: int) -> int:
        """Returns an epoch for the worker's next life. Without Redis, the one after."""
        try:
            return await next_epoch(self._redis, after)
        except (RedisError, OSError):
            return after + 1

    async def start(self) -> None:
        """Announces the worker. Tries for `connect_timeout_s`, then raises SetupError; also where another worker has its id and lives."""
        give_up = time.monotonic() + self._connect_timeout_s
        over_at: float | None = None
        try:
            while True:
                try:
                    await self._beat(first=True)
                    break
                except NameTaken as taken:
                    worker_id = self._describe().worker_id
                    if over_at is None:
                        over_at = time.monotonic() + taken.for_s + _CLAIM_MARGIN_S
                        log.info("%s is another worker's, at %s: waiting %.1f s for it to be gone", worker_id, taken.address, taken.for_s)
                    elif time.monotonic() >= over_at:
                        raise SetupError(
                            f"a worker of the id {worker_id} lives already, at {taken.address}; give every worker a --worker-id of its own"
                        ) from taken
                except (RedisError, OSError) as error:
                    if time.monotonic() >= give_up:
                        raise SetupError(f"no Redis at {public(self._url)} ({error}); start one, or give another --redis-url") from error
                await asyncio.sleep(_AGAIN_S)
        except BaseException:
            await self._redis.aclose()
            raise
        self._task = asyncio.create_task(self._beat_forever(), name="heartbeat")

    async def announce(self) -> None:
        """Sends a heartbeat now, for what routers should not learn a second late. A worker of a new epoch stands under that from now on,
        with all the prefixes that it holds. Where Redis is away, a later heartbeat says it."""
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
                pipe.delete(*self._keys(record))
                pipe.eval(_LEAVE, 3, *_claimed(record), self._life, record.worker_id)
                await pipe.execute()
        except (RedisError, OSError) as error:
            log.warning("could not deregister (%s); the record expires within %g s", error, self._ttl_s)
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
        except NameTaken as taken:
            if self._rival != taken.address:
                self._rival = taken.address
                log.error(
                    "another worker has taken the id %s, at %s: routers hear of that one; stop one of them, and give every worker a "
                    "--worker-id of its own",
                    self._describe().worker_id,
                    taken.address,
                )
            self._connected = False
        except (RedisError, OSError) as error:
            if self._connected:
                self._connected = False
                log.warning("Redis is away (%s); serving goes on, trying again every %g s", error, HEARTBEAT_S)
            for announced in (self._in_pool, self._in_host):
                announced.forget_sent()

    async def _beat(self, *, first: bool = False) -> None:
        """Raises NameTaken, RedisError, OSError."""
        self._num_beats += 1
        record = replace(self._describe(), beat=self._num_beats)
        before, self._record = self._record, record
        delta = self._take_delta()
        self._in_pool.apply(delta.added, delta.removed)
        self._in_host.apply(delta.host_added, delta.host_removed)
        tiers = list(zip(self._keys(record), (self._in_pool, self._in_host), strict=True))
        begun = time.monotonic()
        async with self._redis.pipeline(transaction=False) as pipe:
            if before is not None and before.epoch != record.epoch:
                pipe.delete(*self._keys(before))
                for _, announced in tiers:
                    announced.forget_sent()
            said = self._signer.sign_object(record.to_json())
            whose = self._life, str(record.epoch), record.address
            pipe.eval(_BEAT, 3, *_claimed(record), *whose, str(int(self._ttl_s * 1000)), said, record.worker_id, str(int(first)))
            taken_at = len(pipe) - 1
            for key, announced in tiers:
                announced.write(pipe, key)
                pipe.expire(key, int(PREFIX_TTL_S))
            for key, _ in tiers:
                pipe.scard(key)
            replies = await pipe.execute()
        self._beat_s = time.monotonic() - begun
        if taken := replies[taken_at]:
            address, for_ms = taken
            most_s = HEARTBEAT_TTL_S + _MOST_LONGER_S
            raise NameTaken(address.decode(errors="replace"), for_ms / 1e3 if 0 <= for_ms <= 1e3 * most_s else most_s)
        if not self._connected:
            self._connected, self._rival = True, ""
            log.info("registered in Redis as %s at %s", record.worker_id, record.address)
        # Someone emptied or restarted Redis, or a set expired while it was away: announce all at the next beat.
        for (_, announced), num_there in zip(tiers, replies[-len(tiers) :], strict=True):
            if num_there != announced.num_sent:
                announced.forget_sent()

    @property
    def _ttl_s(self) -> float:
        """Returns how long a record lives without a heartbeat: two may be lost, however long they take."""
        return HEARTBEAT_TTL_S + min(3 * self._beat_s, _MOST_LONGER_S)

    @staticmethod
    def _keys(record: WorkerRecord) -> tuple[str, str]:
        """Returns the key of the prefixes in the worker's pool, and the key of those in its host memory."""
        return prefix_key(record.worker_id, record.epoch), host_prefix_key(record.worker_id, record.epoch)


def _claimed(record: WorkerRecord) -> tuple[str, str, str]:
    return claim_key(record.worker_id), worker_key(record.worker_id), WORKERS_KEY


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
        """Makes the next write start over, since what Redis holds is unknown."""
        self._resend = True

    def write(self, pipe: Pipeline, key: str) -> None:
        if self._resend:
            pipe.delete(key)
            self._to_add = dict(self._held)
            self._to_remove = {}
            self._resend = False
        for command, prefixes in ((pipe.srem, list(self._to_remove)), (pipe.sadd, list(self._to_add))):
            for start in range(0, len(prefixes), _BATCH):
                command(key, *prefixes[start : start + _BATCH])
        self._to_add, self._to_remove = {}, {}
        self.num_sent = len(self._held)
