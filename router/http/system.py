"""Answers what is asked of the router itself: health, version, metrics, models; and refuses the endpoints that are not served here."""

from __future__ import annotations

from functools import partial

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from router.http.errors import HttpError
from router.http.front import FRONT
from router.http.openapi import Described
from router.http.sse import ANSWERS
from router.http.whole_answer import ENCODER
from twostep.errors import Unavailable, UnknownModel
from twostep.metrics.process import package_version

routes = web.RouteTableDef()


@routes.get("/health")
@Described("Whether the router makes progress and takes requests.")
async def health(request: web.Request) -> web.Response:
    """200 while the event loop makes progress and the router is not about to end."""
    if not request.app[FRONT].alive():
        raise Unavailable("the router makes no progress; restart it")
    _look_for_drain(request)
    return web.json_response({"status": "ok"})


def _look_for_drain(request: web.Request) -> None:
    if request.app[ANSWERS].draining:
        raise Unavailable("this router is draining; send new requests to another one")


@routes.get("/ready")
@Described("Whether a request could be placed.")
async def ready(request: web.Request) -> web.Response:
    """200 while a request could be placed on workers."""
    _look_for_drain(request)
    if not request.app[FRONT].ready():
        raise Unavailable("no workers that could take a request; `twostep status` shows who is there")
    return web.json_response({"status": "ready"})


@routes.get("/version")
@Described("The version that runs.")
async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": package_version()})


@routes.get("/metrics")
@Described("Prometheus' metrics.", media="text/plain")
async def metrics(request: web.Request) -> web.Response:
    """The same as on --metrics-port, for those who can reach this port only."""
    body = await request.app[ENCODER].made(partial(generate_latest, request.app[FRONT].metrics.collectors))
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


@routes.get("/v1/models")
@Described("The models served here.")
async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": _models(request)})


@routes.get("/v1/models/{model:.+}")
@Described("One of them.")
async def model(request: web.Request) -> web.Response:
    name = request.match_info["model"]
    for found in _models(request):
        if found["id"] == name:
            return web.json_response(found)
    raise UnknownModel(f"model {name!r} is not served here; GET /v1/models lists what is")


def _models(request: web.Request) -> list[dict[str, object]]:
    front = request.app[FRONT]
    return [
        {"id": each.name, "object": "model", "created": front.started_unix_s, "owned_by": "twostep", "max_model_len": each.max_model_len}
        for each in front.inference.models().models
    ]


# Endpoints of OpenAI's and vLLM's APIs that are not served here, and what to use instead.
_REFUSED = {
    "/v1/responses/compact": "conversations are not compacted here; send fewer items",
    "/v1/conversations": "no conversations are kept; use /v1/responses with previous_response_id",
    "/v1/vector_stores": "no documents are searched here; use /v1/chat/completions, and put what was found into the messages",
    "/v1/realtime": "the Realtime API is not served; use /v1/chat/completions with stream",
    "/v1/fine_tuning": "models are not trained here",
    "/v1/containers": "no code is run here",
    "/v1/uploads": "files come whole: use /v1/files",
    "/v1/messages": "of Anthropic's API there are POST /v1/messages and /v1/messages/count_tokens; for batches use /v1/batches",
    **dict.fromkeys(("/v1/assistants", "/v1/threads"), "the Assistants API is not served; use /v1/chat/completions"),
    **dict.fromkeys(("/v1/images", "/v1/videos", "/v1/audio"), "the models served here read and write text alone"),
    **dict.fromkeys(
        ("/v1/moderations", "/v1/evals", "/v1/rerank", "/rerank", "/v1/score", "/score", "/pooling", "/classify"),
        "the models served here generate and embed texts: they rank and judge nothing; use another server for it",
    ),
}


async def _refuse_endpoint(request: web.Request) -> web.StreamResponse:
    path = next(path for path in _REFUSED if request.path == path or request.path.startswith(f"{path}/"))
    raise HttpError(404, f"{path}: {_REFUSED[path]}", code="unsupported_endpoint")


for _path in _REFUSED:
    for _tail in ("", "/{rest:.*}"):
        routes.route("*", _path + _tail)(_refuse_endpoint)
