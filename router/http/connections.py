"""How many connections there are, and who makes room for a new one.

A connection costs memory whether it asks for anything or not, so there is a bound. At the bound a new one takes the place of

    1. the one that has been without a request for longest: those that are only kept, or whose heads never come, shut nobody out;
    2. where all have a request, the one whose body comes in slowest: who sends a byte now and then keeps no place;
    3. nobody's, where all bodies have come: the new one is told so, and closed.
"""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web

from router.http.bodies import Bodies
from router.http.errors import Handler, HttpError
from router.http.protocol import FAREWELL_S, Protocol, refusal

_FULL = refusal(
    HttpError(
        503,
        "this router has as many connections at work as it may; repeat later, use another router, or raise its --max-connections",
        code="too_many_connections",
        retry_after_s=1,
    )
)
# Those that are shut out and may still read why; more are cut at once.
_MAX_FAREWELLS = 64


class Connections:
    """Makes a protocol for each new connection of `server`. Each call of it is of constant cost: whoever opens thousands a second must
    not take the loop's time with them."""

    def __init__(self, server: web.Server, bodies: Bodies, *, limit: int, keepalive_timeout_s: float) -> None:
        self._server = server
        self._bodies = bodies
        self._limit = limit
        self._keepalive_timeout_s = keepalive_timeout_s
        self._open: set[Protocol] = set()
        # In the order in which they became so.
        self._idle: dict[Protocol, None] = {}
        self._num_farewells = 0

    def __call__(self) -> asyncio.BaseProtocol:
        if len(self._open) >= self._limit and not self._make_room():
            return _Refused(self)
        return Protocol(self._server, self, keepalive_timeout_s=self._keepalive_timeout_s)

    def opened(self, connection: Protocol) -> None:
        self._open.add(connection)
        self._idle[connection] = None

    def works(self, connection: Protocol) -> None:
        self._idle.pop(connection, None)

    def rests(self, connection: Protocol) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def closed(self, connection: Protocol) -> None:
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
        slowest = self._bodies.cut_slowest(
            HttpError(503, "the router has no room for so slow a body, as others come; repeat later, and faster", retry_after_s=1)
        )
        if slowest is None:
            return False
        assert isinstance(slowest, Protocol), "bodies come over connections of this server"
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
        """Nobody reads it."""


@web.middleware
async def at_work(request: web.Request, handler: Handler) -> web.StreamResponse:
    assert isinstance(request.protocol, Protocol), "see Connections"
    request.protocol.works()
    return await handler(request)
