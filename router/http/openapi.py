"""GET /openapi.json: the API's description, made of what the handlers say of themselves (described.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import hdrs, web
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from router.http.replies import Error
from twostep.metrics.process import package_version

_ATTRIBUTE = "__described__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """`bodies`: what the request's body may be, one of them. `reply` is that of status 200 in JSON; `events` the data of each
    event, where the body asks for a stream; `media` that of a reply that is no JSON. `headers`: of requests: name, what it says, schema.
    `query`: the URL's parameters; `form`: fields of a multipart body, beside its `file`."""

    summary: str
    bodies: tuple[type[BaseModel], ...] = ()
    reply: type[BaseModel] | None = None
    events: type[BaseModel] | None = None
    media: str = "application/json"
    headers: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    query: type[BaseModel] | None = None
    form: type[BaseModel] | None = None


Handler = TypeVar("Handler", bound=Callable[..., object])


def described(
    summary: str,
    *,
    bodies: tuple[type[BaseModel], ...] = (),
    reply: type[BaseModel] | None = None,
    events: type[BaseModel] | None = None,
    media: str = "application/json",
    headers: tuple[tuple[str, str, dict[str, Any]], ...] = (),
    query: type[BaseModel] | None = None,
    form: type[BaseModel] | None = None,
) -> Callable[[Handler], Handler]:
    """Goes between the route and the handler."""
    description = Description(
        summary=summary, bodies=bodies, reply=reply, events=events, media=media, headers=headers, query=query, form=form
    )

    def attach(handler: Handler) -> Handler:
        setattr(handler, _ATTRIBUTE, description)
        return handler

    return attach


def description_of(handler: object) -> Description | None:
    found = getattr(handler, _ATTRIBUTE, None)
    return found if isinstance(found, Description) else None


routes = web.RouteTableDef()

_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"{(\w+)}")
_DOCUMENT: web.AppKey[dict[str, Any]] = web.AppKey("openapi", dict)


@routes.get("/openapi.json")
@described("This description.")
async def openapi(request: web.Request) -> web.Response:
    return web.json_response(request.app[_DOCUMENT])


def describe(app: web.Application) -> None:
    """Once all routes are there."""
    app[_DOCUMENT] = document(app.router.routes())


def document(routes: Iterable[web.AbstractRoute]) -> dict[str, Any]:
    """OpenAPI 3.1. Routes for every method are none of the API's, but catch what is asked for elsewhere."""
    told = list(_told(routes))
    models: dict[type[BaseModel], None] = {Error: None}
    for _, _, description in told:
        models |= dict.fromkeys((*description.bodies, *(m for m in (description.reply, description.events) if m is not None)))
    kinds: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (model, "validation" if _is_body(model, told) else "serialization") for model in models
    ]
    names, schemas = models_json_schema(kinds, ref_template=_REF)
    refs = {model: names[model, kind] for model, kind in kinds}
    paths: dict[str, dict[str, Any]] = {}
    for path, method, description in told:
        paths.setdefault(path, {})[method] = _operation(path, method, description, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Twostep",
            "version": package_version(),
            "description": "OpenAI's API over disaggregated prefill and decode workers. docs/http-api.md says what each field does.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _told(routes: Iterable[web.AbstractRoute]) -> Iterator[tuple[str, str, Description]]:
    for route in routes:
        if route.resource is None or route.method in (hdrs.METH_ANY, hdrs.METH_HEAD, hdrs.METH_OPTIONS):
            continue
        path = route.resource.canonical
        if path.startswith("/ui"):
            continue  # the page's own, which changes with it
        yield path, route.method.lower(), description_of(route.handler) or Description(summary=path, media="*/*")


def _is_body(model: type[BaseModel], told: Iterable[tuple[str, str, Description]]) -> bool:
    return any(model in description.bodies for _, _, description in told)


def _operation(path: str, method: str, description: Description, refs: dict[type[BaseModel], Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": description.summary,
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "responses": {
            "200": {"description": "The answer.", "content": _content(description, refs)},
            "default": {"description": "What went wrong.", "content": {"application/json": {"schema": refs[Error]}}},
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


def _content(description: Description, refs: dict[type[BaseModel], Any]) -> dict[str, Any]:
    content: dict[str, Any] = {description.media: {"schema": refs[description.reply]} if description.reply is not None else {}}
    if description.events is not None:
        # OpenAPI has no word for events: this is what each `data:` but the last holds.
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-schema": refs[description.events]}
    return content
