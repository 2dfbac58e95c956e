"""What a router has not been sent yet, what it may ask for again, and the one stream that sends it.

connected       events go into the buffer, and from there onto the stream
not connected   nothing is buffered: the attempts' histories have it all, and the next stream begins with what its router has missed
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.history import AttemptId, History
from twostep.errors import Cancelled, ResourceExhausted, TwostepError
from twostep.rpc.v1 import decode_pb2

# Events of one message at most, of those that are replayed and where several steps' travel together.
_MESSAGE_EVENTS = 1024


@dataclass(slots=True, eq=False)
class Connection:
    """One Stream call. `error` is why its outbox broke it: another stream took over, or the buffer overflowed.

    A broken call ends after the message that it is sending: gRPC cannot take that back, and ending a call under a pending write crashes it.
    A router that never reads thus keeps a call open, and nothing else.
    """

    error: TwostepError | None = None


class Outbox:
    """One router's, across its streams. One event loop owns it. It buffers at most `max_events` events beside those that are replayed, and
    keeps the histories of the router's sequences; of those that have ended, the last `max_ended`."""

    def __init__(self, router_id: str, *, max_events: int, max_ended: int) -> None:
        self.router_id = router_id
        self._max_events = max_events
        self._max_ended = max_ended
        self._histories: dict[AttemptId, History] = {}
        self._ended: deque[History] = deque()  # in the order of their ends; some may be forgotten already
        self._replay: deque[decode_pb2.StepEvents] = deque()
        self._messages: deque[decode_pb2.StepEvents] = deque()
        self._num_events = 0
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
        return not self._messages and not self._replay and not self._missed

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

    def expire(self, before: float) -> None:
        """Forgets those that ended before the instant `before`. Only while there is a stream: otherwise they wait for the next one."""
        while self.connected and self._ended and (self._ended[0].ended_at or 0.0) < before:
            self._forget(self._ended.popleft())

    def _forget(self, history: History) -> None:
        if self._histories.get(history.attempt) is history:
            del self._histories[history.attempt]

    # ---- sending ----------------------------------------------------------------------------------------------------------

    def put(self, message: decode_pb2.StepEvents, *, force: bool = False) -> bool:
        """Takes events that are in their histories already. False: there is no room, nothing was taken (never with `force`, for the few
        events that say how things ended)."""
        if self._connection is None:
            self._missed = True
            return True
        if self._num_events + len(message.events) > self._max_events and not force:
            return False
        self._messages.append(message)
        self._num_events += len(message.events)
        self._wake.set()
        return True

    def overflow(self) -> None:
        """Breaks the stream with RESOURCE_EXHAUSTED. Nothing is lost by that: the next one begins with what was not sent."""
        self._break(
            ResourceExhausted(
                f"more than {self._max_events} events wait for this router, which reads too slowly; open the stream again to go on"
            )
        )

    def close(self) -> None:
        """The stream ends once everything buffered is sent."""
        self._closed = True
        self._wake.set()

    def connect(self, missed: Sequence[decode_pb2.DecodeEvent] = (), *, step: int = 0) -> Connection:
        """A new stream, which takes over from the one before and begins with the events `missed`."""
        self._break(Cancelled("another stream of this router took over"))
        self._missed = False
        for start in range(0, len(missed), _MESSAGE_EVENTS):
            self._replay.append(decode_pb2.StepEvents(step=step, events=missed[start : start + _MESSAGE_EVENTS]))
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
            self._missed = not self.empty
            self._replay.clear()
            self._messages.clear()
            self._num_events = 0

    async def next(self, connection: Connection) -> decode_pb2.StepEvents | None:
        """The next message to send, with as much of what waits as one message takes: where sending is slower than stepping, it carries more
        each time, and does not fall behind. None: closed and all sent. Raises what the connection was broken with."""
        while connection.error is None and not self._replay and not self._messages:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        if connection.error is not None:
            # Two streams may have waited for the same wake-up: the other one is to look again.
            self._wake.set()
            raise connection.error
        if self._replay:
            return self._replay.popleft()
        message = self._messages.popleft()
        while self._messages and len(message.events) + len(self._messages[0].events) <= _MESSAGE_EVENTS:
            message.MergeFrom(self._messages.popleft())
        self._num_events -= len(message.events)
        return message
