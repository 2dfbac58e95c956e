"""Holds what all handlers of the HTTP front need, and what they know of one request."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from router.access.account import Identity
from router.access.control import Access
from router.batches.service import Batches
from router.http.bodies import BODIES, json_body
from router.http.body_parser import BodyParser
from router.http.response_store import ResponseStore
from router.request.job import Metadata
from router.request.targets import tenant_of
from router.serving.inference import Inference
from router.status.board import StatusBoard
from router.status.request_book import RequestBook
from twostep.metrics.registry import MetricsRegistry
from twostep.process.tracing import Span, Tracer
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.chat_format import ChatFormat
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import TokenBytes, Tokenizer

T = TypeVar("T")
# The caller's trace context goes on to the workers.
_FORWARDED = ("traceparent", "tracestate")
# What gRPC takes as metadata, and as much as W3C asks of those who pass it on. A context that is none is left out.
_SENDABLE = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Front:
    """Shared by all requests. `alive` and `ready` are what the health service says; `started_unix_s` is the router's start, `admin_keys`
    what opens to operators the data of the page too, `trace_url` where traces are shown, with {trace_id}."""

    inference: Inference
    access: Access
    tokenizer: Tokenizer
    token_bytes: TokenBytes
    card: ModelCard
    chat_format: ChatFormat
    metrics: MetricsRegistry
    board: StatusBoard
    book: RequestBook
    alive: Callable[[], bool]
    ready: Callable[[], bool]
    started_unix_s: int
    max_body_bytes: int
    admin_keys: tuple[str, ...]
    trace_url: str = ""
    allowed_origins: Collection[str] = ()
    tracer: Tracer | None = None
    batches: Batches | None = None
    responses: ResponseStore | None = None
    parser: BodyParser


FRONT: web.AppKey[Front] = web.AppKey("front", Front)
# Of a request: its name, also where the client gave none.
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
# When all of its body was there, in time.monotonic() seconds.
RECEIVED: web.RequestKey[float] = web.RequestKey("received", float)
IDENTITY: web.RequestKey[Identity] = web.RequestKey("identity", Identity)
# Only where it is traced.
SPAN: web.RequestKey[Span] = web.RequestKey("span", Span)


def forwarded(request: web.Request) -> Metadata:
    """Returns the trace context of what is done for this request: of its own span, or what its client sent."""
    span: Span | None = request.get(SPAN)
    if span is not None:
        return span.metadata
    given = ((name, request.headers.get(name, "")) for name in _FORWARDED)
    return tuple((name, value) for name, value in given if _SENDABLE.fullmatch(value))


def tenant_name(identity: Identity) -> str:
    """Returns the name by which what the caller keeps here is kept apart from others'. Raises InvalidRequest."""
    return tenant_of(pb.GenerateRequest(), identity.tenant) or identity.fallback


async def parsed(request: web.Request, read: Callable[[bytes], T]) -> T:
    """Returns the body of a request as `read` has it: see BodyParser. Raises HttpError 415: what a browser sends from anywhere without
    asking first is not taken."""
    raw = await json_body(request)
    request[RECEIVED] = time.monotonic()
    try:
        return await request.app[FRONT].parser.parse(read, raw, request[IDENTITY].share)
    finally:
        request.app[BODIES].free(request)
