"""HTTP/1.1 of one connection: aiohttp's, with bounds on what it keeps, and with its own words where there is no request to answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any
from typing import Protocol as Interface

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_request import BaseRequest

from router.http.errors import HttpError, body_of, error_response
from router.http.unread import Connection

_TOO_LONG = "a line of the request's head is too long; keep the URL and each header under 8 KiB"
_NO_HTTP = "this is no HTTP request that can be read; send HTTP/1.1 with a Host, to an https:// address if the router has --tls-cert"
# Of one request's head, all its lines together.
_MAX_HEAD_BYTES = 64 << 10
# Up to twice as much of a body is kept that nobody reads yet.
_READ_BUFFER_BYTES = 64 << 10
# Of what came, one turn of the loop takes so much, and about so many line ends: each may end a chunk of one byte, which costs microseconds.
_TURN_BYTES = 256 << 10
_TURN_LINES = 512
# A body that nobody wants, as its request is refused, is read for so long: its sender is to see the answer.
_LINGERING_S = 5.0
# Whoever is shut out reads why within so long, or not at all.
FAREWELL_S = 1.0


class Watcher(Interface):
    """Is told what becomes of connections."""

    def opened(self, connection: Protocol) -> None: ...

    def works(self, connection: Protocol) -> None:
        """It has a request to answer."""

    def rests(self, connection: Protocol) -> None:
        """Its request is answered."""

    def closed(self, connection: Protocol) -> None: ...


class Protocol(Connection):
    """Nothing that is packed is unpacked: a megabyte of gzip may be a gigabyte. `received`: all bytes that have come."""

    __slots__ = ("_backlog", "_head_bytes", "_last_body", "_turn", "_watcher", "received")

    def __init__(self, server: web.Server, watcher: Watcher, *, keepalive_timeout_s: float) -> None:
        options: Mapping[str, Any] = {
            "keepalive_timeout": keepalive_timeout_s,
            "access_log": None,
            "logger": connection_log(),
            "auto_decompress": False,
            "lingering_time": _LINGERING_S,
            "read_bufsize": _READ_BUFFER_BYTES,
        }
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._watcher = watcher
        # What came and waits for its turn.
        self._backlog = bytearray()
        self._turn: asyncio.Handle | None = None
        self._head_bytes = 0
        self._last_body: StreamReader | None = None
        self.received = 0

    def works(self) -> None:
        self._watcher.works(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watcher.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._watcher.closed(self)
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
        """One now, and another one soon if there is need."""
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
            self._watcher.rests(self)

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
    """A whole answer, after which the connection is closed."""
    status, body, headers = body_of(error)
    told = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Refused", "Content-Type: application/json", "Server: twostep", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(told)}", "", ""]).encode("ascii") + told


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
    """For aiohttp's own words about connections."""
    log = logging.getLogger("router.http.connection")
    log.addFilter(_DISCREET)
    return log
