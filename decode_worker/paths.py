"""Finds out which transports work from which prefill worker, by copying some of its memory in the background before a request needs it.

learned of        in Redis (Discovery), or at the first ticket of it
tried             each transport, again after a while as long as it does not work, or once a fetch found that it does no more
offered           those whose copy came through, best first. Until the first try is over also those that copy out through the host:
                  no request waits for a probe while there is any other way
too slow          a path between GPUs below its floor has fallen back to TCP or to host memory without saying so: that is an error
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

import grpc.aio
from redis.exceptions import RedisError

from decode_worker.peers import Peers, Source
from kv_transfer.telemetry import ProbeResult, TransferTelemetry
from kv_transfer.ticket import ProbePass
from kv_transfer.transport import TransportEnd
from kv_transfer.transports import TransportTable
from twostep import __version__
from twostep.cluster.connection import connect
from twostep.cluster.look import look
from twostep.cluster.records import HEARTBEAT_S, WorkerRecord
from twostep.cluster.signed import RECORDS, Signer
from twostep.errors import InvalidRequest, ResourceExhausted, TwostepError, Unauthenticated, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.channel import error_from_rpc
from twostep.rpc.v1 import kv_pb2_grpc
from twostep.version_skew import together

log = logging.getLogger(__name__)

# Bytes a second. Any path between two GPUs does ten times better; TCP and detours through the host do not reach it.
_FLOORS = {"cuda_ipc": 5e9, "nixl": 5e9}

_ASK_S = 5.0
# One that did not answer the last time.
_ASK_AGAIN_S = 2.0
_PROBE_S = 20.0
# How long a request waits for a probe where nothing is known to work.
_WAIT_S = 2.0
_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 30.0
# A source that cannot even be asked so often in a row is forgotten; its next ticket brings it back.
_MAX_UNANSWERED = 12
_MAX_SOURCES = 1024
# Asking costs nothing, and a frozen source holds its place for as long as asking may take: many. Copies share one link, whose rate they
# are to find, and the host memory that some pass through: few, of each transport.
_ASKING_AT_ONCE = 64
_COPYING_AT_ONCE = 3
_LOOK_EVERY_S = 2 * HEARTBEAT_S
# Records that were not there for so many looks in a row are of workers that are gone: one look may fall between two beats.
_MAX_MISSED = 3


@dataclass(slots=True, eq=False)
class _Known:
    source: Source
    results: dict[str, ProbeResult] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    # Set to look again at once.
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    # Replaced after every round.
    tried: asyncio.Event = field(default_factory=asyncio.Event)

    def usable(self, name: str) -> bool:
        return name in self.results and self.results[name].usable


class Paths:
    """Belongs to one event loop."""

    def __init__(
        self,
        transports: TransportTable[TransportEnd],
        peers: Peers,
        secret: DeploymentSecret,
        telemetry: TransferTelemetry,
    ) -> None:
        self._transports = transports
        self._peers = peers
        self._secret = secret
        self._telemetry = telemetry
        self._known: OrderedDict[tuple[str, int], _Known] = OrderedDict()
        self._asking = asyncio.Semaphore(_ASKING_AT_ONCE)
        self._copying = defaultdict[str, asyncio.Semaphore](partial(asyncio.Semaphore, _COPYING_AT_ONCE))
        self._said_full = False
        self._closed = False

    @property
    def results(self) -> list[ProbeResult]:
        return [result for known in self._known.values() for result in known.results.values()]

    async def close(self) -> None:
        self._closed = True
        await self.forget(list(self._known))

    def learn(self, source: Source) -> None:
        """Notes that there is such a worker: its paths are tried if they were not. One too many waits for its first ticket: it takes the
        place of no other, or each look at all of them would forget some and try them again."""
        if len(self._known) < _MAX_SOURCES or (source.worker_id, source.epoch) in self._known:
            self._find(source)
        elif not self._said_full:
            self._said_full = True
            log.warning("more than %d prefill workers: paths from the others are tried at their first tickets", _MAX_SOURCES)

    async def forget(self, keys: Collection[tuple[str, int]]) -> None:
        """Forgets these (worker id, epoch): they are gone."""
        for key in keys:
            known = self._known.pop(key, None)
            if known is not None and known.task is not None:
                known.task.cancel()
                await asyncio.wait([known.task])

    async def offered(self, source: Source, *, host_only: bool = False) -> tuple[str, ...]:
        """Returns what may be used from there now, best first. Waits a little where nothing is known to work. Raises Unavailable, and
        ResourceExhausted where no transport is ready on this side.

        `host_only`: only what passes through this worker's host memory.
        """
        known = self._find(source)
        names = self._usable(known, host_only)
        if not names:
            known.hurry.set()
            try:
                async with asyncio.timeout(_WAIT_S):
                    while not (names := self._usable(known, host_only)):
                        await known.tried.wait()
            except TimeoutError:
                # Routers take Unavailable for the source's fault.
                kind = Unavailable if self._transports.ready else ResourceExhausted
                raise kind(f"no KV transport works from {source.worker_id}: {self._why(known)}; another pair may do") from None
        return names

    def failed(self, source: Source, transport: str, error: TwostepError) -> None:
        """Notes that a fetch found that a path does not work any more: it is offered again once a probe has come through."""
        known = self._known.get((source.worker_id, source.epoch))
        if known is not None:
            self._store(known, transport, error=error.message)
            self._begin(known)

    # ---- what is known ----------------------------------------------------------------------------------------------------

    def _find(self, source: Source) -> _Known:
        key = source.worker_id, source.epoch
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(source)
            while len(self._known) > _MAX_SOURCES:
                _, oldest = self._known.popitem(last=False)
                if oldest.task is not None:
                    oldest.task.cancel()
            self._begin(known)
        self._known.move_to_end(key)
        return known

    def _usable(self, known: _Known, host_only: bool) -> tuple[str, ...]:
        return tuple(
            transport.name
            for transport in self._transports.ready
            if (transport.copies_out or not host_only)
            and (known.usable(transport.name) or (transport.copies_out and transport.name not in known.results))
        )

    def _why(self, known: _Known) -> str:
        reasons = {name: result.error for name, result in known.results.items() if not result.usable}
        not_ready = {transport.name: "not ready here" for transport in self._transports if not transport.ready}
        return "; ".join(f"{name}: {why}" for name, why in (reasons | not_ready).items()) or "not tried yet"

    def _store(self, known: _Known, transport: str, *, bytes_per_s: float = 0.0, error: str = "") -> None:
        source, before = known.source, known.results.get(transport)
        result = ProbeResult(
            worker_id=source.worker_id, epoch=source.epoch, transport=transport, bytes_per_s=bytes_per_s, error=error[:300]
        )
        known.results[transport] = result
        self._telemetry.probe(result)
        if result.usable:
            log.info("KV from %s by %s: %.2f GB/s", source.worker_id, transport, bytes_per_s / 1e9)
        elif before is None or before.error != result.error:
            log.debug("no KV from %s by %s: %s", source.worker_id, transport, error)

    # ---- probing ------------------------------------------------------------------------------------------------------------

    def _begin(self, known: _Known) -> None:
        if not self._closed and (known.task is None or known.task.done()):
            known.task = asyncio.create_task(self._probe_until_all_work(known), name=f"probe {known.source.worker_id}")
            known.task.add_done_callback(_say_failure)

    async def _probe_until_all_work(self, known: _Known) -> None:
        backoff_s, unanswered = _FIRST_BACKOFF_S, 0
        while True:
            known.hurry.clear()
            missing = [transport for transport in self._transports if not known.usable(transport.name)]
            if not missing:
                return
            answered = await self._try(known, missing, ask_s=_ASK_AGAIN_S if unanswered else _ASK_S)
            unanswered = 0 if answered else unanswered + 1
            tried, known.tried = known.tried, asyncio.Event()
            tried.set()
            if unanswered >= _MAX_UNANSWERED:
                self._known.pop((known.source.worker_id, known.source.epoch), None)
                return
            if all(known.usable(transport.name) for transport in missing):
                continue
            try:
                # Many in a hurry are no reason to ask without a pause.
                await asyncio.sleep(_FIRST_BACKOFF_S)
                async with asyncio.timeout(backoff_s):
                    await known.hurry.wait()
            except TimeoutError:
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _try(self, known: _Known, transports: Collection[TransportEnd], *, ask_s: float) -> bool:
        """Probes a source's paths. Returns False where the source did not answer at all."""
        source = known.source
        try:
            async with self._asking, self._peers.channel(source) as channel:
                # A pass is good for a minute, so it is made when it is used.
                request = ProbePass.issue(self._secret, worker_id=source.worker_id, epoch=source.epoch)
                stub: kv_pb2_grpc.KvAsyncStub = kv_pb2_grpc.KvStub(channel)
                response = await stub.Probe(request.to_proto(), timeout=ask_s)
        except grpc.aio.AioRpcError as error:
            for transport in transports:
                self._store(known, transport.name, error=f"the prefill worker could not be asked: {error_from_rpc(error).message}")
            return False
        endpoints = {path.transport: path.endpoint for path in response.paths}
        for transport in transports:
            if not transport.ready:
                self._store(known, transport.name, error="not ready on the decode worker")
            elif transport.name not in endpoints:
                self._store(known, transport.name, error="not ready on the prefill worker")
            else:
                async with self._copying[transport.name]:
                    await self._copy(known, transport, endpoints[transport.name])
        return True

    async def _copy(self, known: _Known, transport: TransportEnd, endpoint: str) -> None:
        try:
            async with asyncio.timeout(_PROBE_S):
                probe = await transport.probe(endpoint, deadline=time.monotonic() + _PROBE_S)
        except ResourceExhausted as error:
            # Other transfers were in its way, here or there, which says nothing of the path: it is tried again, and what is known stands.
            log.debug("no room to probe %s from %s: %s", transport.name, known.source.worker_id, error.message)
        except TwostepError as error:
            self._store(known, transport.name, error=error.message)
        except TimeoutError:
            self._store(known, transport.name, error=f"a probe did not end in {_PROBE_S:g} s")
        except Exception as error:
            # No memory left on the GPU, say. It costs this try, not the tries of other transports, nor all later ones.
            log.exception("probing %s from %s failed unexpectedly", transport.name, known.source.worker_id)
            self._store(known, transport.name, error=f"the probe failed: {error!r}; see the decode worker's log")
        else:
            floor = _FLOORS.get(transport.name, 0.0)
            if probe.bytes_per_s >= floor:
                self._store(known, transport.name, bytes_per_s=probe.bytes_per_s)
                return
            slow = f"{probe.bytes_per_s / 1e9:.2f} GB/s, where {floor / 1e9:g} is the least that a path between GPUs does: it is none"
            if known.results.get(transport.name) is None:
                log.warning("KV from %s by %s is not offered: %s", known.source.worker_id, transport.name, slow)
            self._store(known, transport.name, error=slow)


def _say_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("probing failed unexpectedly", exc_info=error)


class Discovery:
    """Looks up the workers that hand over in Redis, so that the paths from them are tried before their first ticket comes. start(), then
    it looks by itself until close(). Without Redis only tickets say which workers there are."""

    def __init__(self, redis_url: str, paths: Paths, *, secret: DeploymentSecret, own_id: str) -> None:
        """`own_id`: of the worker that looks, which takes nothing from itself."""
        self._redis = connect(redis_url)
        self._paths = paths
        self._signer = Signer(secret, RECORDS)
        self._own_id = own_id
        self._missed: dict[tuple[str, int], int] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_forever(), name="discovery")

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self._redis.aclose()

    async def _look_forever(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        # The Redis client can take a cancellation for a lost connection: then it is up to us to remember it.
        while not task.cancelling():
            try:
                await self._look()
            except (RedisError, OSError) as error:
                log.debug("prefill workers could not be looked up: %s", error)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self) -> None:
        texts = (await look(self._redis, [worker_id for worker_id, _ in self._missed])).records.values()
        found = {(r.worker_id, r.epoch): r for text in texts if (r := self._read(text)) is not None}
        # Workers of versions further away are no sources: they would refuse to be asked.
        sources = {k: r for k, r in found.items() if r.hands_over and r.address and r.worker_id != self._own_id}
        ours = {k: r for k, r in sources.items() if together(__version__, r.version)}
        for record in ours.values():
            self._paths.learn(Source(worker_id=record.worker_id, epoch=record.epoch, address=record.address))
        self._missed = {key: count + 1 for key, count in self._missed.items()} | dict.fromkeys(ours, 0)
        gone = [key for key, count in self._missed.items() if count >= _MAX_MISSED]
        for key in gone:
            del self._missed[key]
        await self._paths.forget(gone)

    def _read(self, text: bytes) -> WorkerRecord | None:
        """Returns the worker of a record; None: of another deployment or version, or forged."""
        try:
            return WorkerRecord.from_json(self._signer.read_object(text))
        except (Unauthenticated, InvalidRequest):
            return None
