"""Connections: how many there are, how much each may hold, and how long one may stall.

A connection costs memory whether it asks for anything or not, so there is a bound. At the bound a new one takes the place of

    1. the one that has been without a request for longest: those that are only kept, or whose heads never come, keep no place;
    2. where all have a request, the one whose body comes in slowest: who sends a byte now and then keeps no place;
    3. none, where all bodies have come: the new one is refused with 503, and closed.

Clients that do not read are cut: when what waits for one, of an answer, a file, metrics or an error, has not become less for so long by as
much as a very slow line takes. What such a client has in hand is half an answer, which says so: its length is missing, or its last chunk.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_request import BaseRequest

from router.http.errors import Handler, HttpError, body_of, error_response

# That is progress of a client which reads, or all that waits for it where that is less.
_LEAST_BYTES = 32 << 10
_LOOK_S = 1.0
# How long a client may read nothing, unless a flag says otherwise.
WRITE_TIMEOUT_S = 30.0
# What the kernel may hold of a connection whose client does not read. What is more stays where it is seen.
_MAX_UNSENT_BYTES = 128 << 10
_TOO_LONG = "a line of the request's head is too long; keep the URL and each header under 8 KiB"
_NO_HTTP = "this is no HTTP request that can be read; send HTTP/1.1 with a Host, to an https:// address if the router has --tls-cert"
# Of one request's head, all its lines together.
_MAX_HEAD_BYTES = 64 << 10
# Up to twice as much of a body is kept before it is read.
_READ_BUFFER_BYTES = 64 << 10
# Of what came, one turn of the loop takes so much, and about so many line ends: each may end a chunk of one byte, which costs microseconds.
_TURN_BYTES = 256 << 10
_TURN_LINES = 512
# The body of a refused request is read for so long, so that its sender sees the answer.
_LINGERING_S = 5.0
# A client that is shut out may read why for so long.
FAREWELL_S = 1.0
# Those that are shut out and may still read why; more are cut at once.
_MAX_FAREWELLS = 64


class HttpConnection(web.RequestHandler):
    """aiohttp's, with bounds on what it keeps, and its own words where there is no request to answer. Nothing that is packed is unpacked: a
    megabyte of gzip may be a gigabyte. `received`: all bytes that have come; `num_resumed`: how often its writer could go on."""

    __slots__ = ("_backlog", "_connections", "_head_bytes", "_last_body", "_turn", "num_resumed", "received")

    def __init__(self, server: web.Server, connections: Connections, *, keepalive_timeout_s: float) -> None:
        options: Mapping[str, Any] = {
            "keepalive_timeout": keepalive_timeout_s,
            "access_log": None,
            "logger": connection_log(),
            "auto_decompress": False,
            "lingering_time": _LINGERING_S,
            "read_bufsize": _READ_BUFFER_BYTES,
        }
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._connections = connections
        # What came and waits for its turn.
        self._backlog = bytearray()
        self._turn: asyncio.Handle | None = None
        self._head_bytes = 0
        self._last_body: StreamReader | None = None
        self.received = self.num_resumed = 0

    def works(self) -> None:
        self._connections.works(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        bound_unsent(transport, _MAX_UNSENT_BYTES)
        super().connection_made(transport)
        self._connections.opened(self)

    def resume_writing(self) -> None:
        self.num_resumed += 1
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.closed(self)
        self._backlog.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if not data or (not self._backlog and data.count(b"\r\n") <= _TURN_LINES):
            self._take(data)
        else:
            self._backlog += data
            self._pause_transport_reading()
            self._take_turn()

    def _take_turn(self) -> None:
        """Reads of one connection now, and of another one soon if there is need."""
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        # aiohttp, which holds what it has parsed, says when it goes on.
        if not self._backlog or self._reading_paused or self._buffer_paused:
            return
        most = min(len(self._backlog), _TURN_BYTES)
        num_lines = self._backlog.count(b"\r\n", 0, most)
        size = most if num_lines <= _TURN_LINES else most * _TURN_LINES // num_lines
        piece = bytes(self._backlog[:size])
        del self._backlog[:size]
        self._take(piece)
        if not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _resume_transport_reading(self) -> None:
        if not self._backlog:
            super()._resume_transport_reading()
        elif self._turn is None:
            self._turn = self._loop.call_soon(self._take_turn)

    def _take(self, data: bytes) -> None:
        in_body = self._last_body is not None and not self._last_body.is_eof()
        num_requests = self._request_count
        super().data_received(data)
        if self._request_count > num_requests or in_body:
            self._head_bytes = 0
            if self._messages:
                self._last_body = self._messages[-1][1]
            return
        # aiohttp bounds a head's lines and their number: a megabyte in all.
        self._head_bytes += len(data)
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse(HttpError(431, f"the request's head has more than {_MAX_HEAD_BYTES} bytes; send fewer or shorter headers"))

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._connections.rests(self)

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """No application has seen the request: there is no name and no key of it, and nothing of it is quoted."""
        # It logs, and raises ConnectionError for what is half answered.
        super().handle_error(request, status, exc, message)
        why = (
            "something failed in the router; its log says what"
            if status >= 500
            else _TOO_LONG
            if isinstance(exc, LineTooLong)
            else _NO_HTTP
        )
        response = error_response(HttpError(status, why))
        response.headers["Server"] = "twostep"
        response.force_close()
        return response

    def _refuse(self, error: HttpError) -> None:
        """Says so, unless an answer to an earlier request is half written, and closes."""
        transport = self.transport
        if transport is not None and self._current_request is None:
            transport.write(refusal(error))
        self.force_close()
        if transport is not None:
            self._loop.call_later(FAREWELL_S, transport.abort)


def refusal(error: HttpError) -> bytes:
    """Returns a whole HTTP answer that refuses a connection, after which the connection is closed."""
    status, body, headers = body_of(error)
    content = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Refused", "Content-Type: application/json", "Server: twostep", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode("ascii") + content


_FULL = refusal(
    HttpError(
        503,
        "this router has as many connections at work as it may; repeat later, use another router, or raise its --max-connections",
        code="too_many_connections",
        retry_after_s=1,
    )
)


class Connections:
    """Makes a protocol for each new connection of `server`, and hears what becomes of it. Each call costs the same however many there
    are: a client that opens thousands a second must not take the loop's time with them. `cut_slowest` ends the body that comes in slowest
    with an error, and returns its connection, None without any."""

    def __init__(self, server: web.Server, cut_slowest: Callable[[HttpError], object], *, limit: int, keepalive_timeout_s: float) -> None:
        self._server = server
        self._cut_slowest = cut_slowest
        self._limit = limit
        self._keepalive_timeout_s = keepalive_timeout_s
        self._open: set[HttpConnection] = set()
        # In the order in which they became so.
        self._idle: dict[HttpConnection, None] = {}
        self._num_farewells = 0

    def __call__(self) -> asyncio.BaseProtocol:
        if len(self._open) >= self._limit and not self._make_room():
            return _Refused(self)
        return HttpConnection(self._server, self, keepalive_timeout_s=self._keepalive_timeout_s)

    def opened(self, connection: HttpConnection) -> None:
        self._open.add(connection)
        self._idle[connection] = None

    def works(self, connection: HttpConnection) -> None:
        """Hears that it has a request to answer."""
        self._idle.pop(connection, None)

    def rests(self, connection: HttpConnection) -> None:
        """Hears that its request is answered."""
        if connection in self._open:
            self._idle[connection] = None

    def closed(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def leave(self, transport: asyncio.Transport) -> None:
        """Cuts it, after a moment in which it may read what it was told."""
        if self._num_farewells >= _MAX_FAREWELLS:
            transport.abort()
            return
        self._num_farewells += 1

        def end() -> None:
            self._num_farewells -= 1
            transport.abort()

        asyncio.get_running_loop().call_later(FAREWELL_S, end)

    def _make_room(self) -> bool:
        if self._idle:
            idle = next(iter(self._idle))
            self.closed(idle)
            # Not closed: what it was sent may never be read.
            if idle.transport is not None:
                idle.transport.abort()
            return True
        slowest = self._cut_slowest(
            HttpError(503, "the router has no room for so slow a body, as others come; repeat later, and faster", retry_after_s=1)
        )
        if slowest is None:
            return False
        assert isinstance(slowest, HttpConnection), "bodies come over connections of this server"
        self.closed(slowest)
        if slowest.transport is not None:
            self.leave(slowest.transport)
        return True


class _Refused(asyncio.Protocol):
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not all loops' transports are asyncio's by inheritance.
        stream = cast(asyncio.Transport, transport)
        stream.write(_FULL)
        if stream.can_write_eof():
            stream.write_eof()
        # Closed at once, with bytes of the request unread, the connection would be reset before the answer is read.
        self._connections.leave(stream)

    def data_received(self, data: bytes) -> None:
        """Drops it."""


@web.middleware
async def at_work(request: web.Request, handler: Handler) -> web.StreamResponse:
    assert isinstance(request.protocol, HttpConnection), "see Connections"
    request.protocol.works()
    return await handler(request)


def bound_unsent(transport: asyncio.BaseTransport, num_bytes: int) -> None:
    """Bounds how much the kernel takes before it has sent what it has."""
    sock = transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT") and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)


class _Waiting(NamedTuple):
    """Since when so many bytes wait."""

    since: float
    num_bytes: int
    num_resumed: int


class UnreadOutput:
    """Remembers how much waits for each connection, and since when."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[HttpConnection, _Waiting] = {}

    def look(self, connections: Iterable[HttpConnection], now: float) -> None:
        """Looks at all connections. Called from time to time. Cuts those that have taken nothing."""
        waiting: dict[HttpConnection, _Waiting] = {}
        for each in connections:
            transport = each.transport
            num_bytes = 0 if transport is None else transport.get_write_buffer_size()
            if transport is None or not num_bytes:
                continue
            before = self._waiting.get(each)
            if before is None or each.num_resumed > before.num_resumed or num_bytes <= before.num_bytes - _LEAST_BYTES:
                waiting[each] = _Waiting(now, num_bytes, each.num_resumed)
            elif now - before.since > self._timeout_s:
                transport.abort()
            else:
                waiting[each] = before
        self._waiting = waiting


async def cut_unread(server: web.Server, timeout_s: float) -> None:
    """Looks at all connections of a server, until cancelled."""
    unread, loop = UnreadOutput(timeout_s), asyncio.get_running_loop()
    while True:
        await asyncio.sleep(min(_LOOK_S, timeout_s / 4))
        unread.look([each for each in server.connections if isinstance(each, HttpConnection)], loop.time())


class _Discreet(logging.Filter):
    """aiohttp quotes what it could not read, and that may be a line with somebody's key; and tells clients that went away as errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        clients = (HttpProcessingError, HttpError, web.RequestPayloadError, ConnectionError)
        if record.exc_info and isinstance(error := record.exc_info[1], clients):
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            record.msg, record.args = "a client sent what is no HTTP request, or went away (%s)", (type(error).__name__,)
            record.exc_info = record.exc_text = None
            return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
        return True


_DISCREET = _Discreet()


def connection_log() -> logging.Logger:
    """Returns the logger for aiohttp's own words about connections."""
    log = logging.getLogger("router.http.connection")
    log.addFilter(_DISCREET)
    return log
