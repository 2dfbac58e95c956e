"""A port that speaks HTTP: its connections, their bounds, its end."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from aiohttp import web

from router.http.bodies import BODIES, Bodies
from router.http.connections import WRITE_TIMEOUT_S, Connections, cut_unread
from twostep.errors import SetupError

_HANDSHAKE_S = 10.0
# What still runs at the end may, unless told.
_LAST_S = 60.0


class Listener:
    """start(), then stop_listening() and close(). `port` is the real one once it is started; `flag` names it."""

    def __init__(
        self,
        app: web.Application,
        *,
        host: str,
        port: int,
        flag: str,
        tls: ssl.SSLContext | None,
        max_connections: int,
        keepalive_s: float,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        """`write_timeout_s`: a client that reads nothing of its answer for so long is cut. `beside`: what runs for as long as the port is
        open."""
        self.host, self.port, self._flag = host, port, flag
        self._runner = web.AppRunner(app, handler_cancellation=True)
        self._bodies = app[BODIES] = Bodies()
        self._tls, self._beside = tls, beside
        self._max_connections, self._keepalive_s, self._write_timeout_s = max_connections, keepalive_s, write_timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises SetupError if the port is taken."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "it is set up"
        limit, keepalive_s = self._max_connections, self._keepalive_s
        connections = Connections(server, self._bodies.cut_slowest, limit=limit, keepalive_timeout_s=keepalive_s)
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                connections,
                self.host,
                self.port,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
                backlog=1024,
                reuse_address=True,
            )
        except OSError as error:
            await self._runner.cleanup()
            why = error.strerror or error
            raise SetupError(
                f"cannot serve HTTP on {self.host}:{self.port} ({why}); choose another port with {self._flag}, -1 for none"
            ) from error
        running = (cut_unread(server, self._write_timeout_s), self._bodies.run(), *(run() for run in self._beside))
        self._tasks = [asyncio.create_task(each) for each in running]
        self.port = int(self._listening.sockets[0].getsockname()[1])

    def stop_listening(self) -> None:
        """Closes idle connections, and the others when their request is over."""
        if self._listening is not None:
            self._listening.close()
        if self._runner.server is not None:
            self._runner.server.pre_shutdown()

    async def close(self, grace_s: float = _LAST_S) -> None:
        """Cuts what still runs after `grace_s`."""
        self.stop_listening()
        if self._runner.server is not None:
            await self._runner.server.shutdown(grace_s)
        for task in self._tasks:
            task.cancel()
        await self._runner.cleanup()
