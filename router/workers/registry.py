"""The router's mirror of the live workers, read from Redis twice a second.

poll ok        a worker is there as long as its record is; one whose record goes is kept for a short grace, because a
               Redis that came back empty is filled again by the next heartbeats, and then as long as it answers itself, because a
               Redis that takes no writes loses all heartbeats (below)
poll failed    the last known workers stay; said once, and once more when Redis is back
refused        a record that does not fit this deployment (other model, secret, hash unit, a version too far from the router's) is left
               out, with its reason logged once
no record      one that is not signed, or has another's name: no worker of this deployment wrote it there. So is a copy of an earlier
               heartbeat, and a life before the newest that was seen, unless that one is gone and the earlier one answers itself
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from redis.asyncio import Redis
from redis.exceptions import RedisError

from router.workers.prefix_index import WorkerLife
from twostep import __version__
from twostep.checkpoint.fingerprint import is_same_model
from twostep.cluster.exchange import RedisExchange
from twostep.cluster.look import WorkerListing, look, tidy
from twostep.cluster.records import HEARTBEAT_S, HEARTBEAT_TTL_S, MAX_RECORD_BYTES, WorkerRecord
from twostep.cluster.signed import Signer
from twostep.errors import InvalidRequest, TwostepError, Unauthenticated
from twostep.keys.secret import CHALLENGE_BYTES, DeploymentSecret, in_common, is_vouched
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.version_skew import why_not

log = logging.getLogger(__name__)

# Two heartbeats, and what a worker needs to reconnect.
_MISSING_GRACE_S = 2 * HEARTBEAT_S
_AFTER_OUTAGE_GRACE_S = HEARTBEAT_TTL_S + HEARTBEAT_S
# A worker that has said itself that it lives is believed as long as a heartbeat is.
_VOUCHED_S = HEARTBEAT_TTL_S
# A record that says the same heartbeat for so long is no worker's; no worker's own lasts as long.
_SAME_BEAT_S = 30.0
# Listed, and logged by one poll: others who can write to Redis can make up more.
_MAX_REFUSALS = 256
_MAX_SAID_AT_ONCE = 16
# A question to a worker, the time between two, and how many are asked at once; the others' turn comes with a later look.
_ASK_TIMEOUT_S = 3.0
_ASK_EVERY_S = 1.0
_MAX_ASKED = 64

Lives = Callable[[WorkerRecord], Awaitable[bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Describes what every worker of this deployment has in common with the router."""

    model_fingerprint: str
    secret_check: str
    signer: Signer = field(repr=False)
    hash_unit: int
    version: str = __version__

    def refuse(self, record: WorkerRecord) -> str | None:
        """Returns why a worker cannot belong here, or None."""
        # First: what else a record of another version says may mean something else.
        if reason := why_not(self.version, record.version, us="the router", them="it"):
            return reason
        if record.role not in ("prefill", "decode"):
            return f"role {record.role!r} is neither prefill nor decode; upgrade the router"
        if not is_same_model(self.model_fingerprint, record.layout.model_fingerprint):
            same = "--model, --model-revision and --architecture"
            return f"it serves another model than the router, or another revision of it; give both the same {same}"
        if not in_common(record.secret_check, self.secret_check):
            return "it has another deployment secret; give all processes the same --secret-file"
        if record.hash_unit != self.hash_unit:
            return f"its hash unit is {record.hash_unit} and the router's {self.hash_unit}; give all processes the same version of Twostep"
        if record.layout.block_size < 1 or self.hash_unit % record.layout.block_size:
            return f"its block size {record.layout.block_size} does not divide the hash unit {self.hash_unit}; choose one that does"
        if record.num_blocks < 1 or record.max_num_seqs < 1 or record.max_model_len < 1:
            return "its capacity is zero; restart it with room for at least one block and sequence"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A worker that registers and gets no request. `role` and `version` are empty where its record cannot be read."""

    worker_id: str
    role: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Judged:
    """Says of the records of one look at Redis, by name: `workers` that live and fit, `doubtful` ones of a life older than one that was
    seen, and `unfit` ones."""

    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    doubtful: dict[str, WorkerRecord] = field(default_factory=dict)
    unfit: set[str] = field(default_factory=set)
    refusals: list[Refusal] = field(default_factory=list)


class Registry(RedisExchange):
    """`workers` is the current set; `on_poll` gets it after every look at Redis that succeeds. `lives` asks a worker itself; None:
    none is asked. `clock` in seconds, does not go back."""

    every_s = 0.5
    lost = (
        "Redis does not answer (%s): serving goes on with the last known workers and without prefix hints; see that the server of "
        "--redis-url is up"
    )
    found = "Redis answers again"

    def __init__(
        self,
        redis: Redis,
        deployment: Deployment,
        *,
        lives: Lives | None = None,
        on_poll: Callable[[Sequence[WorkerRecord]], None] = lambda workers: None,
        missing_grace_s: float = _MISSING_GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._deployment = deployment
        self._missing_grace_s = missing_grace_s
        self._clock = clock
        self._on_poll = on_poll
        self._witnesses = None if lives is None else Witnesses(lives, clock)
        self._workers: dict[str, WorkerRecord] = {}
        self._missing_since: dict[str, float] = {}
        # By name: the last heartbeat of its newest life.
        self._newest: dict[str, _Beat] = {}
        # What was said of whom.
        self._said: dict[str, str] = {}
        # The workers that registered and do not fit, in the order of their names; the first of them, where there are very many.
        self.refusals: Sequence[Refusal] = ()
        self._recovered_at = -float("inf")

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        """Live workers that fit the deployment, ready or not."""
        return tuple(self._workers.values())

    async def run(self) -> None:
        """Looks until cancelled."""
        try:
            await super().run()
        finally:
            if self._witnesses is not None:
                await self._witnesses.close()

    async def _exchange(self) -> None:
        found = await look(self._redis, list(self._workers))
        if not self.connected:
            self._recovered_at = self._clock()
        self._update(found)
        if found.num_empty:
            await self._tidy()

    async def _tidy(self) -> None:
        """Names of workers that died would pile up. A Redis that takes no writes keeps them."""
        try:
            await tidy(self._redis)
        except (RedisError, OSError, TimeoutError) as error:
            log.debug("names of workers that are gone stay in Redis: %s", error)

    def _update(self, found: WorkerListing) -> None:
        now, before = self._clock(), self._workers
        judged = self._judge(found, now)
        self._keep_silent(judged, before, now)
        self._keep_doubtful(judged, now)
        after = judged.workers
        if self._witnesses is not None:
            self._witnesses.forget_all_but({WorkerLife.of(record) for record in (*after.values(), *judged.doubtful.values())})
        self._say(judged.refusals)
        self._trim(after)
        for name, record in after.items():
            if name not in before or before[name].epoch != record.epoch:
                log.info(
                    "%s worker %s at %s, epoch %d, transports %s",
                    record.role,
                    name,
                    record.address,
                    record.epoch,
                    ",".join(record.transports),
                )
        self._workers = after
        self._on_poll(self.workers)

    def _judge(self, found: WorkerListing, now: float) -> _Judged:
        """Reads all records, and says of each what it is."""
        judged = _Judged()
        for name, text in found.records.items():
            try:
                record = self._read(name, text)
            except TwostepError as error:
                judged.refusals.append(Refusal(worker_id=name, role="", version="", reason=error.message))
                continue
            if reason := self._deployment.refuse(record):
                judged.unfit.add(name)
                judged.refusals.append(_refusal(record, reason))
                continue
            newest = self._newest.get(name)
            if newest is not None and record.epoch < newest.epoch:
                judged.doubtful[name] = record
            elif newest is None or newest.is_followed_by(record, now):
                self._take(judged.workers, record, now)
        return judged

    def _keep_silent(self, judged: _Judged, before: Mapping[str, WorkerRecord], now: float) -> None:
        """Keeps workers that were here before and have no fresh record, for a grace or as long as they answer themselves."""
        grace = _AFTER_OUTAGE_GRACE_S if now - self._recovered_at < _AFTER_OUTAGE_GRACE_S else self._missing_grace_s
        for name, record in before.items():
            if name in judged.workers or name in judged.unfit:
                self._missing_since.pop(name, None)
                continue
            # Asked at once, so that the answer is there before the grace is over.
            vouched = self._is_vouched(record, now)
            if vouched or now - self._missing_since.setdefault(name, now) < grace:
                judged.workers[name] = record
            else:
                self._missing_since.pop(name, None)
                if record.draining:
                    log.info("worker %s has left after its drain", name)
                else:
                    log.warning("worker %s is gone: no heartbeat", name)

    def _keep_doubtful(self, judged: _Judged, now: float) -> None:
        """Takes workers of an older life than one that was seen, where no newer one is used and they answer themselves."""
        for name, record in judged.doubtful.items():
            # Of two lives the one that is used stays as long as it can.
            if name not in judged.workers and self._is_vouched(record, now):
                self._take(judged.workers, record, now)
            else:
                reason = f"epoch {record.epoch} is older than {self._newest[name].epoch}, which was seen before; a newer life of it exists"
                judged.refusals.append(_refusal(record, reason))

    def _read(self, name: str, text: bytes) -> WorkerRecord:
        """Raises TwostepError with what to change."""
        if not text:
            raise InvalidRequest(f"its record is no text, or has more than {MAX_RECORD_BYTES} bytes; look who writes to Redis")
        try:
            record = WorkerRecord.from_json(self._deployment.signer.read_object(text))
        except Unauthenticated as error:
            raise InvalidRequest(
                f"of its record: {error.message}; give all processes the same --secret-file, upgrade workers of an older version, and "
                "look who else writes to Redis"
            ) from error
        if record.worker_id != name:
            raise InvalidRequest(f"its record says it is {record.worker_id!r}; give every worker a name of its own")
        return record

    def _take(self, after: dict[str, WorkerRecord], record: WorkerRecord, now: float) -> None:
        newest = self._newest.get(record.worker_id)
        if newest is None or (newest.epoch, newest.number) != (record.epoch, record.beat):
            self._newest[record.worker_id] = _Beat(record.epoch, record.beat, now)
        self._said.pop(record.worker_id, None)
        after[record.worker_id] = record

    def _is_vouched(self, record: WorkerRecord, now: float) -> bool:
        """Says whether its worker has answered of late; it is asked again. A worker that drains ends by itself."""
        if self._witnesses is None or record.draining:
            return False
        self._witnesses.ask(record)
        return now - self._witnesses.heard_at(WorkerLife.of(record)) < _VOUCHED_S

    def _say(self, refusals: Sequence[Refusal]) -> None:
        """Logs each refusal once, and again when its reason changes; of very many some at a time."""
        self.refusals = sorted(refusals, key=lambda refusal: refusal.worker_id)[:_MAX_REFUSALS]
        num_said = 0
        for refusal in self.refusals:
            if self._said.get(refusal.worker_id) != refusal.reason and num_said < _MAX_SAID_AT_ONCE:
                num_said += 1
                self._said[refusal.worker_id] = refusal.reason
                log.warning("worker %s is refused: %s", refusal.worker_id, refusal.reason)

    def _trim(self, alive: dict[str, WorkerRecord]) -> None:
        """Memories of workers long gone must not grow for ever."""
        for memory in (self._newest, self._said):
            for name in [n for n in memory if n not in alive][: max(0, len(memory) - 4096)]:
                del memory[name]


@dataclass(frozen=True, slots=True)
class _Beat:
    """A heartbeat, and when it was seen first."""

    epoch: int
    number: int
    at: float

    def is_followed_by(self, record: WorkerRecord, now: float) -> bool:
        """Says whether a record of this epoch or a later one is newer, or this one and not long past: what stays longer is a copy."""
        if (record.epoch, record.beat) == (self.epoch, self.number):
            return not record.beat or now - self.at < _SAME_BEAT_S
        return (record.epoch, record.beat) > (self.epoch, self.number)


def _refusal(record: WorkerRecord, reason: str) -> Refusal:
    return Refusal(worker_id=record.worker_id, role=record.role, version=record.version, reason=reason)


# ---- workers that are asked themselves -----------------------------------------------------------------------------------


class Vouching:
    """Asks workers themselves whether they live: a record may be missing because Redis takes no heartbeats (its memory or disk is full, it
    has become a replica), and it may be an old one that somebody has put back. A process that was killed refuses connections at once; one
    that is frozen does not answer in time; what has taken its address has another name or epoch, or not the secret.

    `channel_of` gives the channel to a life that is used already, or None; `open_to` makes one."""

    def __init__(
        self,
        secret: DeploymentSecret,
        channel_of: Callable[[WorkerLife], grpc.aio.Channel | None],
        open_to: Callable[[WorkerRecord], grpc.aio.Channel],
    ) -> None:
        self._secret = secret
        self._channel_of = channel_of
        self._open_to = open_to

    async def lives(self, record: WorkerRecord) -> bool:
        """Says whether the life that the record names answers at its address. Takes a few seconds at most, and never raises for
        what that does."""
        channel = self._channel_of(WorkerLife.of(record))
        if channel is not None:
            return await self._ask(channel, record)
        async with self._open_to(record) as made:
            return await self._ask(made, record)

    async def _ask(self, channel: grpc.aio.Channel, record: WorkerRecord) -> bool:
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        request = worker_pb2.WorkerStatsRequest(challenge=challenge)
        try:
            stats: worker_pb2.WorkerStats = await worker_pb2_grpc.WorkerStub(channel).Stats(request, timeout=_ASK_TIMEOUT_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return False
        return is_vouched(stats.vouched, self._secret, challenge, worker_id=record.worker_id, address=record.address, epoch=record.epoch)


class Witnesses:
    """`lives` answers in a few seconds and raises nothing. `clock` in seconds, does not go back."""

    def __init__(self, lives: Lives, clock: Callable[[], float]) -> None:
        self._lives = lives
        self._clock = clock
        self._heard: dict[WorkerLife, float] = {}
        self._asked: dict[WorkerLife, float] = {}
        self._tasks: dict[WorkerLife, asyncio.Task[None]] = {}

    def heard_at(self, life: WorkerLife) -> float:
        """Returns when its last answered question was asked; long ago if there is none."""
        return self._heard.get(life, -float("inf"))

    def ask(self, record: WorkerRecord) -> None:
        """Returns at once."""
        life, now = WorkerLife.of(record), self._clock()
        if life in self._tasks or len(self._tasks) >= _MAX_ASKED or now - self._asked.get(life, -float("inf")) < _ASK_EVERY_S:
            return
        self._asked[life] = now
        task = asyncio.create_task(self._ask(record, life, now))
        self._tasks[life] = task
        task.add_done_callback(lambda _: self._tasks.pop(life, None))

    def forget_all_but(self, lives: Collection[WorkerLife]) -> None:
        for memory in (self._heard, self._asked):
            for life in [known for known in memory if known not in lives]:
                del memory[life]

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, record: WorkerRecord, life: WorkerLife, now: float) -> None:
        if await self._lives(record):
            self._heard[life] = now
