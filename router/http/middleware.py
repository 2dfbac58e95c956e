"""Middleware of every HTTP request: it is counted and traced, gets a name, and shows whose it is."""

from __future__ import annotations

import asyncio
import re
import uuid

from aiohttp import web

from router.access.account import NOBODY
from router.http.bodies import BODIES
from router.http.errors import Handler
from router.http.front import FRONT, IDENTITY, REQUEST_ID, SPAN, forwarded
from router.http.sse import ANSWERS
from router.request.targets import TENANT_HEADER
from twostep.errors import Unavailable
from twostep.keys.api_keys import is_one_of
from twostep.metrics.http import HttpMetrics
from twostep.process.log import concerning
from twostep.process.tracing import trace_id_of

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
METRICS: web.AppKey[HttpMetrics] = web.AppKey("http_metrics", HttpMetrics)
_STREAMS: web.RequestKey[bool] = web.RequestKey("counted_stream", bool)
# Whatever else a client writes there is one value of the label.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_EVENT_STREAM = "text/event-stream"
# The status of a request whose client went away.
_GONE = 499


@web.middleware
async def named(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every request has a name, and every answer says it: the client's own `x-request-id`, or a new one."""
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
    concerning(request[REQUEST_ID], trace_id_of(forwarded(request)))
    response = await handler(request)
    if not response.prepared:
        response.headers.setdefault("x-request-id", request[REQUEST_ID])
    return response


def count(app: web.Application) -> None:
    """Begins to count requests: the app's `observed` middleware goes around all others, whose answers it counts."""
    app[METRICS] = app[FRONT].metrics.once(HttpMetrics)
    app.on_response_prepare.append(_stream_opens)


@web.middleware
async def observed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts every request, and traces those of the API: probes of /health would drown all others."""
    front, route = request.app[FRONT], route_of(request)
    method = request.method if request.method in METHODS else "other"
    if front.tracer is not None and request.path.startswith("/v1/"):
        http_method = "_OTHER" if method == "other" else method
        span = request[SPAN] = front.tracer.start(f"{http_method} {route}", forwarded(request))
        span.set({"http.request.method": http_method, "http.route": route, "url.scheme": request.scheme})
    status = 500
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as answer:
        status = answer.status
        raise
    except (asyncio.CancelledError, ConnectionError):
        status = _GONE
        raise
    finally:
        metrics = request.app[METRICS]
        metrics.requests.labels(route, method, "cancelled" if status == _GONE else f"{status // 100}xx").inc()
        if request.get(_STREAMS):
            metrics.streams.labels(route).dec()
        if SPAN in request:
            request[SPAN].set({"http.response.status_code": status} | ({"error.type": str(status)} if status >= 400 else {}))
            request[SPAN].end(failure=str(status) if status >= 500 else "")


async def _stream_opens(request: web.Request, response: web.StreamResponse) -> None:
    if response.content_type == _EVENT_STREAM:
        request[_STREAMS] = True
        request.app[METRICS].streams.labels(route_of(request)).inc()


def route_of(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "other" if resource is None else resource.canonical


# For anybody: what a probe asks, and what is the same everywhere.
_OPEN = frozenset({"/health", "/ready", "/version", "/openapi.json", "/ui", "/ui/"})
_OPEN_FOLDER, _CLOSED_FOLDER = "/ui/", "/ui/api/"
# Calls that a limit of requests counts: those that cost more than a look.
_COUNTED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/responses", "/v1/responses/input_tokens"),
        *("/v1/embeddings", "/v1/files", "/v1/batches", "/tokenize", "/detokenize"),
    }
)


def is_open(request: web.Request) -> bool:
    path = request.path
    # GET / only sends browsers to the page.
    if path in _OPEN or (path == "/" and request.method == "GET"):
        return True
    return path.startswith(_OPEN_FOLDER) and not path.startswith(_CLOSED_FOLDER)


@web.middleware
async def identified(request: web.Request, handler: Handler) -> web.StreamResponse:
    access = request.app[FRONT].access
    request[IDENTITY] = NOBODY
    if not (access.enabled and (is_open(request) or _opens_page_data(request))):
        tenant = request.headers.get(TENANT_HEADER)
        request[IDENTITY] = access.identify(_authorization(request), tenant, address=request.remote or "")
    with request.app[BODIES].arriving(request, caller=request[IDENTITY].caller or request.remote or "", most=_largest(request)):
        if request.method == "POST" and request.path in _COUNTED:
            with request[IDENTITY].calling():
                return await handler(request)
        return await handler(request)


def _authorization(request: web.Request) -> str | None:
    """Returns what the request authorizes itself with. Anthropic's clients send the key in a header of its own."""
    key = request.headers.get("x-api-key")
    return request.headers.get("Authorization", None if key is None else f"Bearer {key}")


def _opens_page_data(request: web.Request) -> bool:
    """Returns whether the admin key is shown for the page's data; it opens nothing else here."""
    if not request.path.startswith(_CLOSED_FOLDER):
        return False
    scheme, _, key = request.headers.get("Authorization", "").strip().partition(" ")
    return scheme.lower() == "bearer" and is_one_of(key.strip(), request.app[FRONT].admin_keys)


def _largest(request: web.Request) -> int:
    """Returns how many bytes a body may have there."""
    batches = request.app[FRONT].batches
    return batches.config.max_file_bytes if batches is not None and request.path == "/v1/files" else request.client_max_size


# What is still answered while the router drains: probes learn from that how it is.
_LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})


@web.middleware
async def nothing_new(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses new work of a router that drains."""
    if request.app[ANSWERS].draining and request.method not in _LOOKS:
        raise Unavailable("this router is draining; repeat the request on another one")
    return await handler(request)


async def end_connection(request: web.Request, response: web.StreamResponse) -> None:
    """Ends the connection after the answer, of a router that drains: the next one is another's."""
    if request.app[ANSWERS].draining:
        response.force_close()
        # Headers are made before this is called.
        response.headers["Connection"] = "close"


async def tell_limits(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the key's limits as the answer's head goes out: of a stream with its first event, of others when they are whole."""
    # Whose version is known is known to have its bugs.
    response.headers["Server"] = "twostep"
    for name, value in request.get(IDENTITY, NOBODY).headers().items():
        response.headers[name] = value
