"""POST and GET /v1/batches: OpenAI's, over router.batches."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel

from router.access.identity import Identity
from router.batches.records import Asked, owner_of, view
from router.batches.run import Answered, Asking, Failure
from router.batches.service import Batches
from router.batches.store import Stored
from router.http.batch_replies import BatchBody, BatchList, BatchQuery, BatchReply
from router.http.calls import Call, parsed
from router.http.chat import Chat
from router.http.chat_body import ChatBody
from router.http.completion_body import CompletionBody
from router.http.completions import Completion
from router.http.described import described
from router.http.errors import HttpError, body_of
from router.http.fields import parse_body
from router.http.front import FRONT, IDENTITY, Front
from router.http.whole_answer import ENCODER, INLINE_BYTES, Encoder, WholeAnswer
from router.json_pieces import json_pieces, small
from router.request.targets import tenant_of
from twostep.rpc.v1 import inference_pb2 as pb

routes = web.RouteTableDef()

_DEFAULT_LIMIT = 20
# An entry of a list, about.
_LISTED_BYTES = 400
AnyQuery = TypeVar("AnyQuery", bound=BaseModel)


@routes.post("/v1/batches")
@described("Has the requests of a file answered when there is room.", bodies=(BatchBody,), reply=BatchReply)
async def create(request: web.Request) -> web.Response:
    batches = batches_of(request)
    body = await parsed(request, partial(parse_body, BatchBody))
    identity = request[IDENTITY]
    stored = await batches.create(
        tenant=tenant_name(identity),
        key_id=identity.key_id,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_lives_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
    )
    return _batch(stored)


@routes.get("/v1/batches")
@described("Your batches, newest first.", query=BatchQuery, reply=BatchList)
async def batch_list(request: web.Request) -> web.StreamResponse:
    batches, query = batches_of(request), query_of(BatchQuery, request)
    limit = query.limit or _DEFAULT_LIMIT
    found, has_more = await batches.threads.short(batches.store.page, owner(request), after=query.after, limit=limit)
    return await listed(request, [_view(each) for each in found], has_more=has_more)


@routes.get("/v1/batches/{batch_id}")
@described("How far a batch is.", reply=BatchReply)
async def retrieve(request: web.Request) -> web.Response:
    batches = batches_of(request)
    return _batch(await batches.threads.short(batches.store.get, owner(request), request.match_info["batch_id"]))


@routes.post("/v1/batches/{batch_id}/cancel")
@described("Ends a batch; what is answered already is kept.", reply=BatchReply)
async def cancel(request: web.Request) -> web.Response:
    stored = await batches_of(request).cancel(owner(request), request.match_info["batch_id"])
    if stored.cancelled is None:
        raise HttpError(409, f"the batch is over ({_view(stored)['status']}); there is nothing to cancel", code="batch_over")
    return _batch(stored)


def _batch(stored: Stored) -> web.Response:
    return web.json_response(_view(stored))


def _view(stored: Stored) -> dict[str, Any]:
    return view(stored.asked, stored.state, stored.cancelled)


# ---- shared with files ---------------------------------------------------------------------------------------------------------


def batches_of(request: web.Request) -> Batches:
    """Raises HttpError 404 where there are none."""
    batches = request.app[FRONT].batches
    if batches is None:
        raise HttpError(
            404, f"{request.path}: this router keeps no files and batches; start it with --batch-dir DIR", code="unsupported_endpoint"
        )
    return batches


def tenant_name(identity: Identity) -> str:
    """Whose files are whose. Raises InvalidRequest."""
    return tenant_of(pb.GenerateRequest(), identity.tenant) or identity.fallback


def owner(request: web.Request) -> str:
    return owner_of(tenant_name(request[IDENTITY]))


def query_of(kind: type[AnyQuery], request: web.Request) -> AnyQuery:
    """Raises HttpError 400. Of what is said twice, the first counts."""
    told: dict[str, Any] = {}
    for name in kind.model_fields:
        value = request.query.get(name)
        if value is not None:
            told[name] = int(value) if name == "limit" and value.isascii() and value.isdigit() and len(value) < 10 else value
    return parse_body(kind, json.dumps(told).encode())


async def listed(request: web.Request, data: Sequence[Mapping[str, Any]], *, has_more: bool) -> web.StreamResponse:
    ids = [data[0]["id"], data[-1]["id"]] if data else [None, None]
    told = {"object": "list", "data": small(iter(data)), "first_id": ids[0], "last_id": ids[1], "has_more": has_more}
    return await request.app[ENCODER].respond(request, WholeAnswer({}, _LISTED_BYTES * len(data), json_pieces(told)))


# ---- what batches ask ----------------------------------------------------------------------------------------------------------


class BatchEndpoints:
    """See router.batches.run.Endpoints: the same code answers that answers HTTP requests."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._encoder = Encoder()
        self._large = asyncio.Lock()

    @asynccontextmanager
    async def answer(self, asking: Asking) -> AsyncIterator[Answered]:
        """Raises TwostepError."""
        identity = self._identity(asking.asked)
        with identity.calling():
            call = Call(request_id=asking.request_id, identity=identity)
            endpoint: Chat | Completion
            parse = self._front.parser.parse
            if asking.endpoint == "/v1/chat/completions":
                endpoint = Chat(self._front, await parse(partial(parse_body, ChatBody), asking.body), call)
            else:
                endpoint = Completion(self._front, await parse(partial(parse_body, CompletionBody), asking.body), call)
            endpoint.check_size(is_line=True)
            # As JSON an answer is ten times as large, and stays so until it is on disk: one such at a time.
            async with endpoint.whole() as whole, self._large if whole.num_bytes > INLINE_BYTES else nullcontext():
                yield Answered(body=await self._encoder.line(whole), usage=whole.usage)

    def failure(self, error: Exception) -> Failure:
        status, body, _ = body_of(error)
        return Failure(status=status, body=json.dumps(body).encode("ascii"))

    def ready(self) -> bool:
        return self._front.ready()

    def _identity(self, asked: Asked) -> Identity:
        """Whoever made the batch, as far as that may still be."""
        identity = self._front.access.identity_of(asked.key_id)
        return identity if identity.tenant is not None else dataclasses.replace(identity, tenant=asked.tenant)
