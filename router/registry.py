"""The router's mirror of the live workers, read from Redis twice a second.

poll ok        a worker is there as long as its record is; one whose record goes is kept for a short grace, because a
               Redis that came back empty is filled again by the next heartbeats
poll failed    the last known workers stay; said once, and once more when Redis is back
refused        a record that does not fit this deployment (other model, secret, hash unit, an older epoch, a version too far
               from the router's) is left out, with its reason logged once
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from twostep import __version__
from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.records import HEARTBEAT_S, HEARTBEAT_TTL_S, WORKERS_KEY, WorkerRecord, worker_key
from twostep.errors import InvalidRequest
from twostep.fingerprint import is_same_model
from twostep.version_skew import why_not

log = logging.getLogger(__name__)

POLL_S = 0.5
_TIMEOUT_S = 1.0
# Two heartbeats, and what a worker needs to reconnect.
_MISSING_GRACE_S = 2 * HEARTBEAT_S
_AFTER_OUTAGE_GRACE_S = HEARTBEAT_TTL_S + HEARTBEAT_S
# Names without a record that one poll takes out of the set.
_MAX_FORGOTTEN = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What every worker of this deployment has in common with the router."""

    model_fingerprint: str
    secret_check: str
    hash_unit: int
    version: str = __version__

    def refuse(self, record: WorkerRecord) -> str | None:
        """Why a worker cannot belong here, or None."""
        # First: what else a record of another version says may mean something else.
        if reason := why_not(self.version, record.version, us="the router", them="it"):
            return reason
        if record.role not in ("prefill", "decode"):
            return f"role {record.role!r} is neither prefill nor decode; upgrade the router"
        if not is_same_model(self.model_fingerprint, record.layout.model_fingerprint):
            return "it serves another model than the router's --model"
        if record.secret_check != self.secret_check:
            return "it has another deployment secret; give all processes the same --secret-file"
        if record.hash_unit != self.hash_unit:
            return f"its hash unit is {record.hash_unit} and the router's {self.hash_unit}; give all processes the same --hash-unit"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What one look at Redis found, by names."""

    records: Mapping[str, WorkerRecord]
    # Why they cannot be read.
    unreadable: Mapping[str, str]


class Registry:
    """`workers` is the current set; `on_poll` callbacks get it after every successful look at Redis."""

    def __init__(self, redis: Redis, deployment: Deployment, *, poll_s: float = POLL_S, missing_grace_s: float = _MISSING_GRACE_S) -> None:
        self._redis = redis
        self._deployment = deployment
        self._poll_s = poll_s
        self._missing_grace_s = missing_grace_s
        self._workers: dict[str, WorkerRecord] = {}
        self._missing_since: dict[str, float] = {}
        self._newest_epoch: dict[str, int] = {}
        # What was said of whom.
        self._said: dict[str, str] = {}
        self._refusals: Sequence[Refusal] = ()
        self._callbacks: list[Callable[[Sequence[WorkerRecord]], None]] = []
        self._connected = True
        self._recovered_at = -float("inf")

    @property
    def workers(self) -> Sequence[WorkerRecord]:
        """Live workers that fit the deployment, ready or not."""
        return tuple(self._workers.values())

    @property
    def refusals(self) -> Sequence[Refusal]:
        """Of the workers that registered and do not fit, in the order of their names."""
        return self._refusals

    @property
    def connected(self) -> bool:
        """False while Redis does not answer."""
        return self._connected

    def on_poll(self, callback: Callable[[Sequence[WorkerRecord]], None]) -> None:
        self._callbacks.append(callback)

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await self.poll()
            end_if_cancelled()
            await asyncio.sleep(self._poll_s)

    async def poll(self) -> None:
        """One look at Redis; never raises for what Redis does or holds."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found = await self._read()
        except (RedisError, OSError, TimeoutError) as error:
            if self._connected:
                self._connected = False
                log.warning(
                    "Redis does not answer (%s): serving goes on with the %d last known workers and without prefix hints; "
                    "see that the server of --redis-url is up",
                    str(error) or type(error).__name__,
                    len(self._workers),
                )
            return
        if not self._connected:
            self._connected = True
            self._recovered_at = time.monotonic()
            log.warning("Redis answers again")
        self._update(found)

    async def _read(self) -> _Look:
        """One round trip for the workers known before, more only for new names and for those without a record."""
        known = list(self._workers)
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.smembers(WORKERS_KEY)
        if known:
            pipeline.mget([worker_key(name) for name in known])
        replies = await pipeline.execute()
        names = sorted(name.decode(errors="replace") for name in replies[0])
        records: list[bytes | None] = list(replies[1]) if known else []
        new = [name for name in names if name not in self._workers]
        if new:
            fresh = await cast(Awaitable[list[bytes | None]], self._redis.mget([worker_key(name) for name in new]))
            records += fresh
            gone = [name for name, raw in zip(new, fresh, strict=True) if raw is None]
            if gone:
                # Names of workers that died would pile up. One that lives is named again by its next heartbeat.
                await self._redis.srem(WORKERS_KEY, *gone[:_MAX_FORGOTTEN])
        found: dict[str, WorkerRecord] = {}
        unreadable: dict[str, str] = {}
        for name, raw in zip([*known, *new], records, strict=True):
            if raw is None:
                continue
            try:
                found[name] = WorkerRecord.from_json(raw)
            except InvalidRequest as error:
                unreadable[name] = error.message
        return _Look(records=found, unreadable=unreadable)

    def _update(self, look: _Look) -> None:
        now = time.monotonic()
        before, found = self._workers, look.records
        after: dict[str, WorkerRecord] = {}
        refusals = [Refusal(worker_id=name, role="", version="", reason=reason) for name, reason in look.unreadable.items()]
        for name, record in found.items():
            reason = self._deployment.refuse(record)
            if reason is None and record.worker_id != name:
                reason = f"its record says it is {record.worker_id!r}; give every worker a name of its own"
            if reason is None and record.epoch < self._newest_epoch.get(name, 0):
                reason = f"epoch {record.epoch} is older than {self._newest_epoch[name]}, which was seen before; a newer life of it exists"
            if reason is not None:
                refusals.append(Refusal(worker_id=name, role=record.role, version=record.version, reason=reason))
                continue
            self._said.pop(name, None)
            self._newest_epoch[name] = record.epoch
            after[name] = record
        grace = _AFTER_OUTAGE_GRACE_S if now - self._recovered_at < _AFTER_OUTAGE_GRACE_S else self._missing_grace_s
        for name, record in before.items():
            if name in found:
                self._missing_since.pop(name, None)
                continue
            since = self._missing_since.setdefault(name, now)
            if now - since < grace:
                after[name] = record
            else:
                self._missing_since.pop(name, None)
                if record.draining:
                    log.info("worker %s has left after its drain", name)
                else:
                    log.warning("worker %s is gone: no heartbeat", name)
        self._say(refusals)
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
        for callback in self._callbacks:
            callback(self.workers)

    def _say(self, refusals: Sequence[Refusal]) -> None:
        """Each once, and again when its reason changes."""
        self._refusals = sorted(refusals, key=lambda refusal: refusal.worker_id)
        for refusal in self._refusals:
            if self._said.get(refusal.worker_id) != refusal.reason:
                self._said[refusal.worker_id] = refusal.reason
                log.warning("worker %s is refused: %s", refusal.worker_id, refusal.reason)

    def _trim(self, alive: dict[str, WorkerRecord]) -> None:
        """Memories of workers long gone must not grow for ever."""
        for memory in (self._newest_epoch, self._said):
            for name in [n for n in memory if n not in alive][: max(0, len(memory) - 4096)]:
                del memory[name]
