"""Connections to the workers: one channel for each life (worker id and epoch), and to each that decodes one stream of tokens.

A life that the registry no longer lists gets no new work. It is closed once nothing of this router is left on it, or at once if
another life has taken its name, or if it is silent as well: no heartbeat and no event for some seconds is a frozen process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

import grpc
import grpc.aio

from router.request.cleanup import Cleanup
from router.workers.decode_stream import DecodeStream
from router.workers.prefix_index import NO_HINTS, NOT_CACHED, CachedPrefix, WorkerLife
from router.workers.reservations import Reservations
from twostep.cluster.prediction import RECENT_S, Candidate, MeanLoad, Snapshot
from twostep.cluster.records import WorkerLoad, WorkerRecord
from twostep.errors import TwostepError, Unavailable
from twostep.request_class import RequestClass
from twostep.rpc.call_signing import CallSigner
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import decode_pb2_grpc, prefill_pb2_grpc
from twostep.settings.tls import PLAINTEXT, TlsFiles

log = logging.getLogger(__name__)

_SILENT_S = 3.0
# Some heartbeats: fewer are noise, more are history.
_TIME_CONSTANT_S = 3.0

OpenTo = Callable[[WorkerRecord], grpc.aio.Channel]


class LinkUser(Protocol):
    """An attempt that uses a link, and must know when it is lost."""

    def on_worker_lost(self, life: WorkerLife, error: TwostepError) -> None: ...


class WorkerLink:
    """One life of a worker: its channel, and what this router has there."""

    def __init__(self, record: WorkerRecord, open_to: OpenTo) -> None:
        self.record = record
        self.life = WorkerLife.of(record)
        self.channel = open_to(record)
        # Of use where it hands over.
        self.prefill = prefill_pb2_grpc.PrefillStub(self.channel)
        self.users: set[LinkUser] = set()
        self.meter = LoadMeter(time.monotonic())
        self.retired = False
        self._last_event = time.monotonic()

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens sent there whose first token has not come yet."""
        return self.meter.queued_tokens

    def queue(self, num_tokens: int, request_class: RequestClass) -> None:
        """Counts so many more prompt tokens as queued there; below 0: fewer."""
        self.meter.queue(num_tokens, time.monotonic(), batch=request_class is RequestClass.BATCH)

    @property
    def num_decoding(self) -> int:
        """Returns how many sequences of this router decode there, or are to."""
        return 0

    def touch(self) -> None:
        """Notes that something was heard from the worker."""
        self._last_event = time.monotonic()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._last_event

    def lose(self, error: TwostepError) -> None:
        """Notifies all attempts that have something there."""
        for user in list(self.users):
            user.on_worker_lost(self.life, error)

    async def close(self) -> None:
        self.lose(Unavailable(f"{self.record.role} worker {self.record.worker_id} is gone"))
        await self.channel.close()


class DecodeLink(WorkerLink):
    """To a worker that decodes, whatever else it does."""

    def __init__(
        self,
        record: WorkerRecord,
        open_to: OpenTo,
        *,
        router_id: str,
        cleanup: Cleanup,
        stream_lease_s: float,
    ) -> None:
        super().__init__(record, open_to)
        self.full_at = -math.inf  # when it last refused a reservation for want of room
        self.decode = decode_pb2_grpc.DecodeStub(self.channel)
        self.reservations = Reservations(self.decode)
        self.stream = DecodeStream(
            self.decode,
            router_id=router_id,
            worker_id=record.worker_id,
            lease_s=stream_lease_s,
            cleanup=cleanup,
            on_open=self.reservations.begin,
            on_message=self.touch,
            on_lost=self.lose,
        )

    @property
    def num_decoding(self) -> int:
        return self.stream.num_attempts

    async def close(self) -> None:
        await self.stream.close()
        await self.reservations.close()
        await super().close()


class WorkerPool:
    """Holds all links: `prefill` has those to workers that hand over, `decode` those to workers that decode. A worker that does both has
    one link, in both."""

    def __init__(
        self,
        *,
        router_id: str,
        cleanup: Cleanup,
        signer: CallSigner,
        tls: TlsFiles = PLAINTEXT,
        stream_lease_s: float = 5.0,
        compression: grpc.Compression = grpc.Compression.NoCompression,
    ) -> None:
        """`stream_lease_s`: a broken token stream that is open again within it costs no attempt."""
        self._router_id = router_id
        self._stream_lease_s = stream_lease_s
        self._cleanup = cleanup
        self._signer = signer
        self._tls = tls
        self._compression = compression
        self.prefill: dict[WorkerLife, WorkerLink] = {}
        self.decode: dict[WorkerLife, DecodeLink] = {}

    def channel_of(self, life: WorkerLife) -> grpc.aio.Channel | None:
        """Returns the channel to a worker; None: there is no link to it."""
        link = self._links.get(life)
        return None if link is None else link.channel

    @property
    def _links(self) -> Mapping[WorkerLife, WorkerLink]:
        return {**self.prefill, **self.decode}

    def records(self) -> Sequence[WorkerRecord]:
        """Returns the records of workers that may get new work, ready or not."""
        return [link.record for link in self._links.values() if not link.retired]

    def behind(self, num_steps: int) -> set[WorkerLife]:
        """Returns the workers on which this router's prompts queue for so many of their steps, or more."""
        return {life for life, link in self._links.items() if link.queued_tokens >= num_steps * link.record.step_tokens}

    def snapshot(
        self,
        cached: Mapping[WorkerLife, CachedPrefix] = NO_HINTS,
        *,
        excluded: Set[WorkerLife] = frozenset(),
        no_prompts: Set[WorkerLife] = frozenset(),
    ) -> Snapshot:
        """`no_prompts`: workers that compute no prompt for this request; they may decode it."""
        now = time.monotonic()
        found = {
            life: _candidate(link, cached, now, excluded=life in excluded, no_prompts=life in no_prompts)
            for life, link in self._links.items()
            if not link.retired
        }
        return Snapshot(
            prefill=[candidate for life, candidate in found.items() if life in self.prefill],
            decode=[candidate for life, candidate in found.items() if life in self.decode],
        )

    def sync(self, workers: Sequence[WorkerRecord]) -> None:
        """Makes the links match the registry; called after every poll."""
        listed = {WorkerLife.of(record): record for record in workers}
        newest = {record.worker_id: record.epoch for record in workers}
        links = self._links
        for life, record in listed.items():
            link = links.get(life)
            if link is None:
                self._add(life, record)
            elif _identity(link.record) == _identity(record):
                link.record, link.retired = record, False
            else:
                log.warning("worker %s changed its address or role without a new epoch; it is not used until it has one", record.worker_id)
                link.retired = True
        for life in links.keys() - listed.keys():
            gone = links[life]
            gone.retired = True
            replaced = newest.get(life.worker_id, life.epoch) != life.epoch
            if replaced or not gone.users or gone.silent_s > _SILENT_S:
                self.prefill.pop(life, None)
                self.decode.pop(life, None)
                self._cleanup.spawn(gone.close())
        for link in self._links.values():
            link.meter.observe(link.record.load, link.num_decoding, time.monotonic())

    def _add(self, life: WorkerLife, record: WorkerRecord) -> None:
        if not record.takes_over:
            self.prefill[life] = WorkerLink(record, self.open_to)
            return
        self.decode[life] = link = DecodeLink(
            record, self.open_to, router_id=self._router_id, cleanup=self._cleanup, stream_lease_s=self._stream_lease_s
        )
        if record.hands_over:
            self.prefill[life] = link

    def open_to(self, record: WorkerRecord) -> grpc.aio.Channel:
        """Returns a channel of the caller's own, whose calls are meant for that life alone."""
        signature = self._signer.sign(record.worker_id, record.epoch)
        return open_channel(record.address, tls=self._tls, compression=self._compression, signature=signature)

    async def close(self) -> None:
        links, self.prefill, self.decode = self._links, {}, {}
        await asyncio.gather(*(link.close() for link in links.values()))


def _identity(record: WorkerRecord) -> tuple[str, str, bool]:
    """Returns what one life keeps."""
    return record.address, record.role, record.both_roles


def _candidate(link: WorkerLink, cached: Mapping[WorkerLife, CachedPrefix], now: float, *, excluded: bool, no_prompts: bool) -> Candidate:
    held = cached.get(link.life, NOT_CACHED)
    return Candidate(
        record=link.record,
        cached_tokens=held.num_tokens,
        host_cached_tokens=held.host_tokens,
        queued_tokens=link.queued_tokens,
        batch_tokens=link.meter.batch_tokens,
        recent_tokens=link.meter.recent_tokens(now),
        num_attempts=link.num_decoding,
        excluded=excluded,
        no_prompts=no_prompts,
        mean=link.meter.mean,
    )


class LoadMeter:
    """Means over the last seconds of what is on one worker: all routers' load, from its heartbeats, and this router's own part. Instants
    are seconds of one clock that does not go back.

    A heartbeat says how it was a second ago, in which a queue of prompts on a GPU comes and goes ten times. Compared moment by moment, the
    router's own queue then and now would look like another router's. Their means over some heartbeats can be compared whatever the delay.
    """

    def __init__(self, now: float) -> None:
        # Prompt tokens of this router's that are there and not yet computed, and those of batch requests among them.
        self.queued_tokens = self.batch_tokens = 0
        self._token_seconds = 0.0  # of the own queue, since it was observed last
        self._changed = self._observed = now
        self.mean: MeanLoad | None = None  # before the first observation
        self._recent_tokens = 0.0

    def queue(self, num_tokens: int, now: float, *, batch: bool = False) -> None:
        """Counts so many more prompt tokens as queued there; below 0: fewer."""
        self._token_seconds += self.queued_tokens * (now - self._changed)
        self._recent_tokens = self.recent_tokens(now) + (0 if batch else max(0, num_tokens))
        self._changed = now
        self.queued_tokens += num_tokens
        if batch:
            self.batch_tokens += num_tokens

    def recent_tokens(self, now: float) -> float:
        """Returns the prompt tokens that were sent there lately, batch requests' aside; what was sent RECENT_S ago counts a third."""
        return self._recent_tokens * math.exp((self._changed - now) / RECENT_S)

    def observe(self, load: WorkerLoad, num_attempts: int, now: float) -> None:
        """Updates the means, whenever records are read: `load` has held since the last time, for all that is known."""
        elapsed = now - self._observed
        self.queue(0, now)
        own = self._token_seconds / elapsed if elapsed > 0 else float(self.queued_tokens)
        self._token_seconds, self._observed = 0.0, now
        seqs = load.num_seqs
        if self.mean is None:
            self.mean = MeanLoad(
                queued_tokens=load.num_queued_tokens,
                batch_tokens=load.num_queued_batch_tokens,
                own_queued_tokens=own,
                num_seqs=seqs,
                own_num_seqs=min(seqs, num_attempts),
            )
            return
        weight, before = -math.expm1(-elapsed / _TIME_CONSTANT_S), self.mean
        self.mean = MeanLoad(
            queued_tokens=_blend(before.queued_tokens, load.num_queued_tokens, weight),
            batch_tokens=_blend(before.batch_tokens, load.num_queued_batch_tokens, weight),
            own_queued_tokens=_blend(before.own_queued_tokens, own, weight),
            num_seqs=_blend(before.num_seqs, seqs, weight),
            own_num_seqs=_blend(before.own_num_seqs, num_attempts, weight),
        )


def _blend(before: float, now: float, weight: float) -> float:
    return before + weight * (now - before)
