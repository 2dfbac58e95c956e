"""One hand-over as the decode worker lives it: watch, pull, verify, and ask where it must. kv_transfer.reader decides; this executes.

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

from decode_worker.conversion import Conversion
from decode_worker.paths import Paths, Source
from decode_worker.target import Target
from kv_transfer import layout as kv_layout
from kv_transfer import reader as rd
from kv_transfer import reader_events as ev
from kv_transfer.copy_clock import CopyClock
from kv_transfer.observer import Direction, Transfer, TransferObserver, reason_of
from kv_transfer.scattering import ScatterClock
from kv_transfer.ticket import Ticket
from kv_transfer.transport import BlockStore, ChunkInfo, KvTransport
from kv_transfer.transports import Transports
from kv_transfer.wire_encoding import RAW
from twostep.cluster.records import LayoutRecord
from twostep.errors import Cancelled, Incompatible, InternalError, ResourceExhausted, TwostepError, Unavailable
from twostep.process.tracing import Metadata
from twostep.rpc.channel import error_from_rpc
from twostep.rpc.v1 import decode_pb2, kv_pb2, kv_pb2_grpc

log = logging.getLogger(__name__)

ACKNOWLEDGE_S = 2.0
_ASK_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A whole, verified KV cache, and the tokens that were sampled after it. `fetch_s`: seconds from the word that all is published
    to the last block in place (and the source's word, where it had to be asked); what was pulled before, while the prompt was still
    being computed, cost nobody any time. `acknowledged`: the source knows already that it is committed. Not `exact`: numbers were rounded
    on the way, or are of another format than the pool's; prefixes of it must not be shared."""

    output_ids: Sequence[int]
    transport: str
    num_bytes: int
    num_chunks: int
    num_blocks: int
    fetch_s: float
    acknowledged: bool
    exact: bool

    def to_proto(self, *, num_reused: int) -> decode_pb2.Committed:
        """`num_reused`: blocks that were here already."""
        return decode_pb2.Committed(
            transport=self.transport,
            bytes=self.num_bytes,
            chunks=self.num_chunks,
            blocks_moved=self.num_blocks,
            blocks_reused=num_reused,
            fetch_s=self.fetch_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchParts:
    """What every fetching is made of."""

    transports: Transports
    layout: LayoutRecord
    store: BlockStore
    paths: Paths
    observer: TransferObserver
    chunk_timeout_s: float
    # Forms of KV that are taken besides raw.
    wires: tuple[str, ...] = ()


class Fetching:
    """run() once. When it returns, raises or has been cancelled, nothing writes into the target any more."""

    def __init__(
        self,
        parts: FetchParts,
        stub: kv_pb2_grpc.KvAsyncStub,
        ticket: Ticket,
        source: Source,
        target: Target,
        offered: Sequence[str],
        *,
        ahead: Callable[[Sequence[int]], None],
        metadata: Metadata = (),
    ) -> None:
        """`ahead` is called with the output ids once every block is here and verified, where the source has still to be asked. What it
        raises ends the hand-over."""
        self._parts = parts
        self._stub = stub
        self._ticket = ticket
        self._source = source
        self._target = target
        self._offered = offered
        self._ahead = ahead
        self._metadata = metadata
        life_s = ticket.expires_unix_ms / 1000 - time.time()
        self._reader = rd.Reader(reader_id=secrets.randbits(63), deadline=time.monotonic() + life_s)
        self._transport: KvTransport | None = None
        self._conversion: Conversion | None = None
        self._endpoint = ""
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._fetches: dict[int, asyncio.Task[TwostepError | None]] = {}
        self._others: set[asyncio.Task[None]] = set()
        self._output_ids: Sequence[int] | None = None
        self._announced_at: dict[int, float] = {}
        self._started_at = time.monotonic()
        self._queue_s = 0.0
        self._copying = CopyClock()
        self._scatter_s = 0.0

    async def run(self) -> Fetched:
        """Raises Incompatible, InvalidRequest (never worth repeating) and Unavailable, DataLoss, ... (another attempt may succeed)."""
        watch = self._spawn(self._watch())
        try:
            while self._output_ids is None and not self._reader.targets_freed:
                self._apply(await self._next_event())
        except asyncio.CancelledError:
            await self._give_up()
            self._tell(time.monotonic(), "cancelled")
            raise
        finally:
            watch.cancel()
            for task in (*self._others, *self._fetches.values()):
                task.cancel()
            await _all_ended((*self._others, *self._fetches.values()))
        if self._output_ids is None:
            error = self._reader.error or InternalError("a hand-over ended without a reason; see the decode worker's log")
            self._tell(time.monotonic(), reason_of(error))
            raise error
        done_at = time.monotonic()
        self._tell(done_at)
        assert self._transport is not None
        return Fetched(
            output_ids=self._output_ids,
            transport=self._transport.name,
            num_bytes=self._reader.num_bytes,
            num_chunks=len(self._reader.infos),
            num_blocks=self._target.num_blocks - self._target.num_cached_blocks,
            fetch_s=done_at - self._reader.complete_at,
            acknowledged=not self._transport.copies_out,
            exact=self._conversion is None or self._conversion.exact,
        )

    async def _next_event(self) -> ev.Event:
        try:
            async with asyncio.timeout(max(0.0, self._reader.deadline - time.monotonic())):
                return await self._events.get()
        except TimeoutError:
            return ev.Tick()

    async def _give_up(self) -> None:
        """Returns when no fetch writes any more, however often it is cancelled meanwhile."""
        self._apply(ev.GivenUp())
        await _all_ended(self._fetches.values())

    def _apply(self, event: ev.Event) -> None:
        before = self._reader.num_again
        step = rd.advance(self._reader, event, time.monotonic())
        self._reader = step.reader
        if self._reader.num_again > before:
            assert self._transport is not None
            log.warning("fetching a chunk of %s again: its bytes did not match", self._ticket.lease_id)
            self._parts.observer.retry(self._transport.name, "data_loss")
        for action in step.actions:
            match action:
                case ev.StartFetch(chunk):
                    self._start_fetch(chunk)
                case ev.CancelFetches():
                    for task in self._fetches.values():
                        task.cancel()
                case ev.RenewLease():
                    self._spawn(self._renew())
                case ev.AskSource():
                    self._spawn(self._ask(action))
                case ev.DecodeAhead(output_ids):
                    try:
                        self._ahead(output_ids)
                    except TwostepError as error:
                        self._events.put_nowait(ev.GivenUp(error))
                case ev.CommitToEngine(output_ids):
                    self._output_ids = output_ids
                case ev.TellSource() | ev.FreeTargets():
                    # Both are the caller's, whose sequence it is.
                    pass

    # ---- tasks that bring events ---------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Until Complete, or what went wrong."""
        request = kv_pb2.WatchRequest(ticket=self._ticket.to_proto(), transports=self._offered, wire=self._parts.wires)
        call = self._stub.Watch(request, timeout=max(0.001, self._reader.deadline - time.monotonic()), metadata=self._metadata)
        try:
            async for event in call:
                match event.WhichOneof("event"):
                    case "manifest":
                        self._events.put_nowait(self._manifest(event.manifest))
                    case "chunk":
                        self._announced_at[event.chunk.index] = time.monotonic()
                        self._events.put_nowait(ev.ChunkAnnounced(_info(event.chunk, self._parts.layout.num_layers)))
                    case "complete":
                        done = ev.CompleteCame(event.complete.num_chunks, tuple(event.complete.output_ids))
                        self._events.put_nowait(done)
            error: TwostepError = Unavailable("the prefill worker ended the hand-over before it was complete; prefill again")
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
        except TwostepError as failure:
            self._events.put_nowait(ev.GivenUp(failure))
            return
        except Exception as failure:
            # Nobody else would end the hand-over before its ticket's time.
            log.exception("watching %s failed unexpectedly", self._ticket.lease_id)
            self._events.put_nowait(ev.GivenUp(InternalError(f"the hand-over failed: {failure!r}; see the decode worker's log")))
            return
        finally:
            call.cancel()
        self._events.put_nowait(ev.SourceLost(error))

    def _manifest(self, manifest: kv_pb2.Manifest) -> ev.ManifestCame:
        """Raises Incompatible and Unavailable."""
        ours, theirs = self._parts.layout, kv_layout.layout_from_proto(manifest.layout)
        transport = self._parts.transports.get(manifest.transport)
        if transport is None or manifest.transport not in self._offered:
            raise Incompatible(
                f"KV is published by {manifest.transport!r}, but this worker asked for {', '.join(self._offered)}; align --kv-transfer"
            )
        if not transport.ready:
            raise _own_side_away(transport)
        if manifest.checksum != transport.checksum_name:
            raise Incompatible(
                f"{manifest.transport} chunks carry {manifest.checksum!r} checksums, this worker verifies {transport.checksum_name!r}; "
                "run one version, and devices of one kind"
            )
        wire = manifest.wire or RAW
        if wire not in (RAW, *self._parts.wires):
            raise Incompatible(f"chunks are encoded as {wire!r}, which this worker did not ask for; run one version")
        self._transport, self._endpoint = transport, manifest.endpoint
        cached, stop = self._target.num_cached_blocks, self._target.num_blocks
        if theirs != ours or wire != RAW:
            self._conversion = Conversion(theirs, ours, self._parts.store, transport, self._target, wire=wire)
            cached, stop = self._conversion.source_span
        return ev.ManifestCame(
            published=ev.BlockSpan(manifest.first_block, manifest.num_blocks),
            wanted=ev.BlockSpan(cached, stop - cached),
            num_layers=ours.num_layers,
            one_sided=not transport.copies_out,
        )

    def _start_fetch(self, chunk: ChunkInfo) -> None:
        task = asyncio.create_task(self._fetch(chunk), name=f"fetch {self._ticket.lease_id} {chunk.index}")

        def ended(done: asyncio.Task[TwostepError | None]) -> None:
            # Not by the task itself, which may be cancelled before it begins.
            del self._fetches[chunk.index]
            error = Cancelled("the fetch was cancelled") if done.cancelled() else done.result()
            self._events.put_nowait(ev.FetchEnded(chunk.index, error))

        self._fetches[chunk.index] = task
        task.add_done_callback(ended)

    async def _fetch(self, chunk: ChunkInfo) -> TwostepError | None:
        """One chunk; why it failed, or None."""
        assert self._transport is not None
        transport, start = self._transport, time.monotonic()
        self._queue_s += start - self._announced_at.get(chunk.index, start)
        clock = ScatterClock()
        try:
            with clock, self._copying.running():
                deadline = start + self._parts.chunk_timeout_s
                if self._conversion is not None:
                    await self._conversion.fetch(self._endpoint, self._ticket.lease_id, chunk, deadline=deadline)
                else:
                    block_ids = self._target.block_ids[chunk.first_block : chunk.first_block + chunk.num_blocks]
                    await transport.fetch(self._endpoint, self._ticket.lease_id, chunk, block_ids, deadline=deadline)
        except TwostepError as error:
            if not isinstance(error, Unavailable):
                return error
            if not transport.ready:
                return _own_side_away(transport)
            self._parts.paths.failed(self._source, transport.name, error)
            return error
        except Exception as error:
            log.exception("fetching a chunk of %s failed unexpectedly", self._ticket.lease_id)
            return InternalError(f"the hand-over failed: {error!r}; see the decode worker's log")
        finally:
            self._scatter_s += clock.seconds
        return None

    async def _renew(self) -> None:
        try:
            await self._stub.Acknowledge(
                kv_pb2.AcknowledgeRequest(ticket=self._ticket.to_proto(), outcome=kv_pb2.AcknowledgeRequest.OUTCOME_PROGRESS),
                timeout=ACKNOWLEDGE_S,
                metadata=self._metadata,
            )
        except grpc.aio.AioRpcError as error:
            # The next fetch tells whether the source is really gone.
            log.debug("lease %s could not be renewed: %s", self._ticket.lease_id, error.details())

    async def _ask(self, ask: ev.AskSource) -> None:
        request = kv_pb2.AcknowledgeRequest(
            ticket=self._ticket.to_proto(),
            outcome=kv_pb2.AcknowledgeRequest.OUTCOME_COMMITTED,
            reader=ask.reader,
            source_blocks=ask.source_blocks,
            generations=ask.generations,
        )
        try:
            answer = await self._stub.Acknowledge(request, timeout=ACKNOWLEDGE_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                await asyncio.sleep(_ASK_AGAIN_S)
                self._events.put_nowait(ev.AskFailed(error.details() or error.code().name))
            else:
                self._events.put_nowait(ev.SourceAnswered(error_from_rpc(error).message))
            return
        self._events.put_nowait(ev.SourceAnswered(answer.refusal))

    # ---- help -------------------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task

    def _tell(self, now: float, failure: str = "") -> None:
        reader = self._reader
        self._parts.observer.transfer(
            Transfer(
                transport=self._transport.name if self._transport is not None else "none",
                direction=Direction.FETCH,
                num_bytes=reader.num_bytes,
                num_chunks=len(reader.infos),
                num_blocks=self._target.num_blocks - self._target.num_cached_blocks if not failure else 0,
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


def _own_side_away(transport: KvTransport) -> ResourceExhausted:
    """Routers take Unavailable for the source's fault, and would try another source with this same worker."""
    return ResourceExhausted(f"no KV comes in by {transport.name} here ({transport.why_not_ready}); another decode worker may do")


def _info(chunk: kv_pb2.Chunk, num_layers: int) -> ChunkInfo:
    """`num_layers`: of the model, which all of a chunk's are called 0."""
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
