"""Pulls one hand-over's KV from its prefill worker, verifies it and gives it to the engine. kv_transfer.reader decides; this executes.

watch  ──ManifestCame, ChunkAnnounced, CompleteCame, SourceLost──▶┐
fetches (tasks) ──FetchEnded─────────────────────────────────────▶├─ queue ─▶ advance ─▶ actions
ask (a task) ──SourceAnswered, AskFailed─────────────────────────▶┘
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from decode_worker.paths import Paths
from decode_worker.peers import Peers, Source
from kv_transfer import reader as rd
from kv_transfer.conversion import BlockTarget, ConversionPlan
from kv_transfer.lease import Tick
from kv_transfer.telemetry import CopyClock, Direction, TransferRecord, TransferTelemetry, reason_of
from kv_transfer.ticket import Ticket, fingerprint, layout_from_proto
from kv_transfer.transport import ChunkInfo, TransportEnd
from kv_transfer.transports import TransportTable
from kv_transfer.wire_encoding import RAW
from twostep.errors import Cancelled, Incompatible, InternalError, ResourceExhausted, TwostepError, Unavailable
from twostep.process.tracing import Metadata
from twostep.rpc.channel import error_from_rpc
from twostep.rpc.v1 import kv_pb2, kv_pb2_grpc
from twostep.worker.edge import EdgeParts

log = logging.getLogger(__name__)

_ACKNOWLEDGE_S = 2.0
_ASK_AGAIN_S = 0.2
# How often the source is told of the end, if it does not answer. Its lease expires by itself in the end.
_MAX_TOLD = 3
_CHUNK_S = 30.0
# Costs only time, so a source need not be asked first.
_ALWAYS_TAKEN = "zstd"


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledKv:
    """A whole, verified KV cache, and the tokens that were sampled after it.

    ahead     the engine has begun with it already, and its source has now confirmed it
    publish_s seconds from the first token to the last chunk published, as the source says
    fetch_s   seconds from CompleteCame to the last block in place, and the source's answer where it was asked. What was pulled before,
              while the prompt was still being computed, delayed nothing
    exact     False: numbers were rounded on the way, or are of another format than the pool's; prefixes of it must not be shared
    """

    output_ids: Sequence[int]
    transport: str
    num_bytes: int
    num_chunks: int
    num_blocks: int
    publish_s: float
    fetch_s: float
    ahead: bool
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PullHooks:
    """Connects a pull with the sequence whose KV it is. None of them waits; what `ahead` and `commit` raise ends the pull.

    ahead    the engine may begin with the blocks, given the output ids, and its tokens are withheld
    commit   the blocks are the engine's now
    free     nothing writes into the blocks any more, and nothing came of them
    """

    ahead: Callable[[Sequence[int]], None]
    commit: Callable[[PulledKv], None]
    free: Callable[[], object]


class Puller:
    """Has what all pulls of a worker share. Belongs to one event loop. `wires`: forms of KV taken besides raw, best first
    (kv_transfer.wire_encoding); lossy ones only where the configuration says so."""

    def __init__(
        self, parts: EdgeParts, transports: TransportTable[TransportEnd], peers: Peers, paths: Paths, telemetry: TransferTelemetry
    ) -> None:
        """Raises SetupError."""
        self.transports = transports
        self.pool = transports.pool(parts)
        self.layout = parts.engine.facts.layout
        self.fingerprint = fingerprint(self.layout)
        self.peers = peers
        self.paths = paths
        self.telemetry = telemetry
        self.wires = tuple(dict.fromkeys(wire for wire in (parts.config.kv_wire, _ALWAYS_TAKEN) if wire != RAW))
        self._telling: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Returns once every source has heard how its hand-over ended, or could not be reached."""
        while self._telling:
            await asyncio.wait(self._telling)

    def tell_source(self, ticket: Ticket, *, committed: bool, reason: str) -> None:
        """Tells the prefill worker how it ended, in the background. If that fails, the lease expires there by itself."""
        outcome = kv_pb2.AcknowledgeRequest.OUTCOME_COMMITTED if committed else kv_pb2.AcknowledgeRequest.OUTCOME_ABORTED
        request = kv_pb2.AcknowledgeRequest(ticket=ticket.to_proto(), outcome=outcome, reason=reason[:200])
        task = asyncio.create_task(self._tell_source(ticket, request))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def acknowledge(self, ticket: Ticket, request: kv_pb2.AcknowledgeRequest, metadata: Metadata = ()) -> kv_pb2.AcknowledgeResponse:
        """Raises AioRpcError."""
        async with self.peers.channel(_source_of(ticket)) as channel:
            stub: kv_pb2_grpc.KvAsyncStub = kv_pb2_grpc.KvStub(channel)
            return await stub.Acknowledge(request, timeout=_ACKNOWLEDGE_S, metadata=metadata)

    async def _tell_source(self, ticket: Ticket, request: kv_pb2.AcknowledgeRequest) -> None:
        for attempt in range(_MAX_TOLD):
            try:
                await self.acknowledge(ticket, request)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    log.warning("%s does not take an acknowledgement: %s", ticket.worker_id, error.details())
                    return
                log.debug("acknowledgement %d of %s: %s", attempt, ticket.lease_id, error.details())
            await asyncio.sleep(_ASK_AGAIN_S * (attempt + 1))


class Pull:
    """One hand-over. Call run() once; it ends with `hooks.commit` or with `hooks.free`."""

    def __init__(self, puller: Puller, ticket: Ticket, target: BlockTarget, hooks: PullHooks, *, metadata: Metadata = ()) -> None:
        """`metadata` goes along with what the source is asked: its trace context."""
        self._puller = puller
        self._ticket = ticket
        self._target = target
        self._hooks = hooks
        self._metadata = metadata
        life_s = ticket.expires_unix_ms / 1000 - time.time()
        self._reader = rd.Reader(reader_id=secrets.randbits(63), deadline=time.monotonic() + life_s)
        self._source = _source_of(ticket)
        self._transport: TransportEnd | None = None
        self._conversion: ConversionPlan | None = None
        self._endpoint = ""
        self._events: asyncio.Queue[rd.Event] = asyncio.Queue()
        self._fetches: dict[int, asyncio.Task[TwostepError | None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._announced_at: dict[int, float] = {}
        self._started_at = time.monotonic()
        self._transferred = False
        self._publish_s = 0.0
        self._queue_s = 0.0
        self._copying = CopyClock()
        self._scatter_s = 0.0

    async def run(self) -> None:
        """Returns when the engine has the blocks. Raises Incompatible, InvalidRequest (never worth repeating), Cancelled (given up) and
        Unavailable, DataLoss, ... (another attempt may succeed), and then nothing writes into the blocks any more."""
        async with self._puller.peers.channel(self._source) as channel:
            stub: kv_pb2_grpc.KvAsyncStub = kv_pb2_grpc.KvStub(channel)
            self._spawn(self._watch(stub))
            try:
                while not self._reader.finished:
                    self._apply(await self._next_event())
            finally:
                left = (*self._others, *self._fetches.values())
                for task in left:
                    task.cancel()
                await _all_ended(left)
                if self._conversion is not None:
                    self._puller.pool.end(self._conversion)
        error = self._reader.error
        if error is not None:
            if not self._transferred:
                self._report(time.monotonic(), reason_of(error))
            raise error

    @property
    def freed(self) -> bool:
        """Returns whether `hooks.free` was called."""
        return self._reader.targets_freed

    def give_up(self, reason: str) -> None:
        """Gives up, since the sequence has ended: nothing is committed from now on. run() ends when no fetch writes any more."""
        self._apply(rd.GivenUp(Cancelled(reason)))
        # run() looks again.
        self._events.put_nowait(Tick())

    async def _next_event(self) -> rd.Event:
        try:
            async with asyncio.timeout(max(0.0, self._reader.deadline - time.monotonic())):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    def _apply(self, event: rd.Event) -> None:
        before = self._reader.num_again
        step = rd.advance(self._reader, event, time.monotonic())
        self._reader = step.reader
        if self._reader.num_again > before:
            assert self._transport is not None
            log.warning("fetching a chunk of %s again: its bytes did not match", self._ticket.lease_id)
            self._puller.telemetry.retry(self._transport.name, "data_loss")
        for action in step.actions:
            self._execute(action)

    def _execute(self, action: rd.Action) -> None:
        match action:
            case rd.StartFetch(chunk):
                self._start_fetch(chunk)
            case rd.CancelFetches():
                for task in self._fetches.values():
                    task.cancel()
            case rd.RenewLease():
                self._spawn(self._renew())
            case rd.AskSource():
                self._spawn(self._ask(action))
            case rd.DecodeAhead(output_ids):
                if (error := self._failure(lambda: self._hooks.ahead(output_ids))) is not None:
                    self._apply(rd.GivenUp(error))
            case rd.CommitToEngine(output_ids):
                kv = self._pulled(output_ids)
                self._apply(rd.EngineAnswered(self._failure(lambda: self._hooks.commit(kv))))
            case rd.TellSource(committed, reason):
                self._puller.tell_source(self._ticket, committed=committed, reason=reason)
            case rd.FreeTargets():
                self._hooks.free()

    def _failure(self, hook: Callable[[], None]) -> TwostepError | None:
        """Calls it; why it failed, or None."""
        try:
            hook()
        except TwostepError as error:
            return error
        except Exception as error:
            log.exception("the hand-over %s failed unexpectedly", self._ticket.lease_id)
            return _unexpected(error)
        return None

    # ---- tasks that bring events ---------------------------------------------------------------------------------------------

    async def _watch(self, stub: kv_pb2_grpc.KvAsyncStub) -> None:
        try:
            self._events.put_nowait(rd.SourceLost(await self._watch_to_the_end(stub)))
        except TwostepError as error:
            self._events.put_nowait(rd.GivenUp(error))
        except Exception as error:
            # Or the hand-over would go on until its ticket expires.
            log.exception("watching %s failed unexpectedly", self._ticket.lease_id)
            self._events.put_nowait(rd.GivenUp(_unexpected(error)))

    async def _watch_to_the_end(self, stub: kv_pb2_grpc.KvAsyncStub) -> TwostepError:
        """Returns why no more events come from the source. Raises what makes this side end the pull."""
        puller = self._puller
        offered = await puller.paths.offered(self._source, host_only=self._ticket.layout != puller.fingerprint)
        request = kv_pb2.WatchRequest(
            ticket=self._ticket.to_proto(),
            transports=offered,
            wire=puller.wires,
            num_cached_tokens=self._target.num_cached_tokens,
        )
        call = stub.Watch(request, timeout=max(0.001, self._reader.deadline - time.monotonic()), metadata=self._metadata)
        try:
            async for event in call:
                match event.WhichOneof("event"):
                    case "manifest":
                        self._events.put_nowait(self._manifest(event.manifest, offered))
                    case "chunk":
                        self._announced_at[event.chunk.index] = time.monotonic()
                        self._events.put_nowait(rd.ChunkAnnounced(_info(event.chunk, puller.layout.num_layers)))
                    case "complete":
                        complete = event.complete
                        self._publish_s = complete.publish_s
                        self._events.put_nowait(rd.CompleteCame(complete.num_chunks, tuple(complete.output_ids)))
            return Unavailable("the prefill worker ended the hand-over before it was complete; prefill again")
        except grpc.aio.AioRpcError as failure:
            return error_from_rpc(failure)
        finally:
            call.cancel()

    def _manifest(self, manifest: kv_pb2.Manifest, offered: Sequence[str]) -> rd.ManifestCame:
        """Raises Incompatible and Unavailable."""
        ours, theirs = self._puller.layout, layout_from_proto(manifest.layout)
        transport = self._puller.transports.get(manifest.transport)
        if transport is None or manifest.transport not in offered:
            raise Incompatible(
                f"KV is published by {manifest.transport!r}, but this worker asked for {', '.join(offered)}; align --kv-transfer"
            )
        if not transport.ready:
            raise _own_side_away(transport)
        if manifest.checksum != transport.checksum_name:
            raise Incompatible(
                f"{manifest.transport} chunks carry {manifest.checksum!r} checksums, this worker verifies {transport.checksum_name!r}; "
                "run one version, and devices of one kind"
            )
        wire = manifest.wire or RAW
        if wire not in (RAW, *self._puller.wires):
            raise Incompatible(f"chunks are encoded as {wire!r}, which this worker did not ask for; run one version")
        self._transport, self._endpoint = transport, manifest.endpoint
        cached, stop = self._target.num_cached_blocks, self._target.num_blocks
        if theirs != ours or wire != RAW:
            plan = ConversionPlan(number=self._reader.reader_id, source=theirs, ours=ours, target=self._target, wire=wire)
            plan.check(transport)
            self._conversion = plan
            cached, stop = plan.source_span
        return rd.ManifestCame(
            published=rd.BlockSpan(manifest.first_block, manifest.num_blocks),
            wanted=rd.BlockSpan(cached, stop - cached),
            num_layers=ours.num_layers,
            one_sided=not transport.copies_out,
        )

    def _start_fetch(self, chunk: ChunkInfo) -> None:
        task = asyncio.create_task(self._fetch(chunk), name=f"fetch {self._ticket.lease_id} {chunk.index}")

        def ended(done: asyncio.Task[TwostepError | None]) -> None:
            # Not by the task itself, which may be cancelled before it begins.
            del self._fetches[chunk.index]
            error = Cancelled("the fetch was cancelled") if done.cancelled() else done.result()
            self._events.put_nowait(rd.FetchEnded(chunk.index, error))

        self._fetches[chunk.index] = task
        task.add_done_callback(ended)

    async def _fetch(self, chunk: ChunkInfo) -> TwostepError | None:
        """Fetches one chunk; returns why it failed, or None."""
        assert self._transport is not None
        transport, pool, start = self._transport, self._puller.pool, time.monotonic()
        self._queue_s += start - self._announced_at.get(chunk.index, start)
        try:
            with self._copying.running():
                deadline = start + _CHUNK_S
                if self._conversion is not None:
                    scatter_s = await pool.convert(
                        transport.name, self._endpoint, self._ticket.lease_id, chunk, self._conversion, deadline=deadline
                    )
                else:
                    block_ids = self._target.block_ids[chunk.first_block : chunk.first_block + chunk.num_blocks]
                    scatter_s = await pool.fetch(transport.name, self._endpoint, self._ticket.lease_id, chunk, block_ids, deadline=deadline)
                self._scatter_s += scatter_s
        except TwostepError as error:
            if not isinstance(error, Unavailable):
                return error
            if not transport.ready:
                return _own_side_away(transport)
            self._puller.paths.failed(self._source, transport.name, error)
            return error
        except Exception as error:
            log.exception("fetching a chunk of %s failed unexpectedly", self._ticket.lease_id)
            return _unexpected(error)
        return None

    async def _renew(self) -> None:
        try:
            outcome = kv_pb2.AcknowledgeRequest.OUTCOME_PROGRESS
            request = kv_pb2.AcknowledgeRequest(ticket=self._ticket.to_proto(), outcome=outcome)
            await self._puller.acknowledge(self._ticket, request, self._metadata)
        except grpc.aio.AioRpcError as error:
            # The next fetch shows whether the source is really gone.
            log.debug("lease %s could not be renewed: %s", self._ticket.lease_id, error.details())

    async def _ask(self, ask: rd.AskSource) -> None:
        request = kv_pb2.AcknowledgeRequest(
            ticket=self._ticket.to_proto(),
            outcome=kv_pb2.AcknowledgeRequest.OUTCOME_COMMITTED,
            reader=ask.reader,
            source_blocks=ask.source_blocks,
            generations=ask.generations,
        )
        try:
            answer = await self._puller.acknowledge(self._ticket, request, self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                await asyncio.sleep(_ASK_AGAIN_S)
                self._events.put_nowait(rd.AskFailed(error.details() or error.code().name))
            else:
                self._events.put_nowait(rd.SourceAnswered(error_from_rpc(error).message))
            return
        self._events.put_nowait(rd.SourceAnswered(answer.refusal))

    # ---- results ----------------------------------------------------------------------------------------------------------------

    def _pulled(self, output_ids: Sequence[int]) -> PulledKv:
        assert self._transport is not None
        now, self._transferred = time.monotonic(), True
        self._report(now)
        return PulledKv(
            output_ids=output_ids,
            transport=self._transport.name,
            num_bytes=self._reader.num_bytes,
            num_chunks=len(self._reader.infos),
            num_blocks=self._target.num_missing_blocks,
            publish_s=self._publish_s,
            fetch_s=now - self._reader.complete_at,
            ahead=not self._transport.copies_out,
            exact=self._conversion is None or self._conversion.exact,
        )

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    def _report(self, now: float, failure: str = "") -> None:
        reader = self._reader
        self._puller.telemetry.transfer(
            TransferRecord(
                transport=self._transport.name if self._transport is not None else "none",
                direction=Direction.FETCH,
                num_bytes=reader.num_bytes,
                num_chunks=len(reader.infos),
                num_blocks=0 if failure else self._target.num_missing_blocks,
                queue_s=self._queue_s,
                copy_s=self._copying.summed_s,
                busy_s=self._copying.busy_s,
                scatter_s=self._scatter_s,
                total_s=now - self._started_at,
                exposed_s=now - reader.complete_at if reader.complete is not None else 0.0,
                num_retries=reader.num_again,
                failure=failure,
                request_id=f"{self._ticket.request_id}/{self._ticket.attempt}",
                peer=self._ticket.worker_id,
            )
        )


def _source_of(ticket: Ticket) -> Source:
    return Source(worker_id=ticket.worker_id, epoch=ticket.epoch, address=ticket.address)


def _unexpected(error: Exception) -> InternalError:
    return InternalError(f"the hand-over failed: {error!r}; see the decode worker's log")


def _own_side_away(transport: TransportEnd) -> ResourceExhausted:
    """Routers take Unavailable for the source's fault, and would try another source with this same worker."""
    return ResourceExhausted(f"no KV comes in by {transport.name} here ({transport.why_not_ready}); another decode worker may do")


def _info(chunk: kv_pb2.Chunk, num_layers: int) -> ChunkInfo:
    """`num_layers` is the model's; a chunk of all of them has 0."""
    return ChunkInfo(
        index=chunk.index,
        first_block=chunk.first_block,
        num_blocks=chunk.num_blocks,
        num_bytes=chunk.num_bytes,
        checksum=chunk.checksum,
        first_layer=chunk.first_layer,
        num_layers=0 if chunk.num_layers == num_layers else chunk.num_layers,
        source_blocks=tuple(chunk.source_blocks),
        generations=tuple(chunk.generations),
    )


async def _all_ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Waits for all of them, however often it is cancelled meanwhile."""
    pending = set(tasks)
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError:
            pending = {task for task in pending if not task.done()}
