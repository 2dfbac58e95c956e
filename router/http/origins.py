"""Pages that a browser shows must not use a router that only the browser's owner reaches.

    https://evil.example                            its page posts a form to http://127.0.0.1:8000/v1/files: Origin is evil's, refused
    http://evil.example, whose name then            its page asks its own origin, which is this router by now:
      means 127.0.0.1 (DNS rebinding)               Host is evil's name, refused where only this machine's names are served

Both are refused before a body is read. Pages that --allowed-origins names may ask, by the Fetch standard's CORS protocol; the browser's own
credentials (cookies, client certificates) are never let through: who may ask is told by the API key, which a page sends itself.
Clients that are no browsers send no Origin, and are let through.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from aiohttp import web

from router.http.errors import Handler, HttpError
from router.http.front import FRONT
from router.http.middleware import is_open
from twostep.keys.exposure import LOOPBACK_NAMES, address_of, is_loopback

# These cost nothing, change nothing, and no other page sees the answer unless it may. A preflight asks for one that may cost something.
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
# But streams take a place each.
_COSTLY_FOLDER = "/ui/api/"


class Origins:
    """Says who may ask a server that listens on `host`. `allowed_hosts`: names that it is asked by; "*" is any, and so is none at all
    unless `host` is this machine's alone."""

    def __init__(self, *, host: str, allowed_hosts: Collection[str], allowed_origins: Collection[str] = ()) -> None:
        names = frozenset(allowed_hosts)
        any_name = "*" in names or (not names and not is_loopback(host))
        self._names = None if any_name else names | LOOPBACK_NAMES | {host.lower()}
        self._origins = frozenset(allowed_origins)

    def check(self, request: web.Request) -> None:
        """Raises HttpError 403."""
        given = request.headers.get("Host", "")
        if not is_open(request) and not self.known_as(given):
            message = f"this router is not known as {given[:80]!r}; name it in the router's --allowed-hosts"
            raise HttpError(403, message, code="host_not_allowed")
        if request.method not in _HARMLESS or request.path.startswith(_COSTLY_FOLDER) or _is_preflight(request):
            self._check_origin(request)

    def known_as(self, host: str) -> bool:
        """Returns whether the router has this name, as a Host header says it. Addresses are no names: DNS cannot make one mean another
        machine."""
        name = _name_of(host)
        return self._names is None or name in self._names or not name or address_of(name) is not None

    def _check_origin(self, request: web.Request) -> None:
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site", "none")
        if "*" in self._origins or origin in self._origins:
            return
        # Browsers alone write Sec-Fetch-Site, no page; those too old for it, and those that reach the router without TLS, write none.
        if site == "same-origin" or (origin is None and site == "none") or (origin is not None and _same(origin, request)):
            return
        if origin is None:
            message = "a page of another site may not ask this router, and sends no Origin that --allowed-origins could name"
        else:
            message = f"pages of {origin[:80]!r} may not ask this router; name it in the router's --allowed-origins"
        raise HttpError(403, message, code="origin_not_allowed")


def _same(origin: str, request: web.Request) -> bool:
    """Returns whether the page came from here, by the name that the browser knows: a proxy in front may write another as Host. No foreign
    page can write X-Forwarded-Host without having asked before (CORS), which it is refused."""
    scheme, _, page = origin.partition("://")
    default = {"http": "80", "https": "443"}.get(scheme, "")
    for header in ("Host", "X-Forwarded-Host"):
        for given in request.headers.get(header, "").split(","):
            name, port = _name_of(given), _port_of(given)
            if name and name == _name_of(page) and (port or default) == (_port_of(page) or default):
                return True
    return False


def _name_of(host: str) -> str:
    """Returns the name in a Host header, without port and brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _port_of(host: str) -> str:
    """Returns the port in a Host header as it is written; empty: none is."""
    return host.strip().rpartition("]")[2].partition(":")[2]


ORIGINS: web.AppKey[Origins] = web.AppKey("origins", Origins)


@web.middleware
async def same_site(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[ORIGINS].check(request)
    return await handler(request)


_METHODS = "GET, HEAD, POST, DELETE"
_MAX_AGE_S = 600
_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_HEADER_NAMES = re.compile(rf"{_TOKEN}(?:[ \t]*,[ \t]*{_TOKEN})*")


@web.middleware
async def preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Goes around whatever asks for keys: browsers do not show any before they know that they may."""
    if not _is_preflight(request) or _allowed_origin(request) is None:
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


def _is_preflight(request: web.Request) -> bool:
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


async def tell_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Says which page may read the answer, as the head of any answer goes out: of a stream with its first event, of failures too."""
    allowed = request.app[FRONT].allowed_origins
    if allowed and "*" not in allowed:
        # Also where the origin may not ask: a cache must not give the answer to another.
        response.headers.add("Vary", "Origin")
    origin = _allowed_origin(request)
    if origin is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        shown = [name for name in response.headers if name.lower().startswith("x-") or name.lower() == "retry-after"]
        response.headers["Access-Control-Expose-Headers"] = ", ".join(shown)


def _allowed_origin(request: web.Request) -> str | None:
    """Returns the origin that may read the answer, as the request's page is told; None: its page may not."""
    origin, allowed = request.headers.get("Origin"), request.app[FRONT].allowed_origins
    if origin is None:
        return None
    return "*" if "*" in allowed else origin if origin in allowed else None
