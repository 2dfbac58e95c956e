"""A stream of server-sent events whose head goes out with the first of them.

Until then the request may still fail with a status of its own. Afterwards a failure is an event, {"error": ...}, with nothing behind it: no
`[DONE]`, so that half an answer is not taken for a whole one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from router.http.errors import body_of
from router.http.front import REQUEST_ID
from twostep.errors import ResourceExhausted, Unavailable

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
# Proxies close what is silent for a minute, some for half of it.
KEEP_ALIVE_S = 15.0
_TICK_S = 0.5
# What the kernel may hold of a stream that nobody reads; what is more stays here, where it is bounded in tokens.
_MAX_UNSENT_BYTES = 32 << 10
_LAST_WORD_S = 1.0


class EventStream:
    """`send` may be called by several tasks. Without `keep_alive_s` comments go out only once an event has: what the client was not told to
    expect must not cost a failure its status."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], keep_alive_s: float | None = None) -> None:
        self._request = request
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
                transport = self._request.transport
                sock = None if transport is None else transport.get_extra_info("socket")
                if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT") and sock.family in (socket.AF_INET, socket.AF_INET6):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)
                self._writer = await self._response.prepare(self._request)
                assert self._writer is not None, "it is prepared once, here"
            return self._writer

    async def keep_alive(self, now: float) -> None:
        """A comment, if nothing else was sent for long and nothing waits to be."""
        transport = self._request.transport
        if now - self._last_sent < self._interval_s or not (self.open or self._early) or transport is None:
            return
        if transport.get_write_buffer_size() == 0:
            await self.send(_KEEP_ALIVE)

    async def fail(self, error: BaseException) -> None:
        """The last event of a stream that is open."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return
        if isinstance(error, ResourceExhausted) and transport.get_write_buffer_size() > 0:
            # It was cut because it reads nothing: a word more would wait like the others.
            transport.abort()
            return
        _, body, _ = body_of(error)
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await self._response.write(b"data: " + json.dumps(body).encode() + b"\n\n")
                await self._response.write_eof()
        except (TimeoutError, ConnectionError):
            transport.abort()


class OpenStreams:
    """All event streams of a server, for whatever is to be done to them from time to time."""

    def __init__(self) -> None:
        self._streams: set[EventStream] = set()

    @asynccontextmanager
    async def serving(self, stream: EventStream) -> AsyncIterator[None]:
        """Around all that is written. A failure before the first event is the caller's; a later one is told in the stream."""
        self._streams.add(stream)
        try:
            yield
        except asyncio.CancelledError:
            # Either the client is gone, and hears nothing more; or the server is going.
            if stream.open:
                await stream.fail(Unavailable("the router is shutting down; repeat the request on another"))
            raise
        except Exception as error:
            if not stream.open:
                raise
            await stream.fail(error)
        finally:
            self._streams.discard(stream)

    async def keep_alive(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            for stream in list(self._streams):
                try:
                    await stream.keep_alive(now)
                except ConnectionError:
                    continue  # its handler learns it too


STREAMS: web.AppKey[OpenStreams] = web.AppKey("streams", OpenStreams)
