"""What operators and clients ask of the router itself: health, version, metrics, models."""

from __future__ import annotations

from functools import partial

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from router.http.described import described
from router.http.front import FRONT
from router.http.replies import Model, ModelList, Status, Version
from router.http.whole_answer import ENCODER
from twostep.errors import NotFound, Unavailable
from twostep.metrics.process import package_version

routes = web.RouteTableDef()


@routes.get("/health")
@described("Whether the process should go on living.", reply=Status)
async def health(request: web.Request) -> web.Response:
    """200 while the event loop makes progress: whether the process should be restarted."""
    if not request.app[FRONT].alive():
        raise Unavailable("the router makes no progress; restart it")
    return web.json_response({"status": "ok"})


@routes.get("/ready")
@described("Whether a request could be placed.", reply=Status)
async def ready(request: web.Request) -> web.Response:
    """200 while a request could be placed on workers."""
    if not request.app[FRONT].ready():
        raise Unavailable("no workers that could take a request, or the router is draining; `twostep status` shows who is there")
    return web.json_response({"status": "ready"})


@routes.get("/version")
@described("The version that runs.", reply=Version)
async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": package_version()})


@routes.get("/metrics")
@described("Prometheus' metrics.", media="text/plain")
async def metrics(request: web.Request) -> web.Response:
    """The same as on --metrics-port, for whoever can reach this port only."""
    body = await request.app[ENCODER].made(partial(generate_latest, request.app[FRONT].metrics.collectors))
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


@routes.get("/v1/models")
@described("The models served here.", reply=ModelList)
async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": _models(request)})


@routes.get("/v1/models/{model:.+}")
@described("One of them.", reply=Model)
async def model(request: web.Request) -> web.Response:
    name = request.match_info["model"]
    for found in _models(request):
        if found["id"] == name:
            return web.json_response(found)
    raise NotFound(f"model {name!r} is not served here; GET /v1/models lists what is")


def _models(request: web.Request) -> list[dict[str, object]]:
    front = request.app[FRONT]
    return [
        {"id": each.name, "object": "model", "created": front.started_unix_s, "owned_by": "twostep", "max_model_len": each.max_model_len}
        for each in front.inference.models().models
    ]
