"""Pages of other origins that may ask this API from a browser: --allowed-origins, none unless told.

What browsers ask for is the Fetch standard's CORS protocol. Their own credentials (cookies, client certificates) are never let through,
whatever the origin: who may ask is told by the API key, which a page sends itself.
"""

from __future__ import annotations

import re

from aiohttp import web

from router.http.errors import Handler
from router.http.front import FRONT

_METHODS = "GET, HEAD, POST, DELETE"
_MAX_AGE_S = 600
_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_HEADER_NAMES = re.compile(rf"{_TOKEN}(?:[ \t]*,[ \t]*{_TOKEN})*")


@web.middleware
async def preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Goes around whatever asks for keys: browsers do not show any before they know that they may."""
    asked = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not asked or _told(request) is None:
        return await handler(request)
    names = request.headers.get("Access-Control-Request-Headers", "")
    headers = {
        "Access-Control-Allow-Methods": _METHODS,
        # By name: * would not mean Authorization.
        "Access-Control-Allow-Headers": names if _HEADER_NAMES.fullmatch(names) else "Authorization, Content-Type",
        "Access-Control-Max-Age": str(_MAX_AGE_S),
        "Vary": "Access-Control-Request-Headers",
    }
    return web.Response(status=204, headers=headers)


async def tell_origin(request: web.Request, response: web.StreamResponse) -> None:
    """As the head of any answer goes out: of a stream with its first event, of failures too."""
    allowed = request.app[FRONT].allowed_origins
    if allowed and "*" not in allowed:
        # Also where the origin may not ask: whoever keeps the answer must not give it to another.
        response.headers.add("Vary", "Origin")
    origin = _told(request)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        shown = [name for name in response.headers if name.lower().startswith("x-") or name.lower() == "retry-after"]
        response.headers["Access-Control-Expose-Headers"] = ", ".join(shown)


def _told(request: web.Request) -> str | None:
    """Who may ask, as this request's page is told; None: it may not."""
    origin, allowed = request.headers.get("Origin"), request.app[FRONT].allowed_origins
    if origin is None:
        return None
    return "*" if "*" in allowed else origin if origin in allowed else None
