"""Every sequence on a decode worker, from reservation to last token, and who is told of it. One event loop owns it all.

    RESERVED ──attach──▶ FETCHING ──commit──▶ DECODING ──▶ ended
        │                    │                    │
        └─ lease over ───────┴─ hand-over failed ─┴─ cancelled · its router gone · worker stops   ──▶ ended, blocks free

A sequence leaves the table at once, so that no late token of it is sent; its blocks go back only when nothing can write to them any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from enum import Enum

from decode_worker.fetch import Fetched, Fetcher, Target
from decode_worker.history import AttemptId, History
from decode_worker.outbox import Connection, Outbox
from kv_transfer.ticket import Ticket
from twostep.engine.engine import Engine
from twostep.engine.types import EngineRequest, Reservation, StepOutput
from twostep.errors import (
    Incompatible,
    InternalError,
    InvalidRequest,
    NotFound,
    ResourceExhausted,
    TwostepError,
    Unauthenticated,
    Unavailable,
    status_of,
)
from twostep.rpc.v1 import decode_pb2, kv_pb2
from twostep.worker.requests import attempt_id

log = logging.getLogger(__name__)

_SWEEP_S = 0.2
# Repeating the prompt from the start cannot help against these.
_FINAL_ERRORS = (Incompatible, InvalidRequest, Unauthenticated)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesConfig:
    """`reservation_lease_s`: a reservation without a ticket ends. `router_lease_s`: so do all sequences of a router without a stream, and
    what could be replayed of those that have ended is kept for so long. `max_buffered_events`, `max_ended_kept`: for each router.
    `max_replay_tokens`: for each sequence, about 50 bytes each (12 more for each logprob)."""

    reservation_lease_s: float = 30.0
    router_lease_s: float = 5.0
    max_buffered_events: int = 16384
    max_replay_tokens: int = 2048
    max_ended_kept: int = 1024
    max_routers: int = 256


class State(Enum):
    RESERVED = "reserved"
    FETCHING = "fetching"
    DECODING = "decoding"


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeSequence:
    seq_id: str
    history: History
    router_id: str
    tenant: str
    target: Target
    expires_at: float  # as a reservation, in monotonic seconds
    state: State = State.RESERVED
    ticket: Ticket | None = None
    fetching: asyncio.Task[None] | None = None


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
        now = time.monotonic()
        waiting = (s.expires_at for s in self._sequences.values() if s.state is not State.DECODING)
        return now + self.config.reservation_lease_s - min(waiting, default=now + self.config.reservation_lease_s)

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
                router_id, max_events=self.config.max_buffered_events, max_ended=self.config.max_ended_kept
            )
        return outbox

    def connect(self, router_id: str, positions: Iterable[decode_pb2.StreamPosition]) -> tuple[Outbox, Connection]:
        """A new stream of the router, which goes on from `positions`; what it does not name is dropped. Raises InvalidRequest,
        ResourceExhausted."""
        outbox = self.outbox(router_id)
        wanted = {(p.request_id, p.attempt): p for p in positions}
        self._drop_unwanted(outbox, wanted.keys())
        missed: list[decode_pb2.DecodeEvent] = []
        for attempt, position in wanted.items():
            history = outbox.history(attempt)
            if history is None:
                if not position.reserving:
                    missed.append(_not_here(attempt))
            elif history.reaches(position.next_position):
                missed += history.since(position)
            else:
                log.warning("%s: router %s asks for tokens that are no longer kept", attempt, router_id)
                missed += self._fail_behind(history)
        if missed:
            log.info("router %s is back: %d events are sent again", router_id, len(missed))
        return outbox, outbox.connect(missed, step=self._step)

    def _drop_unwanted(self, outbox: Outbox, wanted: Iterable[AttemptId]) -> None:
        unwanted = set(outbox.attempts).difference(wanted)
        for attempt in unwanted:
            outbox.forget(attempt)
        for sequence in [s for s in self._sequences.values() if s.router_id == outbox.router_id and s.history.attempt in unwanted]:
            log.info("%s: its router does not want it any more", sequence.seq_id)
            self._end(sequence, "its router does not want it any more")

    def _fail_behind(self, history: History) -> list[decode_pb2.DecodeEvent]:
        """The router has fallen behind what is kept. Returns what it must be told now; of a running sequence, once that is freed."""
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
        self._sequences[request.seq_id] = DecodeSequence(
            seq_id=request.seq_id,
            history=outbox.begin((request_id, attempt), max_tokens=self.config.max_replay_tokens),
            router_id=router_id,
            tenant=tenant,
            target=Target(
                block_ids=reservation.block_ids,
                num_cached_blocks=reservation.num_cached_tokens // self._block_size,
                num_blocks=-(-len(request.token_ids) // self._block_size),
                num_tokens=len(request.token_ids),
            ),
            expires_at=time.monotonic() + self.config.reservation_lease_s,
        )
        return reservation

    def attach(self, request_id: str, attempt: int, ticket: Ticket) -> None:
        """Begins to pull in the background; what comes of it is an event. Repeating it changes nothing. Raises NotFound (no such
        reservation, or its lease is over), Unauthenticated, Incompatible, InvalidRequest, Unavailable (the ticket expired)."""
        sequence = self._sequences.get(attempt_id(request_id, attempt))
        if sequence is None:
            raise NotFound(f"no reservation for attempt {attempt} of request {request_id}; reserve again under a new attempt")
        ticket.check_signature(self._secret)
        if (ticket.request_id, ticket.attempt) != (request_id, attempt):
            raise InvalidRequest(f"the ticket is for attempt {ticket.attempt} of {ticket.request_id}; attach the one of this attempt")
        if ticket.tenant != sequence.tenant:
            raise Unauthenticated("the ticket is for another tenant's request; attach the one that this request's prefill worker gave")
        if sequence.ticket is not None:
            if sequence.ticket != ticket:
                raise InvalidRequest("another ticket is attached already; an attempt has one ticket")
            return
        ticket.check_expiry()
        sequence.ticket = ticket
        sequence.state = State.FETCHING
        sequence.fetching = asyncio.create_task(self._pull(sequence, ticket), name=f"fetch {sequence.seq_id}")

    async def cancel(self, request_id: str, attempt: int) -> bool:
        """Frees all the attempt holds; returns when it is free. False: nothing was here."""
        sequence = self._sequences.get(attempt_id(request_id, attempt))
        if sequence is None:
            return False
        if (outbox := self._outboxes.get(sequence.router_id)) is not None:
            outbox.forget(sequence.history.attempt)
        # Shielded: freeing goes on even if the router does not wait for it.
        await asyncio.shield(self._end(sequence, "cancelled"))
        return True

    # ---- the hand-over ------------------------------------------------------------------------------------------------------

    async def _pull(self, sequence: DecodeSequence, ticket: Ticket) -> None:
        try:
            fetched = await self._fetcher.fetch(ticket, sequence.target)
            if self._sequences.get(sequence.seq_id) is not sequence:
                return
            # No await from here to the commit: whatever ends the sequence comes before it, or finds it decoding.
            self._engine.commit(sequence.seq_id, fetched.output_ids, exact=fetched.exact)
        except TwostepError as error:
            self._fail(sequence, error)
            return
        except Exception as error:
            log.exception("hand-over of %s failed", sequence.seq_id)
            self._fail(sequence, InternalError(f"the hand-over failed: {error!r}"))
            return
        sequence.state = State.DECODING
        self._committed(sequence, fetched)
        if not fetched.acknowledged:
            self._spawn(self._fetcher.acknowledge(ticket, kv_pb2.AcknowledgeRequest.OUTCOME_COMMITTED))

    def _committed(self, sequence: DecodeSequence, fetched: Fetched) -> None:
        self.bytes_fetched += fetched.num_bytes
        self.blocks_fetched += fetched.num_blocks
        self.blocks_reused += sequence.target.num_cached_blocks
        sequence.history.committed = decode_pb2.Committed(
            transport=fetched.transport,
            bytes=fetched.num_bytes,
            chunks=fetched.num_chunks,
            blocks_moved=fetched.num_blocks,
            blocks_reused=sequence.target.num_cached_blocks,
            fetch_s=fetched.fetch_s,
        )
        self._send(sequence.router_id, decode_pb2.StepEvents(step=self._step, events=[sequence.history.committed_event()]))

    # ---- the engine's steps -------------------------------------------------------------------------------------------------

    def on_step(self, output: StepOutput) -> None:
        """All tokens of one step go to each router in one message."""
        self._step = output.step
        messages: dict[str, decode_pb2.StepEvents] = {}
        for token in output.tokens:
            sequence = self._sequences.get(token.seq_id)
            if sequence is None:
                continue
            history = sequence.history
            messages.setdefault(sequence.router_id, decode_pb2.StepEvents(step=output.step)).events.append(history.add(token))
            if token.finish_reason is not None:
                del self._sequences[token.seq_id]
                if (outbox := self._outboxes.get(sequence.router_id)) is not None:
                    outbox.end(history)
        for router_id, message in messages.items():
            self._send(router_id, message)
        for failure in output.failures:
            sequence = self._sequences.get(failure.seq_id)
            if sequence is not None:
                self._fail(sequence, Unavailable(f"{failure.message}; another worker may do better"))

    def _send(self, router_id: str, message: decode_pb2.StepEvents) -> None:
        outbox = self._outboxes.get(router_id)
        if outbox is None or outbox.put(message):
            return
        # Tokens are lost, so none of its sequences can go on; others' are not held up.
        log.warning("router %s reads too slowly: its stream and its sequences are dropped", router_id)
        outbox.overflow()
        self._fail_of(router_id, ResourceExhausted("the router read its stream too slowly"))

    # ---- ends ---------------------------------------------------------------------------------------------------------------

    def fail_all(self, error: TwostepError) -> None:
        """Ends every sequence and tells the routers."""
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error)

    def _fail_of(self, router_id: str, error: TwostepError) -> None:
        for sequence in [s for s in self._sequences.values() if s.router_id == router_id]:
            self._fail(sequence, error)

    def _fail(self, sequence: DecodeSequence, error: TwostepError) -> None:
        """Ends a sequence; its router is told once it holds nothing here any more."""
        if self._sequences.get(sequence.seq_id) is not sequence:
            return
        log.info("%s failed: %s", sequence.seq_id, error.message)
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
        return self._spawn(self._free(sequence, reason))

    async def _free(self, sequence: DecodeSequence, reason: str) -> None:
        try:
            fetching = sequence.fetching
            if fetching is not None and not fetching.done():
                fetching.cancel()
                await asyncio.wait([fetching])
            self._engine.cancel(sequence.seq_id)
        finally:
            self._num_ending -= 1
        if sequence.ticket is not None and sequence.state is State.FETCHING:
            self._spawn(self._fetcher.acknowledge(sequence.ticket, kv_pb2.AcknowledgeRequest.OUTCOME_ABORTED, reason))

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
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
            log.warning(
                "router %s has had no stream for %g s: dropping its %d sequences",
                outbox.router_id,
                self.config.router_lease_s,
                len(orphans),
            )
        del self._outboxes[outbox.router_id]
        for sequence in orphans:
            self._end(sequence, "its router is gone")


def _not_here(attempt: AttemptId) -> decode_pb2.DecodeEvent:
    failed = decode_pb2.DecodeFailed(
        code="NOT_FOUND", message="it is not here: the worker has restarted, or has dropped it because its router was away", retryable=True
    )
    return decode_pb2.DecodeEvent(request_id=attempt[0], attempt=attempt[1], failed=failed)
