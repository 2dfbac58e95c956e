"""The HTTP server of a router: its middleware and routes, TLS, graceful drain."""

from __future__ import annotations

import ssl
from collections.abc import Collection

from aiohttp import web

from router.http import batches, chat, completions, openapi, system, tokens, ui
from router.http.connections import at_work
from router.http.errors import errors
from router.http.front import FRONT, Front
from router.http.listener import Listener
from router.http.middleware import count, identified, named, observed, tell_limits
from router.http.origins import ORIGINS, Origins, preflights, same_site, tell_origin
from router.http.sse import ANSWERS, Answers
from router.http.whole_answer import ENCODER, AnswerEncoder
from twostep.errors import SetupError
from twostep.settings.tls import TlsFiles

_KEEPALIVE_S = 75.0
# For what is no answer, once answers have ended.
_LAST_S = 1.0


class HttpServer(Listener):
    """start(), drain()."""

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
            flag="--http-port",
            tls=ssl_context(tls),
            max_connections=max_connections,
            keepalive_s=_KEEPALIVE_S,
            write_timeout_s=write_timeout_s,
            beside=[self._app[ANSWERS].keep_alive],
        )

    async def drain(self, grace_s: float) -> None:
        """No new connections; what runs may end within `grace_s`."""
        self.stop_listening()
        await self._app[ANSWERS].drain(grace_s)
        await self.close(_LAST_S)
        self._app[ENCODER].close()
        await self._parser.close()


def make_app(front: Front, origins: Origins) -> web.Application:
    app = web.Application(
        middlewares=[at_work, observed, preflights, named, errors, same_site, identified],
        client_max_size=front.max_body_bytes,
    )
    app.on_response_prepare.append(tell_limits)
    app.on_response_prepare.append(tell_origin)
    app[FRONT] = front
    app[ORIGINS] = origins
    count(app)
    app[ANSWERS], app[ENCODER] = Answers(), AnswerEncoder()
    app[ui.PAGE] = ui.load_page()
    for module in (chat, completions, batches, tokens, system, openapi, ui):
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
