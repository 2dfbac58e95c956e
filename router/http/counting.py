"""Every HTTP request is counted once, by its route and the class of its status; open event streams are, too."""

from __future__ import annotations

import asyncio

from aiohttp import web

from router.http.errors import Handler
from router.http.front import FRONT
from twostep.metrics.http import HttpMetrics

METRICS: web.AppKey[HttpMetrics] = web.AppKey("http_metrics", HttpMetrics)
_STREAMS: web.RequestKey[bool] = web.RequestKey("counted_stream", bool)
# Whatever else a client writes there is one value of the label.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_EVENT_STREAM = "text/event-stream"


def count(app: web.Application) -> None:
    """The app's `counted` middleware goes around all others, whose answers it counts."""
    app[METRICS] = app[FRONT].metrics.once(HttpMetrics)
    app.on_response_prepare.append(_stream_opens)


@web.middleware
async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
    metrics, route, status = request.app[METRICS], route_of(request), "5xx"
    try:
        response = await handler(request)
        status = f"{response.status // 100}xx"
        return response
    except web.HTTPException as answer:
        status = f"{answer.status // 100}xx"
        raise
    except (asyncio.CancelledError, ConnectionError):
        status = "cancelled"
        raise
    finally:
        metrics.requests.labels(route, request.method if request.method in METHODS else "other", status).inc()
        if request.get(_STREAMS):
            metrics.streams.labels(route).dec()


async def _stream_opens(request: web.Request, response: web.StreamResponse) -> None:
    if response.content_type == _EVENT_STREAM:
        request[_STREAMS] = True
        request.app[METRICS].streams.labels(route_of(request)).inc()


def route_of(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return "other" if resource is None else resource.canonical
