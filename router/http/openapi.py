"""GET /openapi.json: the API's description, made of what the handlers say of themselves. Replies are OpenAI's, and are not described."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeVar

from aiohttp import hdrs, web
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from twostep.metrics.process import package_version

Handler = TypeVar("Handler", bound=Callable[..., object])


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail


@dataclass(frozen=True, slots=True)
class Described:
    """Says what /openapi.json tells of a handler, and goes between it and its route. `bodies`: what the request's body may be, one of them;
    `media`: the type of the reply, which with `events` may also be a stream. `headers` of requests: name, what it says, schema. `query`:
    the URL's parameters; `form`: fields of a multipart body, beside its `file`."""

    summary: str
    _: KW_ONLY
    bodies: tuple[type[BaseModel], ...] = ()
    media: str = "application/json"
    events: bool = False
    headers: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    query: type[BaseModel] | None = None
    form: type[BaseModel] | None = None
    failure: type[BaseModel] = Error

    def __call__(self, handler: Handler) -> Handler:
        _described[handler] = self
        return handler


_described: dict[Callable[..., object], Described] = {}


routes = web.RouteTableDef()

_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"{(\w+)}")
_DOCUMENT: web.AppKey[dict[str, Any]] = web.AppKey("openapi", dict)


@routes.get("/openapi.json")
@Described("This description.")
async def openapi(request: web.Request) -> web.Response:
    return web.json_response(request.app[_DOCUMENT])


def describe(app: web.Application) -> None:
    """Makes the document. Call it once all routes are there."""
    app[_DOCUMENT] = document(app.router.routes())


def document(routes: Iterable[web.AbstractRoute]) -> dict[str, Any]:
    """Returns the document in OpenAPI 3.1. Routes for every method are none of the API's, but catch what is asked for elsewhere."""
    described = list(_api_routes(routes))
    bodies = dict.fromkeys(body for _, _, description in described for body in description.bodies)
    failures = dict.fromkeys(description.failure for _, _, description in described)
    kinds: list[tuple[type[BaseModel], JsonSchemaMode]] = [(failure, "serialization") for failure in failures]
    kinds += [(body, "validation") for body in bodies]
    names, schemas = models_json_schema(kinds, ref_template=_REF)
    refs = {model: names[model, kind] for model, kind in kinds}
    paths: dict[str, dict[str, Any]] = {}
    for path, method, description in described:
        paths.setdefault(path, {})[method] = _operation(path, method, description, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Twostep",
            "version": package_version(),
            "description": "OpenAI's and Anthropic's APIs over disaggregated prefill and decode workers. docs/http-api.md says what each "
            "field does.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _api_routes(routes: Iterable[web.AbstractRoute]) -> Iterator[tuple[str, str, Described]]:
    for route in routes:
        if route.resource is None or route.method in (hdrs.METH_ANY, hdrs.METH_HEAD, hdrs.METH_OPTIONS):
            continue
        path = route.resource.canonical
        if path.startswith("/ui"):
            continue  # the page's own, which changes with it
        yield path, route.method.lower(), _described.get(route.handler) or Described(path, media="*/*")


def _operation(path: str, method: str, description: Described, refs: dict[type[BaseModel], Any]) -> dict[str, Any]:
    content: dict[str, Any] = {media: {} for media in (description.media, *(["text/event-stream"] if description.events else []))}
    operation: dict[str, Any] = {
        "summary": description.summary,
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "What went wrong.", "content": {"application/json": {"schema": refs[description.failure]}}},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in _PARAMETER.findall(path)
    ]
    parameters += [
        {"name": name, "in": "header", "required": False, "description": says, "schema": schema}
        for name, says, schema in description.headers
    ]
    if description.query is not None:
        properties = description.query.model_json_schema()["properties"]
        parameters += [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]
    if parameters:
        operation["parameters"] = parameters
    if description.form is not None:
        form = description.form.model_json_schema()
        form["properties"]["file"] = {"type": "string", "contentMediaType": "application/octet-stream"}
        form["required"] = [*form.get("required", ()), "file"]
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    if description.bodies:
        schemas = [refs[body] for body in description.bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
