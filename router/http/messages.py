"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from router.http.blocks import Block, BlockGeneration, Dialect, Event, Kind
from router.http.body import parse_body
from router.http.choices import finish_of
from router.http.errors import anthropic_body_of, blaming
from router.http.front import FRONT, Front, parsed
from router.http.generation import HEADERS, HttpCall, respond
from router.http.logprobs import KeptLogprobs
from router.http.messages_body import CountBody, MessagesBody
from router.http.openapi import AnthropicError, Described
from router.json_pieces import Json, compact
from twostep.rpc.v1 import inference_pb2 as pb

routes = web.RouteTableDef()


@routes.post("/v1/messages")
@Described("Answers to a chat, in Anthropic's shape.", bodies=(MessagesBody,), events=True, headers=HEADERS, failure=AnthropicError)
async def messages(request: web.Request) -> web.StreamResponse:
    return await respond(request, MessagesBody, MessagesGeneration)


@routes.post("/v1/messages/count_tokens")
@Described("How many tokens such a chat has.", bodies=(CountBody,), failure=AnthropicError)
async def count_tokens(request: web.Request) -> web.Response:
    body = await parsed(request, partial(parse_body, CountBody))
    generation = MessagesGeneration(request.app[FRONT], body, HttpCall.of(request))
    with blaming(body.names()):
        generation.front.inference.check_model(body.model)
        prompt = await generation.read_prompt(0)
    return web.json_response({"input_tokens": len(prompt.ids)})


class MessagesGeneration(BlockGeneration[MessagesBody]):
    """See HttpGeneration."""

    prefix, object, chunk_object = "msg", "message", "message"

    def __init__(self, front: Front, body: MessagesBody, call: HttpCall) -> None:
        super().__init__(front, body, call)
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.common["model"]}
        self.dialect = MessagesDialect(head, body.stop_strings)

    @property
    def headers(self) -> dict[str, str]:
        """Anthropic's clients look for the request's name under another."""
        return {**super().headers, "request-id": super().headers["x-request-id"]}


_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_DELTAS = {
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}
_PING: Event = {"type": "ping"}


class MessagesDialect(Dialect):
    """Blocks are Anthropic's content blocks."""

    ping, tells_again = b'event: ping\ndata: {"type":"ping"}\n\n', False

    def __init__(self, head: dict[str, Any], stop_strings: Sequence[str]) -> None:
        self._head, self._stop_strings = head, stop_strings

    def begin(self, num_prompt_tokens: int) -> Iterable[Event]:
        """Returns the first events. The end tells how much of the prompt was cached."""
        usage = pb.Usage(prompt_tokens=num_prompt_tokens)
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
        return [{"type": "message_start", "message": message}, _PING]

    def opened(self, block: Block) -> Iterable[Event]:
        return [{"type": "content_block_start", "index": block.index, "content_block": _content(block, "", {})}]

    def more(self, block: Block, text: str, logprobs: KeptLogprobs) -> Event:
        kind, name = _DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def closed(self, block: Block) -> Iterable[Event]:
        return [{"type": "content_block_stop", "index": block.index}]

    def ended(self, blocks: Sequence[Block], end: pb.End) -> Iterable[Event]:
        return [{"type": "message_delta", "delta": self._stop(blocks, end), "usage": _usage(end.usage)}, {"type": "message_stop"}]

    def failed(self, error: BaseException) -> Event:
        return anthropic_body_of(error)[1]

    def whole(self, blocks: Sequence[Block], end: pb.End) -> Event:
        content = (_content(block, str(block.text), None) for block in blocks)
        return {**self._head, "content": content, **self._stop(blocks, end), "usage": _usage(end.usage)}

    def _stop(self, blocks: Sequence[Block], end: pb.End) -> dict[str, Any]:
        reason, found = _STOPS[finish_of(end)], None
        # Whole calls are to be made, also where a stop string is behind them.
        if reason != "tool_use" and end.stop_reason in self._stop_strings:
            reason, found = "stop_sequence", end.stop_reason
        return {"stop_reason": reason, "stop_sequence": found}


def _content(block: Block, text: str, arguments: Any) -> dict[str, Any]:
    """`arguments` None: those in the text."""
    match block.kind:
        case Kind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}
        case Kind.TEXT:
            return {"type": "text", "text": text}
        case Kind.CALL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": _object(text) if arguments is None else arguments}


def _object(text: str) -> Any:
    """Returns the arguments of a call. What is no object is told in one, as Anthropic asks for it."""
    try:
        found = json.loads(text or "{}")
        return Json(compact(found)) if isinstance(found, dict) else {"INVALID_JSON": text}
    except (ValueError, RecursionError):
        return {"INVALID_JSON": text}


def _usage(usage: pb.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
