"""How many connections there are, and what is said of those that speak no HTTP.

A connection costs memory whether it asks for anything or not, so there is a bound. At the bound a new one takes the place of the one that
has been there for longest without a request under way: connections that are only kept, or whose heads never come, shut nobody out. If all
of them are at work, the new one is told so, and closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from router.http.errors import Handler
from router.http.protocol import Protocol

# Somebody who is refused reads the answer within so long, or not at all.
_LINGER_S = 1.0
_MESSAGE = "this router has as many connections at work as it may; repeat later, use another router, or raise its --max-connections"
_BODY = json.dumps({"error": {"message": _MESSAGE, "type": "server_error", "param": None, "code": "too_many_connections"}}).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class Connections:
    """Makes a protocol for each new connection of `server`; `options` are those of web.RequestHandler."""

    def __init__(self, server: web.Server, limit: int, at_work: set[asyncio.BaseProtocol], options: Mapping[str, Any]) -> None:
        self._server = server
        self._options = options
        self._limit = limit
        self._at_work = at_work

    def __call__(self) -> asyncio.BaseProtocol:
        connections = self._server.connections
        # The oldest first. Those that are closed already may still be listed.
        open_ones = [each for each in connections if each.transport is not None] if len(connections) >= self._limit else ()
        if len(open_ones) < self._limit:
            return self._protocol()
        idle = next((each for each in open_ones if each not in self._at_work), None)
        if idle is None:
            return _Refused()
        idle.force_close()
        return self._protocol()

    def _protocol(self) -> asyncio.BaseProtocol:
        return Protocol(self._server, loop=asyncio.get_running_loop(), **self._options)


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "these are TCP servers"
        transport.write(_REFUSAL)
        if transport.can_write_eof():
            transport.write_eof()
        # Closed at once, with bytes of the request unread, the connection would be reset before the answer is read.
        asyncio.get_running_loop().call_later(_LINGER_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Nobody reads it."""


AT_WORK: web.AppKey[set[asyncio.BaseProtocol]] = web.AppKey("at_work", set)


@web.middleware
async def at_work(request: web.Request, handler: Handler) -> web.StreamResponse:
    working = request.app[AT_WORK]
    working.add(request.protocol)
    try:
        return await handler(request)
    finally:
        working.discard(request.protocol)


class _Discreet(logging.Filter):
    """aiohttp quotes what it could not read, and that may be a line with somebody's key; and tells clients that went away as errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(error := record.exc_info[1], (HttpProcessingError, web.RequestPayloadError, ConnectionError)):
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
