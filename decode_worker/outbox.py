"""What a router has not been sent yet, and the one stream that sends it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from twostep.errors import Cancelled, ResourceExhausted, TwostepError
from twostep.rpc.v1 import decode_pb2


@dataclass(slots=True, eq=False)
class Connection:
    """One Stream call. `error` is why its outbox broke it: another stream took over, or the buffer overflowed.

    A broken call ends after the message that it is sending: gRPC cannot take that back, and ending a call under a pending write crashes it.
    A router that never reads thus keeps a call open, and nothing else.
    """

    error: TwostepError | None = None


class Outbox:
    """Buffers at most `max_events` events for one router, across its streams. One event loop owns it."""

    def __init__(self, router_id: str, *, max_events: int) -> None:
        self.router_id = router_id
        self._max_events = max_events
        self._messages: deque[decode_pb2.StepEvents] = deque()
        self._num_events = 0
        self._connection: Connection | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._left_at = time.monotonic()

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def empty(self) -> bool:
        return not self._messages

    def alone_s(self, now: float) -> float:
        """Seconds without a stream."""
        return 0.0 if self.connected else now - self._left_at

    def put(self, message: decode_pb2.StepEvents, *, force: bool = False) -> bool:
        """False: there is no room, nothing was taken (never with `force`, for the few events that say how things ended)."""
        if self._num_events + len(message.events) > self._max_events and not force:
            return False
        self._messages.append(message)
        self._num_events += len(message.events)
        self._wake.set()
        return True

    def overflow(self) -> None:
        """Forgets what is buffered, but for failures, and breaks the stream with RESOURCE_EXHAUSTED."""
        kept = [m for m in self._messages if any(event.HasField("failed") for event in m.events)]
        self._messages = deque(kept[-self._max_events :])
        self._num_events = sum(len(m.events) for m in self._messages)
        self._break(
            ResourceExhausted(f"more than {self._max_events} events wait for this router: it reads too slowly; its sequences are dropped")
        )

    def close(self) -> None:
        """The stream ends once everything buffered is sent."""
        self._closed = True
        self._wake.set()

    def connect(self) -> Connection:
        """A new stream, which takes over from the one before."""
        self._break(Cancelled("another stream of this router took over"))
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

    async def next(self, connection: Connection) -> decode_pb2.StepEvents | None:
        """The next message to send; None: closed and all sent. Raises what the connection was broken with."""
        while connection.error is None and not self._messages:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        if connection.error is not None:
            # Two streams may have waited for the same wake-up: the other one is to look again.
            self._wake.set()
            raise connection.error
        message = self._messages.popleft()
        self._num_events -= len(message.events)
        return message
