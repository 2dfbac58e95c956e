"""The span of an HTTP request to the API, around those of the answers that it asks for: a request may ask for several."""

from __future__ import annotations

import asyncio

from aiohttp import web

from router.http.counting import METHODS, route_of
from router.http.errors import Handler
from router.http.front import FRONT, SPAN, forwarded
from twostep.process.tracing import Span

# Nobody wants to see every look at /health.
_API = "/v1/"


@web.middleware
async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
    tracer = request.app[FRONT].tracer
    if tracer is None or not request.path.startswith(_API):
        return await handler(request)
    method = request.method if request.method in METHODS else "_OTHER"
    span = tracer.start(f"{method} {route_of(request)}", forwarded(request))
    span.set({"http.request.method": method, "http.route": route_of(request), "url.scheme": request.scheme})
    request[SPAN] = span
    status = 500
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as answer:
        status = answer.status
        raise
    except (asyncio.CancelledError, ConnectionError):
        # The client went away.
        status = 499
        raise
    finally:
        _end(span, status)


def _end(span: Span, status: int) -> None:
    span.set({"http.response.status_code": status} | ({"error.type": str(status)} if status >= 400 else {}))
    span.end(failure=str(status) if status >= 500 else "")
