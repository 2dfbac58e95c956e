"""Clients that do not read: whatever waits for one, of an answer, a file, metrics or an error, may wait for so long.

A client is cut when what waits for it has not become less for so long by as much as a very slow line takes. What it has in hand is half an
answer then, which says so: its length is missing, or its last chunk.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from aiohttp import web

# That is progress, or all that waits where it is less.
_LEAST_BYTES = 32 << 10
_LOOK_S = 1.0
# Unless told.
WRITE_TIMEOUT_S = 30.0
# What the kernel may hold of a connection that nobody reads. What is more stays where it is seen.
_MAX_UNSENT_BYTES = 128 << 10


class Readable(Protocol):
    """A connection. `num_resumed`: how often whoever writes to it was told to go on, as there was hardly anything left to send."""

    @property
    def transport(self) -> asyncio.Transport | None: ...

    @property
    def num_resumed(self) -> int: ...


class Connection(web.RequestHandler):
    """aiohttp's, as a Readable."""

    __slots__ = ("num_resumed",)

    num_resumed: int

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.num_resumed = 0
        bound_unsent(transport, _MAX_UNSENT_BYTES)
        super().connection_made(transport)

    def resume_writing(self) -> None:
        self.num_resumed += 1
        super().resume_writing()


def bound_unsent(transport: asyncio.BaseTransport, num_bytes: int) -> None:
    """How much the kernel takes before it has sent what it has."""
    sock = transport.get_extra_info("socket")
    if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT") and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)


class _Waiting(NamedTuple):
    """Since when so many bytes wait."""

    since: float
    num_bytes: int
    num_resumed: int


class Unread:
    """What waits for whom."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[Readable, _Waiting] = {}

    def look(self, connections: Iterable[Readable], now: float) -> None:
        """At all there are, from time to time. Cuts those that have taken nothing."""
        waiting: dict[Readable, _Waiting] = {}
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
    """Of all connections of a server, until cancelled."""
    unread, loop = Unread(timeout_s), asyncio.get_running_loop()
    while True:
        await asyncio.sleep(min(_LOOK_S, timeout_s / 4))
        unread.look([each for each in server.connections if isinstance(each, Connection)], loop.time())
