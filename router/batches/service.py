"""Batches of one router: what clients do with theirs, and those that this router runs.

Every router looks at the batches that are open, and takes a lease of one that is not run, as long as it has room. A router that
dies loses its leases within ten seconds, and another begins where it was.

    twostep:v1:batch:{id}   who runs it; lapses LEASE_S after it was renewed last

A lease says who should run a batch; that two runs do no harm where it fails (a stopped process, a Redis that forgot) is the store's doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Mapping

from redis.asyncio import Redis
from redis.exceptions import RedisError

from router.batches.disk import Disk, Threads
from router.batches.files import BatchConfig, FileStore
from router.batches.records import COMPLETION_WINDOWS, BatchRequest, new_id
from router.batches.run import BatchRun, Endpoints, LeaseLost, RouterLeaving
from router.batches.store import BatchStore, Stored
from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.shared_clock import SharedClock
from twostep.errors import DataLoss, NotFound, SetupError, TwostepError, Unavailable
from twostep.metrics.batches import BatchMetrics, BatchState
from twostep.metrics.registry import MetricsRegistry

LEASE_S = 10.0
_PREFIX = "twostep:v1:batch:"
# Before others may take it, its holder knows that it has lapsed.
_MARGIN = 0.2

# KEYS[1]: the lease; ARGV: its holder, milliseconds.
_RENEW = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) else return 0 end"
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"


class BatchLease:
    """Says that one router runs a batch, for as long as it renews it. Never raises for what Redis does."""

    def __init__(self, redis: Redis, batch_id: str, router_id: str) -> None:
        self._redis, self._key, self._holder = redis, f"{_PREFIX}{batch_id}", f"{router_id}:{secrets.token_hex(8)}"
        self._until = 0.0

    def held(self) -> bool:
        return time.monotonic() < self._until

    async def take(self) -> bool:
        """Tries to take the lease. False: another router has it, or Redis cannot be asked."""
        asked = time.monotonic()
        try:
            taken = bool(await self._redis.set(self._key, self._holder, nx=True, px=int(LEASE_S * 1000)))
        except (RedisError, OSError):
            return False
        if taken:
            self._until = asked + LEASE_S * (1 - _MARGIN)
        return taken

    async def keep_renewing(self) -> None:
        """Renews the lease until it is cancelled."""
        while True:
            await asyncio.sleep(LEASE_S / 4)
            await self.renew()
            end_if_cancelled()

    async def renew(self) -> None:
        """Renews the lease once. A Redis that has lost the lease is asked for another."""
        asked = time.monotonic()
        try:
            async with asyncio.timeout(LEASE_S / 4):
                renewed = await self._redis.eval(_RENEW, 1, self._key, self._holder, str(int(LEASE_S * 1000)))
                if renewed:
                    self._until = asked + LEASE_S * (1 - _MARGIN)
                elif not (self.held() and await self.take()):
                    self._until = 0.0
        except (RedisError, OSError, TimeoutError):
            return  # until it lapses

    async def release(self) -> None:
        """Gives the lease back, so that others need not wait for its end."""
        self._until = 0.0
        try:
            await self._redis.eval(_RELEASE, 1, self._key, self._holder)
        except (RedisError, OSError):
            return  # it lapses


log = logging.getLogger(__name__)

# Batches of one router at once; what they ask at once is `concurrency` in all.
_MAX_RUNS = 16
_MAX_RUNS_OF_ONE = 4
_LOOK_S = 2.0
_SWEEP_S = 3600.0
# A batch whose run failed for the disk.
_AGAIN_S = 10.0
_DAMAGED_S = 60.0
DAY_S = 86_400.0


def choose(
    open_batches: Mapping[str, str], running: Mapping[str, str], *, most: int = _MAX_RUNS, most_of_one: int = _MAX_RUNS_OF_ONE
) -> list[str]:
    """Returns which batch to try next, of owners by batch: those of owners with the fewest under way here first, then the oldest. Pure."""
    of_owner, chosen = Counter(running.values()), list[str]()
    waiting = sorted(set(open_batches) - set(running))
    while waiting and len(running) + len(chosen) < most:
        best = min(waiting, key=lambda batch_id: (of_owner[open_batches[batch_id]], batch_id))
        if of_owner[open_batches[best]] >= most_of_one:
            break
        waiting.remove(best)
        chosen.append(best)
        of_owner[open_batches[best]] += 1
    return chosen


class Batches:
    """start(), then run() until cancelled, after drain()."""

    def __init__(
        self, config: BatchConfig, *, redis: Redis, router_id: str, metrics: MetricsRegistry, clock: SharedClock | None = None
    ) -> None:
        """Instants are those of `clock`."""
        clock = clock or SharedClock()
        self.config = config
        self._endpoints: Endpoints
        self._redis, self._router_id = redis, router_id
        self.threads = Threads()
        self._disk = Disk()
        self.files = FileStore(config, self._disk, wall=clock.unix)
        self.store = BatchStore(self._disk, self.files)
        self._clock, self._wall = clock, clock.unix
        self._gate, self._alone = asyncio.Semaphore(config.concurrency), asyncio.Lock()
        self._runs: dict[str, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._owners: dict[str, str] = {}
        self._not_before: dict[str, float] = {}
        self._look = asyncio.Event()
        self._draining = False
        self._num_open = 0
        self._metrics = BatchMetrics(metrics, self._state)

    @property
    def num_running(self) -> int:
        return len(self._runs)

    def answer_with(self, endpoints: Endpoints) -> None:
        """Sets what answers the requests. Call it before start()."""
        self._endpoints = endpoints

    async def start(self) -> None:
        """Raises SetupError for a directory that is not to be written in."""
        try:
            await self.threads.short(self.store.prepare)
        except Unavailable as error:
            raise SetupError(f"--batch-dir {self.config.root}: {error.message}") from error

    # ---- clients -----------------------------------------------------------------------------------------------------------------

    async def create(
        self,
        *,
        tenant: str,
        key_id: str,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        metadata: dict[str, str] | None,
        output_lives_s: int | None,
    ) -> Stored:
        """Raises NotFound, ResourceExhausted, Unavailable."""
        now = self._wall()
        asked = BatchRequest(
            id=new_id("batch_", now),
            tenant=tenant,
            key_id=key_id,
            served=self.config.served,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            created=int(now),
            expires=int(now) + COMPLETION_WINDOWS[completion_window],
            metadata=metadata,
            output_lives_s=output_lives_s,
        )
        stored = await self.threads.short(self.store.create, asked)
        self._look.set()
        return stored

    async def cancel(self, owner: str, batch_id: str) -> Stored:
        """Raises NotFound, Unavailable."""
        stored = await self.threads.short(self.store.cancel, owner, batch_id, int(self._wall()))
        self._look.set()
        return stored

    # ---- runs ------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Looks for batches until cancelled. Never raises for what disk and Redis do."""
        complained = False
        while True:
            try:
                await self._look_once()
                complained = False
            except TwostepError as error:
                if not complained:
                    log.warning("batches: %s", error.message)
                complained = True
            end_if_cancelled()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S * (0.75 + random.random() / 2)):
                    await self._look.wait()
            self._look.clear()

    async def _look_once(self) -> None:
        if self._draining:
            return
        found, now = await self.threads.short(self.store.open_batches), time.monotonic()
        self._num_open = len(found)
        self._not_before = {batch_id: then for batch_id, then in self._not_before.items() if batch_id in found}
        waiting = {batch_id: owner for batch_id, owner in found.items() if self._not_before.get(batch_id, 0.0) <= now}
        for batch_id in choose(waiting, self._owners):
            await self._try_to_run(batch_id, waiting[batch_id])
        if await self._may_sweep():
            await self.threads.long(lambda: self.store.sweep(self._surely()))

    async def _may_sweep(self) -> bool:
        """Returns whether this router is to clear up now; no other does it for so long."""
        try:
            return bool(await self._redis.set(f"{_PREFIX}sweep", self._router_id, nx=True, ex=int(_SWEEP_S)))
        except (RedisError, OSError):
            return False

    def _late(self) -> float:
        """Returns the time by which things end for good: Redis's clock and this host's both say so, as one of them may be set to
        anything."""
        return min(self._clock.unix(), time.time())

    def _surely(self) -> float:
        """Returns the earliest of those and the volume's, by which its files are dated. It blocks."""
        return min(self._late(), self._disk.now(self.config.root / "open"))

    async def _try_to_run(self, batch_id: str, owner: str) -> None:
        try:
            stored = await self.threads.short(self.store.get, owner, batch_id)
        except NotFound:
            await self.threads.short(lambda: self.store.forget_marker(batch_id, self._surely()))
            return
        except DataLoss as error:
            log.warning("batch %s: %s", batch_id, error.message)
            self._not_before[batch_id] = time.monotonic() + _DAMAGED_S
            return
        ends = stored.cancelled is not None or self._late() >= stored.asked.expires
        if stored.asked.served != self.config.served and not ends:
            return
        lease = BatchLease(self._redis, batch_id, self._router_id)
        if not await lease.take():
            return
        if self._draining:
            # Since this look began: another router need not wait until it lapses.
            await lease.release()
            return
        run = BatchRun(
            self.store,
            self.threads,
            stored.asked,
            endpoints=self._endpoints,
            held=lease.held,
            gate=self._gate,
            alone=self._alone,
            metrics=self._metrics,
            wall=self._wall,
            late=self._late,
        )
        self._owners[batch_id] = owner
        self._runs[batch_id] = run, asyncio.create_task(self._keep_running(batch_id, run, lease))

    async def _keep_running(self, batch_id: str, run: BatchRun, lease: BatchLease) -> None:
        renewing = asyncio.create_task(lease.keep_renewing())
        try:
            await run.run()
            log.info("batch %s is over", batch_id)
        except (LeaseLost, RouterLeaving):
            log.warning("batch %s is left to another router", batch_id)
        except TwostepError as error:
            log.warning("batch %s: %s; it is tried again in %.0f s", batch_id, error.message, _AGAIN_S)
            self._not_before[batch_id] = time.monotonic() + _AGAIN_S
        except Exception:
            log.exception("batch %s met a bug; it is tried again in %.0f s", batch_id, _AGAIN_S)
            self._not_before[batch_id] = time.monotonic() + _AGAIN_S
        finally:
            renewing.cancel()
            del self._runs[batch_id], self._owners[batch_id]
            await asyncio.wait((renewing,))
            await lease.release()
            self._look.set()

    def _state(self) -> BatchState:
        """Returns the figures of its metrics, from any thread."""
        states = Counter(run.status.value for run, _ in list(self._runs.values()))
        # Those that this router has begun with since it last looked are there, too.
        return BatchState(num_open=max(self._num_open, states.total()), running=states)

    async def drain(self, grace_s: float) -> None:
        """Begins no further requests; those under way have `grace_s`. Another router goes on at once."""
        self._draining = True
        tasks = [task for _, task in self._runs.values()]
        for run, _ in self._runs.values():
            run.leave()
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def close(self) -> None:
        await self.drain(0.0)
        self.threads.close()
