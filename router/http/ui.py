"""The page: its files, and what it asks once it is there.

    /                      sends browsers to /ui/
    /ui, /ui/app.js, ...   files of router/ui, for anybody: they say nothing of this deployment
    /ui/api/status         the deployment as this router sees it: twostep.v1.ClusterStatus as JSON
    /ui/api/history        the last ten minutes, a value for each second
    /ui/api/events         server-sent events: both, for the second that was, every second
    /ui/api/requests       requests and tenants (router/status/request_book.py): for operators, where keys are asked for

What it asks beyond that is the same API that everybody has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from router.access.control import Access
from router.http.front import FRONT, IDENTITY
from twostep.errors import PermissionDenied

# Nothing but what this router serves runs in the page or is asked by it, and no other page may frame it.
PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked again every time, answered with 304 unless the router was upgraded.
    "Cache-Control": "no-cache",
}
_NEVER_STORED = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_INDEX = "index.html"
_FOLDER = Path(__file__).resolve().parent.parent / "ui"

routes = web.RouteTableDef()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    body: bytes
    content_type: str
    etag: str


def load_page(folder: Path = _FOLDER) -> Mapping[str, PageFile]:
    """Returns the page's files by name. Read once: the router has them even when it is upgraded under its feet."""
    files: dict[str, PageFile] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            files[path.name] = PageFile(body=body, content_type=_TYPES[path.suffix], etag=hashlib.sha256(body).hexdigest()[:32])
    return files


PAGE: web.AppKey[Mapping[str, PageFile]] = web.AppKey("page", Mapping)


@routes.get("/")
async def to_page(request: web.Request) -> web.Response:
    """Sends browsers to the page; other clients ask for nothing that is served here."""
    if "text/html" not in request.headers.get("Accept", ""):
        raise web.HTTPNotFound
    return web.Response(status=307, headers={"Location": "ui/", "Cache-Control": "no-cache"})


@routes.get("/ui")
async def to_index(request: web.Request) -> web.Response:
    """Redirects by a relative path: a proxy may have put the router under a path of its own."""
    return web.Response(status=307, headers={"Location": "ui/", "Cache-Control": "no-cache"})


@routes.get("/ui/")
async def index(request: web.Request) -> web.Response:
    return _serve(request, _INDEX)


@routes.get("/ui/{name:[a-z_-]+[.][a-z]+}")
async def file(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name == _INDEX:
        raise web.HTTPNotFound
    return _serve(request, name)


def _serve(request: web.Request, name: str) -> web.Response:
    found = request.app[PAGE].get(name)
    if found is None:
        raise web.HTTPNotFound
    response: web.Response
    asked = request.if_none_match or ()
    if any(tag.value in ("*", found.etag) for tag in asked):
        response = web.Response(status=304, headers=PAGE_HEADERS)
    else:
        response = web.Response(body=found.body, content_type=found.content_type, charset="utf-8", headers=PAGE_HEADERS)
        response.enable_compression()
    response.etag = found.etag
    return response


# ---- what it asks --------------------------------------------------------------------------------------------------------


@routes.get("/ui/api/status")
async def status(request: web.Request) -> web.Response:
    return web.json_response(request.app[FRONT].board.status_json(), headers=_NEVER_STORED)


@routes.get("/ui/api/history")
async def history(request: web.Request) -> web.Response:
    response = web.json_response(request.app[FRONT].board.history_json(), headers=_NEVER_STORED)
    response.enable_compression()
    return response


@routes.get("/ui/api/requests")
async def requests(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    if request[IDENTITY].account is not None:
        raise PermissionDenied("requests and tenants are shown to operators alone; give the admin key, which opens --admin-port")
    tenants = front.book.tenants()
    limits = _key_limits(front.access, {each["tenant"] for each in tenants["tenants"]})
    body = {"trace_url": front.trace_url, **front.book.requests(), **tenants, "keys": limits}
    response = web.json_response(body, headers=_NEVER_STORED)
    response.enable_compression()
    return response


def _key_limits(access: Access, tenants: Collection[str]) -> dict[str, dict[str, int]]:
    """Returns by tenant what its keys have used of their tokens of a minute, and may use. A tenant with a key that has no limit has
    none."""
    limits: dict[str, dict[str, int]] = {}
    unlimited = set()
    for account in access.accounts_of(tenants):
        most, tenant = account.key.limits.tokens_per_minute, account.key.whose
        if not most:
            unlimited.add(tenant)
        sums = limits.setdefault(tenant, {"used": 0, "limit": 0})
        sums["used"] += account.usage()["tokens_this_minute"]
        sums["limit"] += most
    return {tenant: sums for tenant, sums in limits.items() if tenant not in unlimited}


@routes.get("/ui/api/events")
async def events(request: web.Request) -> web.StreamResponse:
    async with aclosing(request.app[FRONT].board.events()) as listener:
        # One stream too many is refused before anything is sent.
        first = await anext(listener)
        response = web.StreamResponse(headers={**_NEVER_STORED, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        try:
            await response.write(b"data: " + first + b"\n\n")
            async for event in listener:
                await response.write(b"data: " + event + b"\n\n")
            await response.write_eof()
        except ConnectionError:
            pass  # nothing more can be said to it, and nothing is lost
    return response
