"""The HTTP server of a router: limits, TLS, request ids, graceful drain. What it serves stands in the other modules of this package."""

from __future__ import annotations

import asyncio
import re
import ssl
import uuid
from collections.abc import AsyncIterator, Collection

from aiohttp import web

from router.http import batches, chat, completions, counting, files, openapi, refusals, system, tokens, tracing, ui
from router.http.bodies import watch_bodies
from router.http.connections import at_work
from router.http.cors import preflights, tell_origin
from router.http.errors import Handler, errors
from router.http.front import FRONT, REQUEST_ID, Front, forwarded
from router.http.keys import identified, tell_limits
from router.http.listener import Listener
from router.http.origins import ORIGINS, Origins, same_site
from router.http.sse import ANSWERS, Answers
from router.http.whole_answer import ENCODER, Encoder
from twostep.errors import SetupError
from twostep.process.log import concerning
from twostep.process.tracing import trace_id_of
from twostep.settings.tls import TlsFiles

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEEPALIVE_S = 75.0
# For what is no answer, once answers have ended.
_LAST_S = 1.0


class HttpServer:
    """start(), drain(). `port` is the real one once it is started."""

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
        self.host, self.port = host, port
        self._front = front
        self._app = make_app(front, Origins(host=host, allowed_hosts=allowed_hosts, allowed_origins=front.allowed_origins))
        self._listener = Listener(
            self._app,
            tls=ssl_context(tls),
            max_connections=max_connections,
            keepalive_s=_KEEPALIVE_S,
            write_timeout_s=write_timeout_s,
        )

    async def start(self) -> int:
        """Returns the real port. Raises SetupError if it is taken."""
        self.port = await self._listener.open(self.host, self.port, flag="--http-port")
        return self.port

    async def drain(self, grace_s: float) -> None:
        """No new connections; what runs may end within `grace_s`."""
        self._listener.stop_listening()
        await self._app[ANSWERS].drain(grace_s)
        await self._listener.close(_LAST_S)
        await self._front.parser.close()


def make_app(front: Front, origins: Origins) -> web.Application:
    app = web.Application(
        middlewares=[at_work, counting.counted, preflights, tracing.traced, _named, errors, same_site, identified],
        client_max_size=front.max_body_bytes,
    )
    app.on_response_prepare.append(tell_limits)
    app.on_response_prepare.append(tell_origin)
    app[FRONT] = front
    app[ORIGINS] = origins
    watch_bodies(app)
    counting.count(app)
    app[ANSWERS] = Answers()
    app.cleanup_ctx.append(_keeping_alive)
    app.cleanup_ctx.append(_encoding)
    app[ui.PAGE] = ui.load_page()
    for module in (chat, completions, files, batches, tokens, system, openapi, ui):
        app.add_routes(module.routes)
    app.add_routes(refusals.routes)
    openapi.describe(app)
    return app


async def _keeping_alive(app: web.Application) -> AsyncIterator[None]:
    task = asyncio.create_task(app[ANSWERS].keep_alive())
    yield
    task.cancel()
    await asyncio.wait((task,))


async def _encoding(app: web.Application) -> AsyncIterator[None]:
    encoder = app[ENCODER] = Encoder()
    yield
    encoder.close()


@web.middleware
async def _named(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every request has a name, and every answer says it: the client's own `x-request-id`, or a new one."""
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
    concerning(request[REQUEST_ID], trace_id_of(forwarded(request)))
    response = await handler(request)
    if not response.prepared:
        response.headers.setdefault("x-request-id", request[REQUEST_ID])
    return response


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
