"""The port of router/http/admin.py."""

from __future__ import annotations

import ssl
from collections.abc import Collection
from pathlib import Path

from router.http.admin import Administration, make_admin_app
from router.http.listener import Listener
from router.http.origins import Origins
from twostep.errors import SetupError
from twostep.keys.api_keys import admin_key
from twostep.keys.secret import MIN_SECRET_BYTES

_KEEPALIVE_S = 15.0
# Operators are few.
_MAX_CONNECTIONS = 64
# For what still runs at the end.
_LAST_S = 60.0


class AdminServer:
    """start(), close(). `port` is the real one once it is started."""

    def __init__(
        self,
        administration: Administration,
        *,
        host: str,
        port: int,
        ssl_context: ssl.SSLContext | None,
        allowed_hosts: Collection[str] = (),
    ) -> None:
        self.host, self.port = host, port
        app = make_admin_app(administration, Origins(host=host, allowed_hosts=allowed_hosts))
        self._listener = Listener(app, tls=ssl_context, max_connections=_MAX_CONNECTIONS, keepalive_s=_KEEPALIVE_S)

    async def start(self) -> int:
        """Returns the real port. Raises SetupError if it is taken."""
        self.port = await self._listener.open(self.host, self.port, flag="--admin-port")
        return self.port

    async def close(self) -> None:
        await self._listener.close(_LAST_S)


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
