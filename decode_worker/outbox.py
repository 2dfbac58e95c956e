"""What a router has not been sent yet, what it may ask for again, and the one stream that sends it.

connected       events go into the buffer, and from there onto the stream
not connected   nothing is buffered: the attempts' histories have it all
connected again what the router has missed comes out of the histories, some of it at a time, until an attempt has caught up
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from decode_worker.history import AttemptId, History, Replay
from twostep.errors import Cancelled, ResourceExhausted, TwostepError
from twostep.rpc.v1 import decode_pb2

# Events of one message at most, of those that are replayed and where several steps' travel together.
_MESSAGE_EVENTS = 1024


@dataclass(slots=True, eq=False)
class Connection:
    """One Stream call. `error` is why its outbox broke it: another stream took over, or the buffer overflowed.

    A broken call ends after the message that it is sending: gRPC cannot take that back, and ending a call under a pending write crashes it.
    A router that never reads thus keeps a call open, and its sequences for its lease.
    """

    error: TwostepError | None = None


class Outbox:
    """One router's, across its streams. One event loop owns it. It buffers at most `max_events` events, and keeps the histories of the
    router's sequences, out of which it replays; of those that have ended, the last `max_ended`. `on_lost`: of this one the router asks for
    what is no longer kept; returns what it is to be told now."""

    def __init__(
        self, router_id: str, *, max_events: int, max_ended: int, on_lost: Callable[[History], Sequence[decode_pb2.DecodeEvent]]
    ) -> None:
        self.router_id = router_id
        self._max_events = max_events
        self._max_ended = max_ended
        self._on_lost = on_lost
        self._histories: dict[AttemptId, History] = {}
        self._ended: deque[History] = deque()  # in the order of their ends; some may be forgotten already
        self._told: deque[decode_pb2.DecodeEvent] = deque()  # of attempts that have no history
        self._behind: dict[AttemptId, Replay] = {}
        self._messages: deque[decode_pb2.StepEvents] = deque()
        self._num_events = 0
        self._step = 0
        self._replayed_last = False
        # A message has been handed out, and nothing says yet that it has left.
        self._sending = False
        self._missed = False
        self._connection: Connection | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._left_at = time.monotonic()

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def empty(self) -> bool:
        """Whether the router has been sent all there is."""
        behind = self._told or not all(replay.over for replay in self._behind.values())
        return not self._messages and not behind and not self._missed

    def alone_s(self, now: float) -> float:
        """Seconds without a stream."""
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
        """Nothing follows; it is kept for a while."""
        history.end()
        self._ended.append(history)
        while len(self._ended) > self._max_ended:
            self._forget(self._ended.popleft())

    def forget(self, attempt: AttemptId) -> None:
        self._histories.pop(attempt, None)
        self._behind.pop(attempt, None)

    def expire(self, before: float) -> None:
        """Forgets those that ended before the instant `before`. Only while all is sent: otherwise they may be asked for again."""
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
            message = decode_pb2.StepEvents(step=message.step, events=events)
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
        """The stream ends once everything buffered is sent."""
        self._closed = True
        self._wake.set()

    def connect(self, behind: Iterable[Replay] = (), told: Iterable[decode_pb2.DecodeEvent] = ()) -> Connection:
        """A new stream, which takes over from the one before. `behind`: attempts that are to be replayed; `told`: events beside them."""
        self._break(Cancelled("another stream of this router took over"))
        self._missed = False
        self._told.extend(told)
        self._behind.update((replay.history.attempt, replay) for replay in behind)
        self._connection = Connection()
        return self._connection

    def _break(self, error: TwostepError) -> None:
        if self._connection is not None:
            self._connection.error = error
            self.disconnect(self._connection)
            self._wake.set()

    def disconnect(self, connection: Connection) -> None:
        """The stream ended. Nothing happens if another one has taken over."""
        if self._connection is connection:
            self._connection = None
            self._left_at = time.monotonic()
            self._missed = self._sending or not self.empty
            self._sending = False
            self._told.clear()
            self._behind.clear()
            self._messages.clear()
            self._num_events = 0

    async def next(self, connection: Connection) -> decode_pb2.StepEvents | None:
        """The next message to send. It has as much of what waits as one message takes: where sending is slower than stepping, each carries
        more, and none falls behind. What was missed and what is new take turns. None: closed and all sent. Raises what the connection was
        broken with."""
        if self._connection is connection:
            self._sending = False
        while connection.error is None:
            message = self._take()
            if message is not None:
                self._sending = True
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
        while self._told and len(events) < _MESSAGE_EVENTS:
            events.append(self._told.popleft())
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
