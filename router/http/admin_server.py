"""The port of router/http/admin.py."""

from __future__ import annotations

import ssl
from pathlib import Path

from aiohttp import web

from router.http.admin import Administration, make_admin_app
from router.http.connections import connection_log
from twostep.api_keys import admin_key
from twostep.errors import SetupError
from twostep.secret import MIN_SECRET_BYTES

_KEEPALIVE_S = 15.0


class AdminServer:
    """start(), close(). `port` is the real one once it is started."""

    def __init__(self, administration: Administration, *, host: str, port: int, ssl_context: ssl.SSLContext | None) -> None:
        self.host, self.port = host, port
        self._ssl = ssl_context
        self._runner = web.AppRunner(
            make_admin_app(administration),
            keepalive_timeout=_KEEPALIVE_S,
            access_log=None,
            handler_cancellation=True,
            logger=connection_log(),
        )

    async def start(self) -> int:
        """Returns the real port. Raises SetupError if it is taken."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port, ssl_context=self._ssl).start()
        except OSError as error:
            await self._runner.cleanup()
            raise SetupError(
                f"cannot listen on {self.host}:{self.port} ({error.strerror or error}); choose another port with --admin-port, -1 for none"
            ) from error
        self.port = int(self._runner.addresses[0][1])
        return self.port

    async def close(self) -> None:
        await self._runner.cleanup()


def load_admin_key(path: Path | None, secret: bytes) -> str:
    """Of --admin-key-file, else what follows from the deployment's secret. Raises SetupError."""
    if path is None:
        return admin_key(secret)
    try:
        key = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--admin-key-file {path}: {error}; give a readable file with one line of ASCII") from error
    if len(key) < MIN_SECRET_BYTES or not key.isprintable() or " " in key:
        raise SetupError(
            f"--admin-key-file {path} holds no key: give {MIN_SECRET_BYTES} characters or more without spaces, for example of "
            "`openssl rand -hex 32`"
        )
    return key
