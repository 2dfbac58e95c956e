"""One sequence on a decode worker: where it stands, and how it gets its prompt's KV. And the bounds of all of them."""

from __future__ import annotations

import asyncio
import time
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from enum import Enum

from decode_worker.history import AttemptId, History
from decode_worker.target import Target
from decode_worker.tracing import SequenceSpan
from kv_transfer.ticket import Ticket
from twostep.engine.types import PrefillProgress, TokenOutput
from twostep.errors import InvalidRequest, TwostepError, Unauthenticated
from twostep.process.tracing import Metadata
from twostep.rpc.v1 import decode_pb2


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
class HandedOver:
    """Its KV comes from a prefill worker. `expires_at`: as a reservation, in monotonic seconds."""

    target: Target
    expires_at: float
    ticket: Ticket | None = None
    fetching: asyncio.Task[None] | None = None

    def take(self, ticket: Ticket, *, attempt: AttemptId, tenant: str) -> bool:
        """Of a ticket whose signature is right. False: it is here already. Raises InvalidRequest, Unauthenticated, Unavailable."""
        if (ticket.request_id, ticket.attempt) != attempt:
            raise InvalidRequest(f"the ticket is for attempt {ticket.attempt} of {ticket.request_id}; attach the one of this attempt")
        if ticket.tenant != tenant:
            raise Unauthenticated("the ticket is for another tenant's request; attach the one that this request's prefill worker gave")
        if self.ticket is not None:
            if self.ticket != ticket:
                raise InvalidRequest("another ticket is attached already; an attempt has one ticket")
            return False
        ticket.check_expiry()
        self.ticket = ticket
        return True


@dataclass(slots=True, eq=False, kw_only=True)
class ComputedHere:
    """Its prompt is one of the engine's. Instants in monotonic seconds; `started_at` 0: it waits."""

    submitted_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    num_cached_tokens: int = 0

    def on_progress(self, progress: PrefillProgress, began_at: float) -> None:
        """`began_at`: when the step began that computed it."""
        if not self.started_at:
            self.started_at = max(self.submitted_at, began_at)
            self.num_cached_tokens = progress.num_cached_tokens

    @property
    def queue_s(self) -> float:
        return max(0.0, self.started_at - self.submitted_at)

    @property
    def prefill_s(self) -> float:
        """Until now."""
        return time.monotonic() - (self.started_at or self.submitted_at)


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeSequence:
    seq_id: str
    history: History
    router_id: str
    tenant: str
    state: State
    source: HandedOver | ComputedHere
    # Tokens decoded while it is still FETCHING, from KV that is verified, but not yet confirmed by its source.
    withheld: list[TokenOutput] = field(default_factory=list)
    # What it is over with once that KV has turned out to be the right one.
    withheld_error: TwostepError | None = None
    # None: it is not traced. `metadata`: of calls made for it, its trace context.
    span: SequenceSpan | None = None
    metadata: Metadata = ()
    # Of the call that brought it: what is done for it elsewhere logs as its own.
    context: Context = field(default_factory=copy_context)

    def tell(self, token: TokenOutput, event: decode_pb2.DecodeEvent) -> None:
        """Fills the empty `event` with what its router is told of its next token. It decodes from now on."""
        source, history = self.source, self.history
        if self.state is State.PREFILLING and isinstance(source, ComputedHere):
            self.state = State.DECODING
            if self.span is not None:
                self.span.computed(source)
            history.begin(token, event, cached_tokens=source.num_cached_tokens, queue_s=source.queue_s, prefill_s=source.prefill_s)
        else:
            history.add(token, event)
        if self.span is not None:
            self.span.token(last=token.finish_reason is not None)
