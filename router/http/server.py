"""A port that speaks HTTP, and the one of a router: its middleware and routes, TLS, graceful drain."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from aiohttp import web

from router.http import batches, chat, completions, embeddings, messages, openapi, responses, stored_responses, system, tokens, ui
from router.http.acceptor import Acceptor
from router.http.bodies import BODIES, Bodies
from router.http.connections import WRITE_TIMEOUT_S, Connections, at_work, cut_unread
from router.http.errors import errors
from router.http.front import FRONT, Front
from router.http.middleware import count, end_connection, identified, named, nothing_new, observed, tell_limits
from router.http.origins import ORIGINS, Origins, preflights, same_site, tell_origin
from router.http.sse import ANSWERS, Answers
from router.http.whole_answer import ENCODER, AnswerEncoder
from twostep.errors import SetupError
from twostep.settings.tls import TlsFiles

_KEEPALIVE_S = 75.0
_HANDSHAKE_S = 10.0
# What still runs at the end may so long, unless told.
_LAST_S = 60.0
# What is no answer, once answers have ended.
_AFTER_ANSWERS_S = 1.0


class Listener:
    """start(), close(). `port` is the real one once it is started; `flag` names it."""

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
        self._acceptor: Acceptor | None = None

    async def start(self) -> None:
        """Raises SetupError if the port is taken."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None, "it is set up"
        limit, keepalive_s = self._max_connections, self._keepalive_s
        connections = Connections(server, self._bodies.cut_slowest, limit=limit, keepalive_timeout_s=keepalive_s)
        acceptor = Acceptor(connections, tls=self._tls, handshake_s=None if self._tls is None else _HANDSHAKE_S)
        try:
            self.port = await acceptor.open(self.host, self.port)
        except OSError as error:
            await self._runner.cleanup()
            why = error.strerror or error
            raise SetupError(
                f"cannot serve HTTP on {self.host}:{self.port} ({why}); choose another port with {self._flag}, -1 for none"
            ) from error
        running = (cut_unread(server, self._write_timeout_s), self._bodies.run(), *(run() for run in self._beside))
        self._tasks = [asyncio.create_task(each) for each in running]
        self._acceptor = acceptor

    async def close(self, grace_s: float = _LAST_S) -> None:
        """Closes idle connections, and the others when their request is over. Cuts what still runs after `grace_s`."""
        if self._acceptor is not None:
            self._acceptor.close()
        if self._runner.server is not None:
            self._runner.server.pre_shutdown()
            await self._runner.server.shutdown(grace_s)
        for task in self._tasks:
            task.cancel()
        await self._runner.cleanup()


class HttpServer(Listener):
    """start(), drain(), close()."""

    def __init__(
        self,
        front: Front,
        *,
        host: str,
        port: int,
        tls: TlsFiles,
        max_connections: int,
        write_timeout_s: float,
        allowed_hosts: Collection[str] = (),
    ) -> None:
        """Raises SetupError for unreadable TLS files."""
        self._parser = front.parser
        self._app = make_app(front, Origins(host=host, allowed_hosts=allowed_hosts, allowed_origins=front.allowed_origins))
        super().__init__(
            self._app,
            host=host,
            port=port,
            flag="--port",
            tls=ssl_context(tls),
            max_connections=max_connections,
            keepalive_s=_KEEPALIVE_S,
            write_timeout_s=write_timeout_s,
            beside=[self._app[ANSWERS].keep_alive],
        )

    async def drain(self, grace_s: float) -> None:
        """Answers may end within `grace_s`. The port stays open until close(): it says that the router drains, refuses
        new work, and ends each connection with its next answer."""
        await self._app[ANSWERS].drain(grace_s)

    async def close(self, grace_s: float = _AFTER_ANSWERS_S) -> None:
        await super().close(grace_s)
        self._app[ENCODER].close()
        await self._parser.close()


def make_app(front: Front, origins: Origins) -> web.Application:
    app = web.Application(
        middlewares=[at_work, observed, preflights, named, errors, nothing_new, same_site, identified],
        client_max_size=front.max_body_bytes,
    )
    app.on_response_prepare.append(tell_limits)
    app.on_response_prepare.append(tell_origin)
    app.on_response_prepare.append(end_connection)
    app[FRONT] = front
    app[ORIGINS] = origins
    count(app)
    app[ANSWERS], app[ENCODER] = Answers(), AnswerEncoder()
    app[ui.PAGE] = ui.load_page()
    for module in (chat, completions, embeddings, responses, stored_responses, messages, batches, tokens, system, openapi, ui):
        app.add_routes(module.routes)
    openapi.describe(app)
    return app


def ssl_context(tls: TlsFiles) -> ssl.SSLContext | None:
    """With `ca`, clients must show a certificate of it, as they must to gRPC's port: there is no way around. Raises SetupError."""
    if not tls.enabled or tls.cert is None or tls.key is None:
        return None
    tls.read()  # says which flag is wrong
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except (ssl.SSLError, OSError) as error:
        raise SetupError(f"--tls-cert {tls.cert} and --tls-key {tls.key} do not go together ({error}); give a matching pair") from error
    if tls.ca is not None:
        try:
            context.load_verify_locations(tls.ca)
        except (ssl.SSLError, OSError) as error:
            raise SetupError(f"--tls-ca {tls.ca} holds no certificate ({error}); give a PEM file of the authority") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context
