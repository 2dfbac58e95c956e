"""The one stream of a decode worker's tokens to this router, dealt out to the attempts they belong to.

1. opened as soon as the worker is known; `wait_open` returns once the worker has registered it
2. one message a step, one event for each sequence; every event goes to its attempt's sink, in the order of arrival
3. broken: every attempt on it fails at once, and it is opened again, with back-off, for those that follow
4. an event nobody expects (its attempt was given up while the worker was away) is answered with Decode.Cancel
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

from router.cleanup import Cleanup
from twostep.errors import TwostepError, Unavailable
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 1.0
_CANCEL_TIMEOUT_S = 5.0
# Tokens of a sequence just cancelled are still under way for a moment: only later ones mean that the cancel was lost.
_CANCEL_SETTLES_S = 2.0
_MAX_REMEMBERED = 4096

AttemptId = tuple[str, int]


class Sink(Protocol):
    """Called in the event loop, must return at once and never raise."""

    def on_event(self, event: decode_pb2.DecodeEvent) -> None: ...


class DecodeStream:
    def __init__(
        self,
        stub: decode_pb2_grpc.DecodeAsyncStub,
        *,
        router_id: str,
        worker_id: str,
        cleanup: Cleanup,
        on_message: Callable[[], None],
        on_lost: Callable[[TwostepError], None],
    ) -> None:
        self._stub = stub
        self.router_id = router_id
        self._worker_id = worker_id
        self._cleanup = cleanup
        self._on_message = on_message
        self._on_lost = on_lost
        self._sinks: dict[AttemptId, Sink] = {}
        self._cancelled: OrderedDict[AttemptId, float] = OrderedDict()
        self._open = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def wait_open(self, timeout_s: float) -> bool:
        """False: the worker did not take the stream in time."""
        if self._open.is_set():
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._open.wait()
        except TimeoutError:
            return False
        return True

    def add(self, attempt: AttemptId, sink: Sink) -> None:
        assert attempt not in self._sinks, "an attempt has one sink"
        self._sinks[attempt] = sink

    def remove(self, attempt: AttemptId, *, cancel: bool) -> None:
        """Its events are dropped from now on. `cancel`: the worker may hold something of it, and is told to free it."""
        self._sinks.pop(attempt, None)
        if cancel:
            self._cancel(attempt)

    async def close(self) -> None:
        self._open.clear()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        complained = False
        while True:
            opened_at: float | None = None
            # A life without this stream has nothing of ours, so the call itself needs no deadline; keepalive pings end it if the
            # worker's machine vanishes.
            call = self._stub.Stream(decode_pb2.StreamRequest(router_id=self.router_id), wait_for_ready=False)
            try:
                await call.wait_for_connection()
                opened_at = time.monotonic()
                self._open.set()
                async for message in call:
                    self._on_message()
                    self._deal(message)
                raise Unavailable("the worker closed it")
            except Exception as error:  # whatever it is, the attempts on it must hear of it
                self._open.clear()
                if not isinstance(error, grpc.aio.AioRpcError | TwostepError):
                    log.error("token stream of decode worker %s", self._worker_id, exc_info=error)
                if opened_at is not None and time.monotonic() - opened_at > _LAST_BACKOFF_S:
                    backoff, complained = _FIRST_BACKOFF_S, False
                detail = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                if not complained:
                    log.warning("token stream of decode worker %s broke: %s", self._worker_id, detail)
                    complained = True
                if opened_at is not None:
                    self._on_lost(Unavailable(f"the token stream of decode worker {self._worker_id} broke: {detail}"))
            finally:
                call.cancel()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF_S)

    def _deal(self, message: decode_pb2.StepEvents) -> None:
        sinks = self._sinks
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
