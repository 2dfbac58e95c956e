"""The one stream of a decode worker's tokens to this router, dealt out to the attempts they belong to.

1. opened as soon as the worker is known; `wait_open` returns once the worker has registered it
2. one message a step, or for several, one event for each token; every event goes to its attempt's sink, in the order of arrival
3. broken: it is opened again, with back-off, from where every attempt on it has got: the worker sends again what was missed, and
   the attempts notice nothing. Only when that has not come about within the lease, when nothing listens at the worker's address
   any more, or when the worker has ended it in good order, do the attempts fail, and begin again elsewhere
4. an unexpected event (its attempt was given up while the worker was away) is answered with Decode.Cancel
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from router.request.cleanup import Cleanup
from router.request.gaps import StepTimes
from twostep.errors import TwostepError, Unavailable
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0
# While attempts wait for it. The channel's own back-off is what keeps it from connecting more often than that.
_LAST_BACKOFF_IN_LEASE_S = 0.25
_CANCEL_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 5.0
# A live worker listens, so a port that refuses for so long is that of a dead one, and its lease is not waited for. Not at once: what stands
# between (a proxy) may be restarting.
_REFUSED_S = 1.0
# Tokens of a sequence just cancelled are still under way for a moment: only later ones mean that the cancel was lost.
_CANCEL_SETTLES_S = 2.0
_MAX_REMEMBERED = 4096

AttemptId = tuple[str, int]


class EventSink(Protocol):
    """Called in the event loop, must return at once and never raise."""

    def on_event(self, event: decode_pb2.DecodeEvent) -> None: ...

    def position(self) -> decode_pb2.StreamPosition:
        """Tells how far it has got."""
        ...


class DecodeStream:
    def __init__(
        self,
        stub: decode_pb2_grpc.DecodeAsyncStub,
        *,
        router_id: str,
        worker_id: str,
        lease_s: float,
        cleanup: Cleanup,
        on_open: Callable[[], None],
        on_message: Callable[[], None],
        on_lost: Callable[[TwostepError], None],
    ) -> None:
        """`on_lost`: the attempts on it must begin again. `lease_s`: how long a broken stream may take to be open again before that."""
        self._stub = stub
        self.router_id = router_id
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._cleanup = cleanup
        self._on_open = on_open
        self._on_message = on_message
        self._on_lost = on_lost
        self._sinks: dict[AttemptId, EventSink] = {}
        self._cancelled: OrderedDict[AttemptId, float] = OrderedDict()
        self._open = asyncio.Event()
        self.num_opened = 0
        # Of the message that is being dealt out.
        self.steps: StepTimes | None = None
        self._task = asyncio.create_task(self._run())

    @property
    def open(self) -> bool:
        return self._open.is_set()

    async def wait_open(self, timeout_s: float) -> bool:
        """Waits until the stream is open. Returns False where the worker did not take the stream in time."""
        if self._open.is_set():
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._open.wait()
        except TimeoutError:
            return False
        return True

    @property
    def num_attempts(self) -> int:
        return len(self._sinks)

    def add(self, attempt: AttemptId, sink: EventSink) -> None:
        assert attempt not in self._sinks, "an attempt has one sink"
        self._sinks[attempt] = sink

    def remove(self, attempt: AttemptId, *, cancel: bool) -> None:
        """Removes an attempt: its events are dropped from now on. `cancel`: the worker may hold something of it, and is asked to free
        it."""
        self._sinks.pop(attempt, None)
        if cancel:
            self._cancel(attempt)

    async def close(self) -> None:
        self._open.clear()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        outage: _Outage | None = None
        while True:
            opened_at: float | None = None
            ended = False
            # Every attempt there is named: the worker drops what is not.
            request = decode_pb2.StreamRequest(router_id=self.router_id, positions=[sink.position() for sink in self._sinks.values()])
            # The call itself needs no deadline; keepalive pings end it if the worker's machine vanishes.
            call = self._stub.Stream(request, wait_for_ready=False)
            try:
                async with asyncio.timeout(_OPEN_TIMEOUT_S if outage is None else outage.left_s(self._lease_s)):
                    await call.wait_for_connection()
                opened_at = time.monotonic()
                if outage is not None:
                    log.warning("token stream of worker %s is open again after %.2f s", self._worker_id, outage.seconds)
                    outage = None
                self.num_opened += 1
                self._open.set()
                self._on_open()
                async for message in call:
                    self._on_message()
                    self._deal(message)
                ended = True
                raise Unavailable("the worker closed it")
            except Exception as error:  # whatever it is, the attempts on it must hear of it
                was_open = opened_at is not None
                self._open.clear()
                if not isinstance(error, grpc.aio.AioRpcError | TwostepError | TimeoutError):
                    log.error("token stream of worker %s", self._worker_id, exc_info=error)
                # Not reset by two routers of one name that take the stream from each other.
                if opened_at is not None and time.monotonic() - opened_at > 2 * _FIRST_BACKOFF_S:
                    backoff = _FIRST_BACKOFF_S
                detail = (error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)) or "no answer"
                if outage is None:
                    outage = _Outage(had_attempts=was_open)
                    # A worker that ends in order has let its requests end: nobody misses the stream.
                    log.log(
                        logging.WARNING if self._sinks else logging.INFO,
                        "token stream of worker %s ended: %s",
                        self._worker_id,
                        detail,
                    )
                if ended or outage.is_over(self._lease_s, refused="Connection refused" in detail):
                    outage.give_up()
                    self._on_lost(Unavailable(f"the token stream of worker {self._worker_id} broke: {detail}"))
            finally:
                call.cancel()
            await asyncio.sleep(backoff if outage is None else outage.shorten(backoff, self._lease_s))
            backoff = min(2 * backoff, _LAST_BACKOFF_S)

    def _deal(self, message: decode_pb2.StepEvents) -> None:
        sinks, self.steps = self._sinks, StepTimes.of(message)
        for event in message.events:
            attempt = (event.request_id, event.attempt)
            sink = sinks.get(attempt)
            if sink is not None:
                sink.on_event(event)
            elif event.WhichOneof("event") != "failed" and not (event.HasField("token") and event.token.finish_reason):
                self._orphan(attempt)

    def _orphan(self, attempt: AttemptId) -> None:
        at = self._cancelled.get(attempt)
        if at is None or time.monotonic() - at > _CANCEL_SETTLES_S:
            self._cancel(attempt)

    def _cancel(self, attempt: AttemptId) -> None:
        self._cancelled.pop(attempt, None)
        self._cancelled[attempt] = time.monotonic()
        if len(self._cancelled) > _MAX_REMEMBERED:
            self._cancelled.popitem(last=False)
        self._cleanup.spawn(self._send_cancel(attempt))

    async def _send_cancel(self, attempt: AttemptId) -> None:
        request = decode_pb2.CancelRequest(request_id=attempt[0], attempt=attempt[1])
        try:
            await self._stub.Cancel(request, timeout=_CANCEL_TIMEOUT_S)
        except grpc.aio.UsageError:
            # The channel was closed meanwhile, because that life of the worker is over.
            log.debug("decode worker %s is gone, nothing to cancel there", self._worker_id)


class _Outage:
    """The time from a break until the stream is open again. While attempts hang on it, it is over with the lease, or sooner."""

    def __init__(self, *, had_attempts: bool) -> None:
        self._since = time.monotonic()
        self._refused_since: float | None = None
        self._given_up = not had_attempts

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def left_s(self, lease_s: float) -> float:
        """Returns how long one try to open it may take."""
        return _OPEN_TIMEOUT_S if self._given_up else max(0.01, min(_OPEN_TIMEOUT_S, lease_s - self.seconds))

    def shorten(self, backoff: float, lease_s: float) -> float:
        """Shortens a wait: the last try is to end with the lease, not to begin after it."""
        return backoff if self._given_up else min(backoff, _LAST_BACKOFF_IN_LEASE_S, max(0.01, lease_s - self.seconds))

    def is_over(self, lease_s: float, *, refused: bool) -> bool:
        """Returns whether the lease is over. Called after a try that failed. `refused`: nothing listened there."""
        if self._given_up:
            return False
        now = time.monotonic()
        if not refused:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        return self.seconds >= lease_s or (self._refused_since is not None and now - self._refused_since >= _REFUSED_S)

    def give_up(self) -> None:
        """Notes that the attempts have learnt of the loss."""
        self._given_up = True
