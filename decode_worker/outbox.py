"""Holds what a router has not been sent yet and what it may ask for again, and sends it on the router's one stream.

connected       events go into the buffer, and from there onto the stream
not connected   nothing is buffered: the attempts' histories have it all
connected again what the router has missed comes out of the histories, some of it at a time, until an attempt has caught up
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from twostep.engine.types import TokenOutput
from twostep.errors import Cancelled, ResourceExhausted, TwostepError
from twostep.rpc.v1 import decode_pb2, inference_pb2, prefill_pb2
from twostep.worker.requests import fill_token, token_to_proto

log = logging.getLogger(__name__)

# Events of one message at most, of those that are replayed and where several steps' travel together.
_MESSAGE_EVENTS = 1024

AttemptId = tuple[str, int]


class History:
    """Keeps what a router may ask for again of one attempt: its last `max_tokens` tokens, and the events that come once. A token is a
    number; where more is told of it, all of it is kept: about 300 bytes, and 100 more for each logprob asked for."""

    def __init__(self, attempt: AttemptId, *, max_tokens: int) -> None:
        self.attempt = attempt
        self.ended_at: float | None = None
        # What comes once, as it is sent. A prompt computed here has a first token, any other is committed.
        self._committed: decode_pb2.DecodeEvent | None = None
        self._first: decode_pb2.DecodeEvent | None = None
        self._failed: decode_pb2.DecodeEvent | None = None
        # Of consecutive positions, which end before `_next_position`.
        self._tokens: deque[int | TokenOutput] = deque(maxlen=max_tokens)
        self._next_position: int | None = None
        self._begun_at = 0
        # Of a prompt computed here: the log probabilities sent so far. They are large, and not kept.
        self._next_prompt_position = 0

    def begin(self, token: TokenOutput, event: decode_pb2.DecodeEvent, *, cached_tokens: int, queue_s: float, prefill_s: float) -> None:
        """Takes the first token of a prompt computed here. Fills the empty `event` with what the router is sent."""
        assert self._next_position is None, "the first token comes first"
        first = event.first_token
        fill_token(first.token, token)
        first.cached_tokens, first.queue_s, first.prefill_s = cached_tokens, queue_s, prefill_s
        event.request_id, event.attempt = self.attempt
        self._first = decode_pb2.DecodeEvent()
        self._first.CopyFrom(event)
        self._next_position = self._begun_at = token.position + 1

    def score(self, part: inference_pb2.PromptLogprobs, event: decode_pb2.DecodeEvent) -> None:
        """Takes log probabilities of the prompt's next tokens. Fills the empty `event` with what the router is sent."""
        event.request_id, event.attempt = self.attempt
        event.prompt_logprobs.CopyFrom(part)
        self._next_prompt_position = part.position + len(part.logprobs)

    def add(self, token: int | TokenOutput, position: int, event: decode_pb2.DecodeEvent) -> None:
        """Takes the next token, which is its number where no more is told of it. Fills the empty `event` with what the router is sent."""
        if position != self._next_position:
            assert self._next_position is None, "a sequence's tokens come in order"
            self._begun_at = position
        event.request_id, event.attempt = self.attempt
        if isinstance(token, int):
            message = event.token
            message.token_id, message.position = token, position
        else:
            fill_token(event.token, token)
        self._tokens.append(token)
        self._next_position = position + 1

    def end(self) -> None:
        """Notes that nothing follows."""
        self.ended_at = time.monotonic()

    def commit(self, committed: decode_pb2.Committed) -> decode_pb2.DecodeEvent:
        """Returns what the router is sent of it."""
        self._committed = self._event(committed=committed)
        return self._committed

    def fail(self, failed: decode_pb2.DecodeFailed) -> decode_pb2.DecodeEvent:
        """Returns what the router is sent of it: the first failure counts."""
        self._failed = self._failed or self._event(failed=failed)
        return self._failed

    def _event(self, **what: Any) -> decode_pb2.DecodeEvent:
        return decode_pb2.DecodeEvent(request_id=self.attempt[0], attempt=self.attempt[1], **what)

    @property
    def _first_position(self) -> int:
        return 0 if self._next_position is None else self._next_position - len(self._tokens)

    def reaches(self, next_position: int) -> bool:
        """Returns whether everything from `next_position` on is still here."""
        return next_position >= self._first_position or self._first_position == self._begun_at

    def scored(self, next_prompt_position: int) -> bool:
        """Returns whether a router that has the prompt's log probabilities before this one has missed none."""
        return next_prompt_position >= self._next_prompt_position

    def since(self, position: decode_pb2.StreamPosition) -> Iterator[decode_pb2.DecodeEvent]:
        """Yields what a router that has got so far has missed, in order. Nothing is to be added meanwhile."""
        assert self.reaches(position.next_position)
        if self._committed is not None and not position.committed:
            yield self._committed
        if self._first is not None and position.next_position <= self._first.first_token.token.position:
            yield self._first
        first = max(position.next_position, self._first_position)
        for at, token in enumerate(islice(self._tokens, first - self._first_position, None), first):
            if isinstance(token, int):
                yield self._event(token=prefill_pb2.Token(token_id=token, position=at))
            else:
                yield self._event(token=token_to_proto(token))
        if self._failed is not None:
            yield self._failed


class Replay:
    """Takes one attempt from where its router has got to the end of its history, some events at a time."""

    def __init__(self, history: History, position: decode_pb2.StreamPosition) -> None:
        self.history = history
        self._position = decode_pb2.StreamPosition()
        self._position.CopyFrom(position)
        self._failure_sent = False

    @property
    def lost(self) -> bool:
        """Returns whether what comes next is not kept any more."""
        position = self._position
        return not (self.history.reaches(position.next_position) and self.history.scored(position.next_prompt_position))

    @property
    def over(self) -> bool:
        """There is no more for now."""
        return self._failure_sent or (not self.lost and next(self.history.since(self._position), None) is None)

    def take(self, limit: int) -> list[decode_pb2.DecodeEvent]:
        """Returns the next events, at most so many."""
        events = [] if self._failure_sent else list(islice(self.history.since(self._position), limit))
        for event in events:
            if event.HasField("committed"):
                self._position.committed = True
            elif event.HasField("failed"):
                self._failure_sent = True
            else:
                token = event.token if event.HasField("token") else event.first_token.token
                self._position.next_position = token.position + 1
        return events


def _not_here(attempt: AttemptId) -> decode_pb2.DecodeEvent:
    """Returns the answer to a router that asks for an attempt without a history."""
    failed = decode_pb2.DecodeFailed(
        code="NOT_FOUND", message="it is not here: the worker has restarted, or has dropped it because its router was away", retryable=True
    )
    return decode_pb2.DecodeEvent(request_id=attempt[0], attempt=attempt[1], failed=failed)


@dataclass(slots=True, eq=False)
class StreamConnection:
    """One Stream call. `error` is why its outbox broke it: another stream took over, or the buffer overflowed.

    A broken call ends after the message that it is sending: gRPC cannot take that back, and ending a call under a pending write crashes it.
    A router that never reads thus keeps a call open, and its sequences for its lease.
    """

    error: TwostepError | None = None


class Outbox:
    """Serves one router, across its streams. One event loop owns it. It buffers at most `max_events` events, and keeps the histories of the
    router's sequences, out of which it replays; of those that have ended, the last `max_ended`. `on_lost` is called with a history whose
    router asks for what is no longer kept; it returns what the router is sent now."""

    def __init__(
        self, router_id: str, *, max_events: int, max_ended: int, on_lost: Callable[[History], Sequence[decode_pb2.DecodeEvent]]
    ) -> None:
        self.router_id = router_id
        self._max_events = max_events
        self._max_ended = max_ended
        self._on_lost = on_lost
        self._histories: dict[AttemptId, History] = {}
        self._ended: deque[History] = deque()  # in the order of their ends; some may be forgotten already
        self._unknown: deque[decode_pb2.DecodeEvent] = deque()  # answers about attempts without a history
        self._behind: dict[AttemptId, Replay] = {}
        self._messages: deque[decode_pb2.StepEvents] = deque()
        self._num_events = 0
        self._step = 0
        self._replayed_last = False
        # A message has been handed out, and nothing says yet that it has left.
        self._sending = False
        self._missed = False
        self._connection: StreamConnection | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._left_at = time.monotonic()

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def empty(self) -> bool:
        """Returns whether the router has been sent all there is."""
        behind = self._unknown or not all(replay.over for replay in self._behind.values())
        return not self._messages and not behind and not self._missed

    def alone_s(self, now: float) -> float:
        """Returns for how many seconds the router has had no stream."""
        return 0.0 if self.connected else now - self._left_at

    # ---- histories --------------------------------------------------------------------------------------------------------

    def begin(self, attempt: AttemptId, *, max_tokens: int) -> History:
        history = self._histories[attempt] = History(attempt, max_tokens=max_tokens)
        return history

    def history(self, attempt: AttemptId) -> History | None:
        return self._histories.get(attempt)

    @property
    def attempts(self) -> Sequence[AttemptId]:
        return tuple(self._histories)

    def end(self, history: History) -> None:
        """Notes that nothing follows in a history; it is kept for a while."""
        history.end()
        self._ended.append(history)
        while len(self._ended) > self._max_ended:
            self._forget(self._ended.popleft())

    def forget(self, attempt: AttemptId) -> None:
        self._histories.pop(attempt, None)
        self._behind.pop(attempt, None)

    def expire(self, before: float) -> None:
        """Forgets attempts that ended before the instant `before`. Only while all is sent: otherwise they may be asked for again."""
        while self.connected and self._ended and (self._ended[0].ended_at or 0.0) < before and self.empty:
            self._forget(self._ended.popleft())

    def _forget(self, history: History) -> None:
        if self._histories.get(history.attempt) is history:
            del self._histories[history.attempt]

    # ---- sending ----------------------------------------------------------------------------------------------------------

    def put(self, message: decode_pb2.StepEvents, *, force: bool = False) -> bool:
        """Takes events that are in their histories already. False: there is no room, nothing was taken (never with `force`, for the few
        events that say how things ended)."""
        self._step = message.step
        if self._connection is None:
            self._missed = True
            return True
        if self._behind:
            # Those that have not caught up get it out of their histories, in its turn.
            events = [event for event in message.events if (event.request_id, event.attempt) not in self._behind]
            message = decode_pb2.StepEvents(step=message.step, events=events, steps=message.steps)
            if not events:
                return True
        if self._num_events + len(message.events) > self._max_events and not force:
            return False
        self._messages.append(message)
        self._num_events += len(message.events)
        self._wake.set()
        return True

    def overflow(self) -> None:
        """Breaks the stream with RESOURCE_EXHAUSTED. What was not sent is in the histories, as far back as they go, for the next one."""
        self._break(
            ResourceExhausted(
                f"more than {self._max_events} events wait for this router, which reads too slowly; open the stream again to go on"
            )
        )
        self._missed = True

    def close(self) -> None:
        """Ends the stream once everything buffered is sent."""
        self._closed = True
        self._wake.set()

    def connect(self, positions: Iterable[decode_pb2.StreamPosition] = ()) -> StreamConnection:
        """Takes a new stream, which takes over from the one before and goes on from these positions."""
        self._break(Cancelled("another stream of this router took over"))
        self._missed = False
        for position in positions:
            attempt = position.request_id, position.attempt
            history = self._histories.get(attempt)
            if history is not None:
                self._behind[attempt] = Replay(history, position)
            elif not position.reserving:
                self._unknown.append(_not_here(attempt))
        if self._behind or self._unknown:
            counts = len(self._behind), len(self._unknown)
            log.info("router %s is back: %d sequences go on from where it has got, %d are not here", self.router_id, *counts)
        self._connection = StreamConnection()
        return self._connection

    def _break(self, error: TwostepError) -> None:
        if self._connection is not None:
            self._connection.error = error
            self.disconnect(self._connection)
            self._wake.set()

    def disconnect(self, connection: StreamConnection) -> None:
        """Notes that the stream ended. Nothing happens if another one has taken over."""
        if self._connection is connection:
            self._connection = None
            self._left_at = time.monotonic()
            self._missed = self._sending or not self.empty
            self._sending = False
            self._unknown.clear()
            self._behind.clear()
            self._messages.clear()
            self._num_events = 0

    async def next(self, connection: StreamConnection) -> decode_pb2.StepEvents | None:
        """Returns the next message to send. It has as much of what waits as one message takes: where sending is slower than stepping, each
        carries more, and none falls behind. What was missed and what is new take turns. None: closed and all sent. Raises what the
        connection was broken with."""
        if self._connection is connection:
            self._sending = False
        while connection.error is None:
            message = self._take()
            if message is not None:
                self._sending = True
                message.sent_s = time.monotonic()
                return message
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        # Two streams may have waited for the same wake-up: the other one is to look again.
        self._wake.set()
        raise connection.error

    def _take(self) -> decode_pb2.StepEvents | None:
        if self._replayed_last:
            return self._new() or self._missed_ones()
        return self._missed_ones() or self._new()

    def _missed_ones(self) -> decode_pb2.StepEvents | None:
        events: list[decode_pb2.DecodeEvent] = []
        while self._unknown and len(events) < _MESSAGE_EVENTS:
            events.append(self._unknown.popleft())
        while self._behind and len(events) < _MESSAGE_EVENTS:
            attempt, replay = next(iter(self._behind.items()))
            if replay.lost:
                del self._behind[attempt]
                events += self._on_lost(replay.history)
                continue
            events += replay.take(_MESSAGE_EVENTS - len(events))
            if replay.over:
                del self._behind[attempt]
        self._replayed_last = bool(events)
        return decode_pb2.StepEvents(step=self._step, events=events) if events else None

    def _new(self) -> decode_pb2.StepEvents | None:
        if not self._messages:
            return None
        message = self._messages.popleft()
        while self._messages and len(message.events) + len(self._messages[0].events) <= _MESSAGE_EVENTS:
            message.MergeFrom(self._messages.popleft())
        self._num_events -= len(message.events)
        self._replayed_last = False
        return message
