"""API keys over HTTP: who asks, whether it may, and what is left of its limits."""

from __future__ import annotations

from aiohttp import web

from router.access.identity import NOBODY
from router.http.bodies import BODIES
from router.http.errors import Handler
from router.http.front import FRONT, IDENTITY
from router.request.targets import TENANT_HEADER

# For anybody: what a probe asks, and what is the same everywhere.
_OPEN = frozenset({"/health", "/ready", "/version", "/openapi.json", "/ui", "/ui/"})
_OPEN_FOLDER, _CLOSED_FOLDER = "/ui/", "/ui/api/"
# Calls that a limit of requests counts: those that cost more than a look.
_COUNTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/files", "/v1/batches", "/tokenize", "/detokenize"})


def is_open(path: str) -> bool:
    return path in _OPEN or (path.startswith(_OPEN_FOLDER) and not path.startswith(_CLOSED_FOLDER))


@web.middleware
async def identified(request: web.Request, handler: Handler) -> web.StreamResponse:
    access = request.app[FRONT].access
    request[IDENTITY] = NOBODY
    if not (access.enabled and is_open(request.path)):
        tenant = request.headers.get(TENANT_HEADER)
        request[IDENTITY] = access.identify(request.headers.get("Authorization"), tenant, address=request.remote or "")
    with request.app[BODIES].arriving(request, caller=request[IDENTITY].caller or request.remote or "", most=_largest(request)):
        if request.method == "POST" and request.path in _COUNTED:
            with request[IDENTITY].calling():
                return await handler(request)
        return await handler(request)


def _largest(request: web.Request) -> int:
    """Bytes of a body there."""
    batches = request.app[FRONT].batches
    return batches.config.max_file_bytes if batches is not None and request.path == "/v1/files" else request.client_max_size


async def tell_limits(request: web.Request, response: web.StreamResponse) -> None:
    """As the answer's head goes out: of a stream with its first event, of others when they are whole."""
    # Whose version is known is known to have its bugs.
    response.headers["Server"] = "twostep"
    for name, value in request.get(IDENTITY, NOBODY).headers().items():
        response.headers[name] = value
