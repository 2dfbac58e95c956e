"""GET and DELETE of stored responses, their input items, and POST /v1/responses/input_tokens."""

from __future__ import annotations

import json
from functools import partial
from typing import Literal

from aiohttp import web
from pydantic import Field

from router.http.batches import listed, query_of
from router.http.body import Body, parse_body
from router.http.errors import HttpError, blaming
from router.http.front import FRONT, IDENTITY, parsed
from router.http.generation import HttpCall
from router.http.openapi import Described
from router.http.response_items import item_of
from router.http.response_store import Owner, ResponseStore, StoredResponse, name_of
from router.http.responses import ResponsesGeneration, owner_of
from router.http.responses_body import ResponsesBody

routes = web.RouteTableDef()

_DEFAULT_ITEMS = 20


class ItemsQuery(Body):
    after: str | None = None
    """The last id of the page before."""
    limit: int | None = Field(default=None, ge=1, le=100)
    order: Literal["asc", "desc"] | None = None
    """`desc` if left out: the last item first."""


@routes.post("/v1/responses/input_tokens")
@Described("How many tokens the input of such a request has.", bodies=(ResponsesBody,))
async def input_tokens(request: web.Request) -> web.Response:
    body = await parsed(request, partial(parse_body, ResponsesBody))
    generation = ResponsesGeneration(request.app[FRONT], body, HttpCall.of(request))
    with blaming(body.names()):
        generation.front.inference.check_model(body.model)
        prompt = await generation.read_prompt(0)
    return web.json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


@routes.get("/v1/responses/{response_id}")
@Described("A stored answer.")
async def retrieve(request: web.Request) -> web.Response:
    if request.query.get("stream", "").lower() in ("true", "1"):
        raise HttpError(400, "stream: stored answers are returned whole; leave it out", param="stream", code="unsupported_parameter")
    return web.Response(text=(await _stored(request)).response, content_type="application/json")


@routes.delete("/v1/responses/{response_id}")
@Described("Deletes a stored answer. Conversations that went on after it cannot go on.")
async def delete(request: web.Request) -> web.Response:
    response_id = request.match_info["response_id"]
    await _store(request).delete(_owner(request), response_id)
    return web.json_response({"id": response_id, "object": "response", "deleted": True})


@routes.post("/v1/responses/{response_id}/cancel")
@Described("Refused: there are no answers in the background.")
async def cancel(request: web.Request) -> web.Response:
    await _stored(request)
    raise HttpError(400, "Cannot cancel a synchronous response: close the connection of the request that asks for it")


@routes.get("/v1/responses/{response_id}/input_items")
@Described("The items of a stored answer's own request, without those of the answers before it.", query=ItemsQuery)
async def input_items(request: web.Request) -> web.StreamResponse:
    query = query_of(ItemsQuery, request)
    name, stored = name_of(request.match_info["response_id"]), await _stored(request)
    parts = stored.parts()[: stored.num_input]
    items = [item_of(part, f"{name}_in{i}") for i, part in enumerate(parts)]
    if query.order != "asc":
        items.reverse()
    start = 0
    if query.after is not None:
        start = next((i for i, item in enumerate(items, 1) if item["id"] == query.after), -1)
        if start < 0:
            raise HttpError(400, f"after is {query.after[:80]!r}, which is none of the items; give an id of the page before", param="after")
    page = items[start : start + (query.limit or _DEFAULT_ITEMS)]
    num_bytes = sum(len(json.dumps(item)) for item in page)
    return await listed(request, page, has_more=start + len(page) < len(items), num_bytes=num_bytes)


def _store(request: web.Request) -> ResponseStore:
    store = request.app[FRONT].responses
    if store is None:
        raise HttpError(404, "this router stores no answers; start it with a --response-ttl above 0", code="unsupported_endpoint")
    return store


def _owner(request: web.Request) -> Owner:
    return owner_of(request[IDENTITY])


async def _stored(request: web.Request) -> StoredResponse:
    return await _store(request).get(_owner(request), request.match_info["response_id"])
