"""Accepts new connections of a port, a bounded number in each turn of the event loop. The event loop's own server accepts all pending
connections in one turn, so a client that opens thousands at once delays all others."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

# Each costs some tenths of a millisecond.
_OF_A_TURN = 16
_BACKLOG = 1024
# Without room for a socket, nothing is taken for so long.
_PAUSE_S = 1.0


# A name may stand for addresses that this machine does not have: localhost, where there is no IPv6.
_MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class Acceptor:
    """open(), close(). Protocols are made by `make`."""

    def __init__(
        self, make: Callable[[], asyncio.BaseProtocol], *, tls: ssl.SSLContext | None = None, handshake_s: float | None = None
    ) -> None:
        self._make, self._tls, self._handshake_s = make, tls, handshake_s
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._beginning: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> int:
        """Listens on all addresses of `host`, and returns the port. Raises OSError."""
        missing: OSError | None = None
        for family, kind, protocol, _, address in await self._loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                self._sockets.append(_listening(socket.socket(family, kind, protocol), address))
            except OSError as error:
                if error.errno in _MISSING:
                    missing = error
                    continue
                self.close()
                raise
        if missing is not None and not self._sockets:
            raise missing
        for sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stops accepting; open connections go on. Idempotent."""
        for sock in self._sockets:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._sockets.clear()

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_OF_A_TURN):
            try:
                taken, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be taken for %g s: %s", _PAUSE_S, error.strerror or error)
                self._loop.remove_reader(sock.fileno())
                self._loop.call_later(_PAUSE_S, self._resume, sock)
                return
            taken.setblocking(False)
            task = self._loop.create_task(self._begin(taken))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    def _resume(self, sock: socket.socket) -> None:
        if sock in self._sockets:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    async def _begin(self, taken: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, taken, ssl=self._tls, ssl_handshake_timeout=self._handshake_s)
        except (OSError, TimeoutError):
            # It is gone, or speaks no TLS.
            taken.close()


def _listening(sock: socket.socket, address: Any) -> socket.socket:
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
