"""Every sequence on a decode worker, from reservation to last token, and who is told of it. One event loop owns it all.

    reserve ──▶ RESERVED ──attach──▶ FETCHING ──commit──▶ DECODING ──▶ ended
    submit ───▶ PREFILLING ───────────────first token────▶ DECODING ──▶ ended
                    │                    │                    │
                    └─ lease over ───────┴─ hand-over failed ─┴─ cancelled · its router gone · worker stops   ──▶ ended, blocks free

Whose prompt is computed here has no reservation, no lease and no ticket: it waits in the engine like any prompt, and is told of by its
FirstToken.

A sequence leaves the table at once, so that no late token of it is sent; its blocks go back only when nothing can write to them any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence

from decode_worker.fetch import Fetched, Fetcher, Target
from decode_worker.history import AttemptId, History, Replay, not_here
from decode_worker.outbox import Connection, Outbox
from decode_worker.sequence import ComputedHere, DecodeSequence, HandedOver, SequencesConfig, State
from decode_worker.tracing import CANCELLED, SequenceSpan
from kv_transfer.ticket import Ticket
from twostep.engine.engine import Engine
from twostep.engine.types import EngineRequest, FailureKind, Reservation, StepOutput, TokenOutput
from twostep.errors import (
    Incompatible,
    InternalError,
    InvalidRequest,
    NonFiniteLogits,
    NotFound,
    ResourceExhausted,
    TwostepError,
    Unauthenticated,
    Unavailable,
    status_of,
)
from twostep.process.tracing import Metadata
from twostep.rpc.v1 import decode_pb2, kv_pb2
from twostep.worker.requests import attempt_id

__all__ = ["Sequences", "SequencesConfig"]

log = logging.getLogger(__name__)

_SWEEP_S = 0.2
# Repeating the prompt from the start cannot help against these.
_FINAL_ERRORS = (Incompatible, InvalidRequest, NonFiniteLogits, Unauthenticated)


class Sequences:
    def __init__(self, engine: Engine, fetcher: Fetcher, config: SequencesConfig, *, secret: bytes, block_size: int) -> None:
        self.config = config
        self.bytes_fetched = 0
        self.blocks_fetched = 0
        self.blocks_reused = 0
        self._engine = engine
        self._fetcher = fetcher
        self._secret = secret
        self._block_size = block_size
        self._sequences: dict[str, DecodeSequence] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_ending = 0
        self._sweeper: asyncio.Task[None] | None = None
        self._step = 0

    def __len__(self) -> int:
        """Sequences that hold anything."""
        return len(self._sequences) + self._num_ending

    @property
    def num_reservations(self) -> int:
        return sum(1 for s in self._sequences.values() if s.state is State.RESERVED)

    @property
    def oldest_hand_over_s(self) -> float:
        """Age of the oldest sequence whose KV is still to come; 0: there is none."""
        fresh = time.monotonic() + self.config.reservation_lease_s
        awaited = (s for s in self._sequences.values() if s.state in (State.RESERVED, State.FETCHING))
        return fresh - min((s.source.expires_at for s in awaited if isinstance(s.source, HandedOver)), default=fresh)

    @property
    def num_streams(self) -> int:
        return sum(1 for outbox in self._outboxes.values() if outbox.connected)

    @property
    def all_sent(self) -> bool:
        return all(outbox.empty for outbox in self._outboxes.values())

    async def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep(), name="decode-sweep")

    async def close(self) -> None:
        """Drops what is left and waits until it is freed; streams end once all is sent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        self.fail_all(Unavailable("the decode worker is stopping; another one will do"))
        for outbox in self._outboxes.values():
            outbox.close()
        while self._tasks:
            await asyncio.wait(self._tasks)

    # ---- what routers ask -------------------------------------------------------------------------------------------------

    def outbox(self, router_id: str) -> Outbox:
        """The router's, made at its first word. Raises InvalidRequest, ResourceExhausted."""
        if not 1 <= len(router_id) <= 128:
            raise InvalidRequest("router_id must have 1 to 128 characters")
        outbox = self._outboxes.get(router_id)
        if outbox is None:
            if len(self._outboxes) >= self.config.max_routers:
                raise ResourceExhausted(f"{self.config.max_routers} routers are connected already; use another decode worker")
            outbox = self._outboxes[router_id] = Outbox(
                router_id,
                max_events=self.config.max_buffered_events,
                max_ended=self.config.max_ended_kept,
                on_lost=self._fail_behind,
            )
        return outbox

    def connect(self, router_id: str, positions: Iterable[decode_pb2.StreamPosition]) -> tuple[Outbox, Connection]:
        """A new stream of the router, which goes on from `positions`; what it does not name is dropped. Raises InvalidRequest,
        ResourceExhausted."""
        outbox = self.outbox(router_id)
        wanted = {(p.request_id, p.attempt): p for p in positions}
        self._drop_unwanted(outbox, wanted.keys())
        behind: list[Replay] = []
        told: list[decode_pb2.DecodeEvent] = []
        for attempt, position in wanted.items():
            history = outbox.history(attempt)
            if history is not None:
                behind.append(Replay(history, position))
            elif not position.reserving:
                told.append(not_here(attempt))
        if behind or told:
            log.info("router %s is back: %d sequences go on from where it has got, %d are not here", router_id, len(behind), len(told))
        return outbox, outbox.connect(behind, told)

    def _drop_unwanted(self, outbox: Outbox, wanted: Iterable[AttemptId]) -> None:
        unwanted = set(outbox.attempts).difference(wanted)
        for attempt in unwanted:
            outbox.forget(attempt)
        for sequence in [s for s in self._sequences.values() if s.router_id == outbox.router_id and s.history.attempt in unwanted]:
            sequence.context.run(log.info, "%s: its router does not want it any more", sequence.seq_id)
            self._end(sequence, "its router does not want it any more")

    def _fail_behind(self, history: History) -> list[decode_pb2.DecodeEvent]:
        """The router has fallen behind what is kept. Returns what it must be told now; of a running sequence, once that is freed."""
        log.warning("%s: its router asks for tokens that are no longer kept", attempt_id(*history.attempt))
        message = f"the router asks for tokens further back than the last {self.config.max_replay_tokens}, which are all that is kept"
        sequence = self._sequences.get(attempt_id(*history.attempt))
        if sequence is not None:
            self._fail(sequence, ResourceExhausted(message))
            return []
        if history.failed is None:
            history.failed = decode_pb2.DecodeFailed(code="RESOURCE_EXHAUSTED", message=message, retryable=True)
        return [history.failed_event()] if history.ended_at is not None else []

    def reserve(self, request: EngineRequest, *, request_id: str, attempt: int, router_id: str, tenant: str = "") -> Reservation:
        """Raises ResourceExhausted (no room now), InvalidRequest."""
        outbox = self.outbox(router_id)
        reservation = self._engine.reserve(request)
        target = Target(
            block_ids=reservation.block_ids,
            num_cached_blocks=reservation.num_cached_tokens // self._block_size,
            num_blocks=-(-len(request.token_ids) // self._block_size),
            num_tokens=len(request.token_ids),
        )
        source = HandedOver(target=target, expires_at=time.monotonic() + self.config.reservation_lease_s)
        self._add(request.seq_id, (request_id, attempt), outbox, tenant, State.RESERVED, source)
        return reservation

    def submit(self, request: EngineRequest, *, request_id: str, attempt: int, router_id: str, tenant: str = "") -> None:
        """The prompt is computed here, in chunks within the engine's step budget. Raises ResourceExhausted (too many prompts wait),
        Incompatible (this worker does not do that), InvalidRequest."""
        if not self.config.local_prefill:
            raise Incompatible("this decode worker computes no prompts (--no-local-prefill); hand the KV over from a prefill worker")
        outbox = self.outbox(router_id)
        self._engine.submit(request)
        self._add(request.seq_id, (request_id, attempt), outbox, tenant, State.PREFILLING, ComputedHere())

    def _add(self, seq_id: str, attempt: AttemptId, outbox: Outbox, tenant: str, state: State, source: HandedOver | ComputedHere) -> None:
        self._sequences[seq_id] = DecodeSequence(
            seq_id=seq_id,
            history=outbox.begin(attempt, max_tokens=self.config.max_replay_tokens),
            router_id=outbox.router_id,
            tenant=tenant,
            state=state,
            source=source,
        )

    def trace(self, request_id: str, attempt: int, span: SequenceSpan | None, metadata: Metadata) -> None:
        """Of one just taken. `span` None: only what came with the call goes on with the calls made for it."""
        sequence = self._sequences[attempt_id(request_id, attempt)]
        sequence.span, sequence.metadata = span, metadata if span is None else span.metadata

    def attach(self, request_id: str, attempt: int, ticket: Ticket) -> None:
        """Begins to pull in the background; what comes of it is an event. Repeating it changes nothing. Raises NotFound (no such
        reservation, or its lease is over), Unauthenticated, Incompatible, InvalidRequest, Unavailable (the ticket expired)."""
        sequence = self._sequences.get(attempt_id(request_id, attempt))
        if sequence is None:
            raise NotFound(f"no reservation for attempt {attempt} of request {request_id}; reserve again under a new attempt")
        source = sequence.source
        if not isinstance(source, HandedOver):
            raise InvalidRequest(f"the prompt of attempt {attempt} is computed here (prefill_here); there is no KV to hand over")
        ticket.check_signature(self._secret)
        if not source.take(ticket, attempt=(request_id, attempt), tenant=sequence.tenant):
            return
        sequence.state = State.FETCHING
        if sequence.span is not None:
            sequence.span.attached()
        source.fetching = asyncio.create_task(self._pull(sequence, source.target, ticket), name=f"fetch {sequence.seq_id}")

    async def cancel(self, request_id: str, attempt: int) -> bool:
        """Frees all the attempt holds; returns when it is free. False: nothing was here."""
        sequence = self._sequences.get(attempt_id(request_id, attempt))
        if sequence is None:
            return False
        if (outbox := self._outboxes.get(sequence.router_id)) is not None:
            outbox.forget(sequence.history.attempt)
        # Shielded: freeing goes on even if the router does not wait for it.
        await asyncio.shield(self._end(sequence, CANCELLED))
        return True

    # ---- the hand-over ------------------------------------------------------------------------------------------------------

    async def _pull(self, sequence: DecodeSequence, target: Target, ticket: Ticket) -> None:
        begun = False

        def ahead(output_ids: Sequence[int]) -> None:
            nonlocal begun
            if self._sequences.get(sequence.seq_id) is sequence:
                self._engine.commit(sequence.seq_id, output_ids, confirmed=False)
                begun = True

        try:
            fetched = await self._fetcher.fetch(ticket, target, ahead=ahead, metadata=sequence.metadata)
            if self._sequences.get(sequence.seq_id) is not sequence:
                return
            # No await from here to the commit: whatever ends the sequence comes before it, or finds it decoding.
            if begun:
                self._engine.confirm(sequence.seq_id)
            else:
                self._engine.commit(sequence.seq_id, fetched.output_ids, exact=fetched.exact)
        except TwostepError as error:
            self._fail(sequence, error)
            return
        except Exception as error:
            log.exception("hand-over of %s failed", sequence.seq_id)
            self._fail(sequence, InternalError(f"the hand-over failed: {error!r}"))
            return
        sequence.state = State.DECODING
        self._committed(sequence, target, fetched)
        self._tell(sequence.withheld)
        sequence.withheld = []
        if sequence.withheld_error is not None:
            self._fail(sequence, sequence.withheld_error)
        if not fetched.acknowledged:
            self._spawn(self._fetcher.acknowledge(ticket, kv_pb2.AcknowledgeRequest.OUTCOME_COMMITTED), sequence)

    def _committed(self, sequence: DecodeSequence, target: Target, fetched: Fetched) -> None:
        self.bytes_fetched += fetched.num_bytes
        self.blocks_fetched += fetched.num_blocks
        self.blocks_reused += target.num_cached_blocks
        if sequence.span is not None:
            sequence.span.committed()
        sequence.history.committed = fetched.to_proto(num_reused=target.num_cached_blocks)
        self._send(sequence.router_id, decode_pb2.StepEvents(step=self._step, events=[sequence.history.committed_event()]))

    # ---- the engine's steps -------------------------------------------------------------------------------------------------

    def on_step(self, output: StepOutput) -> None:
        """All tokens of one step go to each router in one message."""
        self._step = output.step
        for progress in output.progress:
            sequence = self._sequences.get(progress.seq_id)
            if sequence is not None and isinstance(sequence.source, ComputedHere):
                sequence.source.on_progress(progress, output.began_at)
        self._tell(output.tokens)
        for failure in output.failures:
            sequence = self._sequences.get(failure.seq_id)
            if sequence is None:
                continue
            error = failure.as_error()
            if sequence.state is not State.FETCHING:
                self._fail(sequence, error)
            elif failure.kind is FailureKind.NO_TOKEN:
                # If the source says that this was the right KV.
                sequence.withheld_error = error
            else:
                # Ahead of the commit, routers take Unavailable for the source's fault, and this is ours.
                self._fail(sequence, InternalError(error.message) if isinstance(error, Unavailable) else error)

    def _tell(self, tokens: Iterable[TokenOutput]) -> None:
        messages: dict[str, decode_pb2.StepEvents] = {}
        for token in tokens:
            sequence = self._sequences.get(token.seq_id)
            if sequence is None:
                continue
            if sequence.state is State.FETCHING:
                # Of KV that its source has not confirmed yet.
                sequence.withheld.append(token)
                continue
            message = messages.get(sequence.router_id)
            if message is None:
                message = messages[sequence.router_id] = decode_pb2.StepEvents(step=self._step)
            sequence.tell(token, message.events.add())
            if token.finish_reason is not None:
                del self._sequences[token.seq_id]
                if (outbox := self._outboxes.get(sequence.router_id)) is not None:
                    outbox.end(sequence.history)
        for router_id, message in messages.items():
            self._send(router_id, message)

    def _send(self, router_id: str, message: decode_pb2.StepEvents) -> None:
        outbox = self._outboxes.get(router_id)
        if outbox is None or outbox.put(message):
            return
        # Its sequences go on: their histories have what it misses, for as long as its lease lasts. Others' are not held up.
        log.warning("router %s reads too slowly: its stream is broken, and goes on from where it has got when it opens another", router_id)
        outbox.overflow()

    # ---- ends ---------------------------------------------------------------------------------------------------------------

    def fail_all(self, error: TwostepError) -> None:
        """Ends every sequence and tells the routers."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error)

    def _fail(self, sequence: DecodeSequence, error: TwostepError) -> None:
        """Ends a sequence; its router is told once it holds nothing here any more."""
        if self._sequences.get(sequence.seq_id) is not sequence:
            return
        sequence.context.run(log.info, "%s failed: %s", sequence.seq_id, error.message)
        ending = self._end(sequence, error.message)

        def tell(_: asyncio.Task[None]) -> None:
            history, outbox = sequence.history, self._outboxes.get(sequence.router_id)
            if outbox is None or outbox.history(history.attempt) is not history:
                return  # nobody wants to know any more
            retryable = not isinstance(error, _FINAL_ERRORS)
            history.failed = decode_pb2.DecodeFailed(code=status_of(error).grpc, message=error.message[:1000], retryable=retryable)
            outbox.end(history)
            outbox.put(decode_pb2.StepEvents(step=self._step, events=[history.failed_event()]), force=True)

        ending.add_done_callback(tell)

    def _end(self, sequence: DecodeSequence, reason: str) -> asyncio.Task[None]:
        """Takes the sequence out of the table now, and frees it as soon as nothing writes into its blocks."""
        del self._sequences[sequence.seq_id]
        self._num_ending += 1
        return self._spawn(self._free(sequence, reason), sequence)

    async def _free(self, sequence: DecodeSequence, reason: str) -> None:
        source = sequence.source if isinstance(sequence.source, HandedOver) else None
        try:
            if source is not None and source.fetching is not None and not source.fetching.done():
                source.fetching.cancel()
                await asyncio.wait([source.fetching])
            self._engine.cancel(sequence.seq_id)
        finally:
            self._num_ending -= 1
            if sequence.span is not None:
                sequence.span.end(reason)
        if source is not None and source.ticket is not None and sequence.state is State.FETCHING:
            aborted = kv_pb2.AcknowledgeRequest.OUTCOME_ABORTED
            self._spawn(self._fetcher.acknowledge(source.ticket, aborted, reason), sequence)

    def _spawn(self, work: Coroutine[object, object, None], sequence: DecodeSequence) -> asyncio.Task[None]:
        task = asyncio.create_task(work, context=sequence.context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.monotonic()
            for sequence in list(self._sequences.values()):
                source = sequence.source
                if sequence.state is State.RESERVED and isinstance(source, HandedOver) and now >= source.expires_at:
                    self._fail(sequence, Unavailable(f"no ticket was attached for {self.config.reservation_lease_s:g} s; reserve again"))
            for outbox in list(self._outboxes.values()):
                outbox.expire(now - self.config.router_lease_s)
                if outbox.alone_s(now) > self.config.router_lease_s:
                    self._drop_router(outbox)

    def _drop_router(self, outbox: Outbox) -> None:
        orphans = [s for s in self._sequences.values() if s.router_id == outbox.router_id]
        if orphans:
            name, lease_s = outbox.router_id, self.config.router_lease_s
            log.warning("router %s has had no stream for %g s: dropping its %d sequences", name, lease_s, len(orphans))
        del self._outboxes[outbox.router_id]
        for sequence in orphans:
            self._end(sequence, "its router is gone")
