"""Owns every sequence on a decode worker, from reservation to last token, and what its router is sent of it. One event loop owns it all.

    reserve       ──▶ RESERVED ──attach──▶ FETCHING ──commit──▶ DECODING ──▶ ended
    prefill_here  ──▶ PREFILLING ───────────────first token───▶ DECODING ──▶ ended
                          │                   │                    │
                          └─ lease over ──────┴─ hand-over failed ─┴─ cancelled · its router gone · worker stops   ──▶ ended, blocks free

A sequence whose prompt is computed here has no reservation, no lease and no ticket: its prompt waits in the engine like any other, and the
router gets a FirstToken.

A sequence leaves the table at once, so that no late token of it is sent; its blocks go back only when nothing can write to them any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from decode_worker.hand_over_meter import HandOverMeter
from decode_worker.outbox import History, Outbox, StreamConnection
from decode_worker.pull import Pull, PulledKv, Puller, PullHooks
from decode_worker.tracing import CANCELLED, SequenceSpan
from kv_transfer.conversion import BlockTarget
from kv_transfer.ticket import Ticket
from twostep.cluster.records import LayoutRecord
from twostep.engine.types import EngineRequest, FailureKind, PrefillProgress, PromptScores, StepOutput, StepTokens, TokenOutput
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
from twostep.keys.secret import DeploymentSecret
from twostep.process.tracing import Metadata
from twostep.rpc.v1 import decode_pb2
from twostep.worker.engine_port import EnginePort
from twostep.worker.requests import attempt_id, scores_to_proto

log = logging.getLogger(__name__)

_SWEEP_S = 0.2
# Repeating the prompt from the start cannot help against these.
_FINAL_ERRORS = (Incompatible, InvalidRequest, NonFiniteLogits, Unauthenticated)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesConfig:
    """`local_prefill`: prompts are computed here too. `reservation_lease_s`: a reservation without a ticket ends. `router_lease_s`: so do
    all sequences of a router without a stream, and what could be replayed of those that have ended is kept for so long.
    `max_buffered_events`, `max_ended_kept`: for each router. `max_replay_tokens`: for each sequence, about 50 bytes each (12 more for each
    logprob)."""

    local_prefill: bool = True
    reservation_lease_s: float = 30.0
    router_lease_s: float = 5.0
    max_buffered_events: int = 16384
    max_replay_tokens: int = 2048
    max_ended_kept: int = 1024
    max_routers: int = 256


class State(Enum):
    RESERVED = "reserved"
    FETCHING = "fetching"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeSequence:
    """One sequence. Its KV is pulled into `target`, or its prompt is one of this engine's (`target` None). Instants are in monotonic
    seconds; `expires_at` ends the reservation, `started_at` 0: the prompt waits."""

    seq_id: str
    history: History
    router_id: str
    tenant: str
    state: State
    target: BlockTarget | None = None
    submitted_at: float
    # What is handed over.
    expires_at: float = 0.0
    ticket: Ticket | None = None
    pull: Pull | None = None
    pulling: asyncio.Task[None] | None = None
    # Tokens decoded while it is still FETCHING, from KV that is verified, but not yet confirmed by its source; and the failure that is
    # the request's own if that KV turns out to be the right one.
    withheld: list[TokenOutput] = field(default_factory=list)
    withheld_error: TwostepError | None = None
    # A prompt that is computed here.
    started_at: float = 0.0
    num_cached_tokens: int = 0
    # None: it is not traced. `metadata` goes along with calls made for it: its trace context.
    span: SequenceSpan | None = None
    metadata: Metadata = ()
    # Of the call that brought it: what is done for it elsewhere logs as its own.
    context: Context = field(default_factory=copy_context)

    def check_ticket(self, ticket: Ticket) -> None:
        """Takes a ticket whose signature is right. Raises InvalidRequest, Unauthenticated, Unavailable."""
        request_id, attempt = self.history.attempt
        if self.target is None:
            raise InvalidRequest(f"the prompt of attempt {attempt} is computed here (prefill_here); there is no KV to hand over")
        if (ticket.request_id, ticket.attempt) != (request_id, attempt):
            raise InvalidRequest(f"the ticket is for attempt {ticket.attempt} of {ticket.request_id}; attach the one of this attempt")
        if ticket.tenant != self.tenant:
            raise Unauthenticated("the ticket is for another tenant's request; attach the one that this request's prefill worker gave")
        if self.ticket is None:
            ticket.check_expiry()
        elif self.ticket != ticket:
            raise InvalidRequest("another ticket is attached already; an attempt has one ticket")

    def on_progress(self, progress: PrefillProgress, began_at: float) -> None:
        """`began_at` is when the step began that computed it."""
        if self.target is None and not self.started_at:
            self.started_at = max(self.submitted_at, began_at)
            self.num_cached_tokens = progress.num_cached_tokens

    def begin(self, token: TokenOutput, event: decode_pb2.DecodeEvent) -> None:
        """Fills the empty `event` with what its router is sent of the first token of a prompt computed here. It decodes from now on."""
        self.state = State.DECODING
        started_at = self.started_at or self.submitted_at
        if self.span is not None:
            self.span.computed(self.submitted_at, started_at, self.num_cached_tokens)
        queue_s, prefill_s = started_at - self.submitted_at, time.monotonic() - started_at
        self.history.begin(token, event, cached_tokens=self.num_cached_tokens, queue_s=queue_s, prefill_s=prefill_s)


def record_of(output: StepOutput) -> decode_pb2.StepRecord:
    """Returns what routers are told of a step."""
    return decode_pb2.StepRecord(
        step=output.step,
        ended_s=output.ended_at,
        duration_s=output.duration_s,
        prompt_tokens=output.num_prefill_tokens,
        decodes=output.num_decode_tokens,
    )


class Sequences:
    def __init__(
        self, engine: EnginePort, puller: Puller, config: SequencesConfig, *, secret: DeploymentSecret, layout: LayoutRecord
    ) -> None:
        self.config = config
        self.num_kept = self.num_taken_over = 0
        self.bytes_fetched = 0
        self.blocks_fetched = 0
        self.blocks_reused = 0
        self.hand_overs = HandOverMeter()
        self._engine = engine
        self._puller = puller
        self._secret = secret
        self._layout = layout
        self._sequences: dict[str, DecodeSequence] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_ending = 0
        self._sweeper: asyncio.Task[None] | None = None
        self._step = 0
        self._closed = False

    def __len__(self) -> int:
        """Returns the number of sequences that hold anything."""
        return len(self._sequences) + self._num_ending

    @property
    def num_reservations(self) -> int:
        return sum(1 for s in self._sequences.values() if s.state is State.RESERVED)

    @property
    def oldest_hand_over_s(self) -> float:
        """The age of the oldest sequence whose KV is still to come; 0: there is none."""
        now = time.monotonic()
        awaited = (s for s in self._sequences.values() if s.state in (State.RESERVED, State.FETCHING))
        return now - min((s.submitted_at for s in awaited), default=now)

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
        self._closed = True
        self.fail_all(Unavailable("the decode worker is stopping; another one will do"))
        for outbox in self._outboxes.values():
            outbox.close()
        while self._tasks:
            await asyncio.wait(self._tasks)

    # ---- what routers ask -------------------------------------------------------------------------------------------------

    def outbox(self, router_id: str) -> Outbox:
        """Returns the router's outbox, made at its first call. Raises InvalidRequest, ResourceExhausted."""
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

    def connect(self, router_id: str, positions: Iterable[decode_pb2.StreamPosition]) -> tuple[Outbox, StreamConnection]:
        """Takes a new stream of the router, which goes on from `positions`; what it does not name is dropped. Raises InvalidRequest,
        ResourceExhausted."""
        outbox = self.outbox(router_id)
        wanted = {(p.request_id, p.attempt): p for p in positions}
        unwanted = set(outbox.attempts) - wanted.keys()
        for attempt in unwanted:
            outbox.forget(attempt)
        for sequence in [s for s in self._sequences.values() if s.router_id == router_id and s.history.attempt in unwanted]:
            sequence.context.run(log.info, "%s: its router does not want it any more", sequence.seq_id)
            self._end(sequence, "its router does not want it any more")
        return outbox, outbox.connect(wanted.values())

    def _fail_behind(self, history: History) -> list[decode_pb2.DecodeEvent]:
        """Is called when the router has fallen behind what is kept. Returns what it is sent now; of a running sequence, it is sent once
        that is freed."""
        log.warning("%s: its router asks for tokens that are no longer kept", attempt_id(*history.attempt))
        message = (
            f"the router asks for tokens further back than the last {self.config.max_replay_tokens}, or log probabilities of a prompt; "
            "those are all that is kept, and these are sent once"
        )
        sequence = self._sequences.get(attempt_id(*history.attempt))
        if sequence is not None:
            self._fail(sequence, ResourceExhausted(message))
        if history.ended_at is None:
            return []
        return [history.fail(decode_pb2.DecodeFailed(code="RESOURCE_EXHAUSTED", message=message, retryable=True))]

    async def reserve(
        self, request: EngineRequest, *, request_id: str, attempt: int, router_id: str, tenant: str = "", prefill_here: bool = False
    ) -> int:
        """Takes blocks for a prompt that is handed over; with `prefill_here`, queues it to be computed here, in chunks within the engine's
        step budget. Returns the number of its tokens whose KV is here already (0 of a prompt that waits, which looks when it is begun).
        Raises ResourceExhausted (no room now, or too many prompts wait), InvalidRequest, Incompatible (no prompts are computed here)."""
        if prefill_here and not self.config.local_prefill:
            raise Incompatible("this decode worker computes no prompts (--no-local-prefill); hand the KV over from a prefill worker")
        self.outbox(router_id)
        target, submitted_at = None, time.monotonic()
        if prefill_here:
            await self._engine.submit(request)
        else:
            reservation = await self._engine.reserve(request)
            order = self._layout.order(len(request.token_ids))
            target = BlockTarget(
                block_ids=reservation.block_ids,
                num_cached_blocks=order.before(reservation.num_cached_tokens // self._layout.block_size),
                num_blocks=len(reservation.block_ids),
                num_tokens=len(request.token_ids),
                num_cached_tokens=reservation.num_cached_tokens,
            )
        # The worker may have been told to stop meanwhile, and the router's outbox may have gone with its lease.
        try:
            if self._closed:
                raise Unavailable("the decode worker is stopping; another one will do")
            outbox = self.outbox(router_id)
        except TwostepError:
            self._engine.cancel(request.seq_id)
            raise
        self._sequences[request.seq_id] = DecodeSequence(
            seq_id=request.seq_id,
            history=outbox.begin((request_id, attempt), max_tokens=self.config.max_replay_tokens),
            router_id=router_id,
            tenant=tenant,
            state=State.PREFILLING if target is None else State.RESERVED,
            target=target,
            submitted_at=submitted_at,
            expires_at=time.monotonic() + self.config.reservation_lease_s,
        )
        return 0 if prefill_here else reservation.num_cached_tokens

    def trace(self, request_id: str, attempt: int, span: SequenceSpan | None, metadata: Metadata) -> None:
        """Sets the span of a sequence just taken. If it is None, only the call's own metadata goes on with the calls made for it."""
        sequence = self._sequences[attempt_id(request_id, attempt)]
        sequence.span, sequence.metadata = span, metadata if span is None else span.metadata

    def attach(self, request_id: str, attempt: int, ticket: Ticket) -> None:
        """Begins to pull in the background; what comes of it is an event. Repeating it changes nothing. Raises NotFound (no such
        reservation, or its lease is over), Unauthenticated, Incompatible, InvalidRequest, Unavailable (the ticket expired)."""
        sequence = self._sequences.get(attempt_id(request_id, attempt))
        if sequence is None:
            raise NotFound(f"no reservation for attempt {attempt} of request {request_id}; reserve again under a new attempt")
        if sequence.target is not None:
            ticket.check_signature(self._secret)
        sequence.check_ticket(ticket)
        if sequence.ticket is not None:
            return
        assert sequence.target is not None, "it has a ticket"
        sequence.state, sequence.ticket = State.FETCHING, ticket
        if sequence.span is not None:
            sequence.span.attached()
        # By id: a sequence that its own pull pointed to would be there until garbage is collected.
        seq_id = sequence.seq_id
        hooks = PullHooks(
            ahead=lambda output_ids: self._engine.commit(seq_id, output_ids, confirmed=False),
            commit=partial(self._commit, seq_id),
            free=partial(self._engine.cancel, seq_id),
        )
        sequence.pull = Pull(self._puller, ticket, sequence.target, hooks, metadata=sequence.metadata)
        sequence.pulling = asyncio.create_task(self._pull(sequence, sequence.pull), name=f"pull {seq_id}")

    async def cancel(self, request_id: str, attempt: int) -> bool:
        """Frees all that the attempt holds; returns when it is free. False: nothing was here."""
        sequence = self._sequences.get(attempt_id(request_id, attempt))
        if sequence is None:
            return False
        if (outbox := self._outboxes.get(sequence.router_id)) is not None:
            outbox.forget(sequence.history.attempt)
        # Shielded: freeing goes on even if the router does not wait for it.
        await asyncio.shield(self._end(sequence, CANCELLED))
        return True

    # ---- the hand-over ------------------------------------------------------------------------------------------------------

    async def _pull(self, sequence: DecodeSequence, pull: Pull) -> None:
        try:
            await pull.run()
        except TwostepError as error:
            self._fail(sequence, error)
        except Exception as error:
            log.exception("hand-over of %s failed", sequence.seq_id)
            self._fail(sequence, InternalError(f"the hand-over failed: {error!r}"))

    def _commit(self, seq_id: str, kv: PulledKv) -> None:
        """Raises what the engine raises."""
        # Its pull would have been given up otherwise.
        sequence = self._sequences[seq_id]
        assert sequence.target is not None
        if kv.ahead:
            self._engine.confirm(sequence.seq_id)
        else:
            self._engine.commit(sequence.seq_id, kv.output_ids, exact=kv.exact)
        sequence.state = State.DECODING
        num_reused = sequence.target.num_cached_blocks
        self.num_taken_over += 1
        self.bytes_fetched += kv.num_bytes
        self.blocks_fetched += kv.num_blocks
        self.hand_overs.observe(kv.transport, kv.publish_s + kv.fetch_s, kv.num_bytes)
        self.blocks_reused += num_reused
        if sequence.span is not None:
            sequence.span.committed()
        committed = decode_pb2.Committed(
            transport=kv.transport,
            bytes=kv.num_bytes,
            chunks=kv.num_chunks,
            blocks_moved=kv.num_blocks,
            blocks_reused=num_reused,
            fetch_s=kv.fetch_s,
        )
        self._send(sequence.router_id, decode_pb2.StepEvents(step=self._step, events=[sequence.history.commit(committed)]))
        withheld, sequence.withheld = sequence.withheld, []
        self._send_tokens(StepTokens.of(withheld))
        if sequence.withheld_error is not None:
            self._fail(sequence, sequence.withheld_error)

    # ---- the engine's steps -------------------------------------------------------------------------------------------------

    def on_step(self, output: StepOutput) -> None:
        """Sends each router all of its tokens of one step in one message."""
        self._step = output.step
        for progress in output.progress:
            sequence = self._sequences.get(progress.seq_id)
            if sequence is not None:
                sequence.on_progress(progress, output.began_at)
        for scores in output.scores:
            self._send_scores(scores)
        self._send_tokens(output.tokens, record_of(output))
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

    def _send_scores(self, scores: PromptScores) -> None:
        """Sends log probabilities of a prompt, before the first token of a prompt computed here."""
        sequence = self._sequences.get(scores.seq_id)
        if sequence is not None:
            message = decode_pb2.StepEvents(step=self._step)
            for part in scores_to_proto(scores):
                sequence.history.score(part, message.events.add())
            self._send(sequence.router_id, message)

    def _send_tokens(self, tokens: StepTokens, record: decode_pb2.StepRecord | None = None) -> None:
        """`record`: of the step that has just computed them."""
        messages: dict[str, decode_pb2.StepEvents] = {}
        prefilling, fetching = State.PREFILLING, State.FETCHING
        for row, (seq_id, token_id, position) in enumerate(zip(tokens.seq_ids, tokens.token_ids, tokens.positions, strict=True)):
            sequence = self._sequences.get(seq_id)
            if sequence is None:
                continue
            if sequence.state is fetching:
                # Of KV that its source has not confirmed yet.
                sequence.withheld.append(tokens[row])
                continue
            message = messages.get(sequence.router_id)
            if message is None:
                message = messages[sequence.router_id] = decode_pb2.StepEvents(step=self._step, steps=[] if record is None else [record])
            event = message.events.add()
            if sequence.state is prefilling:
                self.num_kept += 1
                sequence.begin(tokens[row], event)
            elif row in tokens.extras:
                sequence.history.add(tokens[row], position, event)
            else:
                sequence.history.add(token_id, position, event)
            if sequence.span is not None:
                sequence.span.token()
            if row in tokens.extras and tokens.extras[row].finish_reason is not None:
                self._last_told(sequence)
        for router_id, message in messages.items():
            self._send(router_id, message)

    def _last_told(self, sequence: DecodeSequence) -> None:
        """Takes a sequence off the table whose last token is on its way."""
        del self._sequences[sequence.seq_id]
        if sequence.span is not None:
            sequence.span.end()
        if (outbox := self._outboxes.get(sequence.router_id)) is not None:
            outbox.end(sequence.history)

    def _send(self, router_id: str, message: decode_pb2.StepEvents) -> None:
        outbox = self._outboxes.get(router_id)
        if outbox is None or outbox.put(message):
            return
        # Its sequences go on: their histories have what it misses, for as long as its lease lasts. Others' are not held up.
        log.warning("router %s reads too slowly: its stream is broken, and goes on from where it has got when it opens another", router_id)
        outbox.overflow()

    # ---- ends ---------------------------------------------------------------------------------------------------------------

    def fail_all(self, error: TwostepError) -> None:
        """Ends every sequence and sends the routers why."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error)

    def _fail(self, sequence: DecodeSequence, error: TwostepError) -> None:
        """Ends a sequence; its router is sent why once it holds nothing here any more."""
        if self._sequences.get(sequence.seq_id) is not sequence:
            return
        sequence.context.run(log.info, "%s failed: %s", sequence.seq_id, error.message)
        ending = self._end(sequence, error.message)

        def report(_: asyncio.Task[None]) -> None:
            history, outbox = sequence.history, self._outboxes.get(sequence.router_id)
            if outbox is None or outbox.history(history.attempt) is not history:
                return  # its router has cancelled it, or is gone
            retryable = not isinstance(error, _FINAL_ERRORS)
            failed = decode_pb2.DecodeFailed(code=status_of(error).grpc, message=error.message[:1000], retryable=retryable)
            outbox.end(history)
            outbox.put(decode_pb2.StepEvents(step=self._step, events=[history.fail(failed)]), force=True)

        ending.add_done_callback(report)

    def _end(self, sequence: DecodeSequence, reason: str) -> asyncio.Task[None]:
        """Takes the sequence out of the table now, and frees it as soon as nothing writes into its blocks."""
        del self._sequences[sequence.seq_id]
        self._num_ending += 1
        if sequence.pull is not None:
            sequence.pull.give_up(reason)
        return self._spawn(self._free(sequence, reason), sequence)

    async def _free(self, sequence: DecodeSequence, reason: str) -> None:
        try:
            if sequence.pulling is not None:
                await asyncio.wait([sequence.pulling])
            if sequence.pull is None or not sequence.pull.freed:
                self._engine.cancel(sequence.seq_id)
        finally:
            self._num_ending -= 1
            if sequence.span is not None:
                sequence.span.end(reason)

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
                if sequence.state is State.RESERVED and now >= sequence.expires_at:
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
