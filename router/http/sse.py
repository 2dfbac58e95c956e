"""A stream of server-sent events whose head goes out with the first of them.

Until then the request may still fail with a status of its own. Afterwards a failure is an event, {"error": ...}, with nothing behind it: no
`[DONE]`, so that half an answer is not taken for a whole one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from router.http.connections import bound_unsent
from router.http.errors import body_of
from router.http.front import REQUEST_ID
from twostep.errors import ResourceExhausted, Unavailable

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
# Proxies close what is silent for a minute, some for half of it.
KEEP_ALIVE_S = 15.0
_TICK_S = 0.5
# What the kernel may hold of a stream whose client does not read; what is more stays here, where it is bounded in tokens.
_MAX_UNSENT_BYTES = 32 << 10
_LAST_WORD_S = 1.0


def failure_event(error: BaseException) -> bytes:
    return b"data: " + json.dumps(body_of(error)[1]).encode() + b"\n\n"


class EventStream:
    """`send` may be called by several tasks. Without `keep_alive_s` comments go out only once an event has: what the client was not told to
    expect must not cost a failure its status."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        keep_alive_s: float | None = None,
        *,
        ping: bytes = KEEP_ALIVE,
        failure: Callable[[BaseException], bytes] = failure_event,
    ) -> None:
        """`failure` writes the last event of a stream that breaks off."""
        self._request = request
        self._ping, self._failure = ping, failure
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                "x-request-id": request[REQUEST_ID],
                **headers,
            }
        )
        self._opening = asyncio.Lock()
        self._early = keep_alive_s is not None
        self._interval_s = keep_alive_s or KEEP_ALIVE_S
        self._last_sent = time.monotonic()
        self._writer: AbstractStreamWriter | None = None

    @property
    def open(self) -> bool:
        """The client has the head."""
        return self._writer is not None

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, data: bytes) -> None:
        """Waits while the client has enough to read."""
        self._last_sent = time.monotonic()
        writer = self._writer or await self._open()
        await writer.write(data)

    async def _open(self) -> AbstractStreamWriter:
        async with self._opening:
            if self._writer is None:
                if self._request.transport is not None:
                    bound_unsent(self._request.transport, _MAX_UNSENT_BYTES)
                self._writer = await self._response.prepare(self._request)
                assert self._writer is not None, "it is prepared once, here"
            return self._writer

    async def keep_alive(self, now: float) -> None:
        """Sends a comment, if nothing else was sent for long and nothing waits to be."""
        transport = self._request.transport
        if now - self._last_sent < self._interval_s or not (self.open or self._early) or transport is None:
            return
        if transport.get_write_buffer_size() == 0:
            await self.send(self._ping)

    async def fail(self, error: BaseException) -> None:
        """Sends the last event of a stream that is open."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return
        if isinstance(error, ResourceExhausted) and transport.get_write_buffer_size() > 0:
            # It was cut because it reads nothing: a word more would wait like the others.
            transport.abort()
            return
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await self._response.write(self._failure(error))
                await self._response.write_eof()
        except (TimeoutError, ConnectionError):
            transport.abort()


class Answers:
    """All answers of a server that are under way, for what is to be done to them from time to time, and in the end."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], EventStream | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended: set[asyncio.Task[Any]] = set()
        # The server goes, and gives none any more.
        self.draining = False

    @asynccontextmanager
    async def giving(self, stream: EventStream | None) -> AsyncIterator[None]:
        """Gives a context around all of an answer; None: it is not streamed. A failure before the first event is the caller's; a later one
        is told in the stream. Raises Unavailable if the server goes."""
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._tasks[task] = stream
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended or task.uncancel() > 0:
                raise  # the client is gone
            error = Unavailable("the router is shutting down; repeat the request on another")
            if stream is None or not stream.open:
                raise error from None
            await stream.fail(error)
        except Exception as error:
            if stream is None or not stream.open:
                raise
            await stream.fail(error)
        finally:
            del self._tasks[task]
            self._ended.discard(task)
            if not self._tasks:
                self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Waits for the streams to end. Those that have not ended within `grace_s` are told that the server goes."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            self._ended |= self._tasks.keys()
            for task in list(self._tasks):
                task.cancel()
            try:
                async with asyncio.timeout(2 * _LAST_WORD_S):
                    await self._idle.wait()
            except TimeoutError:
                return  # connections are closed next

    async def keep_alive(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            for stream in list(self._tasks.values()):
                try:
                    if stream is not None:
                        await stream.keep_alive(now)
                except ConnectionError:
                    continue  # its handler learns it too


ANSWERS: web.AppKey[Answers] = web.AppKey("answers", Answers)
