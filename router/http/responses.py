"""POST /v1/responses: OpenAI's Responses API. Answers are stored for later turns (router/http/response_store.py), unless the client says
`store: false`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any
from uuid import uuid4

from aiohttp import web

from router.access.account import Identity
from router.http.blocks import Block, BlockAnswer, BlockGeneration, Dialect, Event, Kind
from router.http.choices import finish_of
from router.http.errors import HttpError, body_of
from router.http.front import Front, tenant_name
from router.http.generation import HEADERS, HttpCall, respond
from router.http.logprobs import ChatLogprobsWriter, KeptLogprobs
from router.http.offered_tools import Choice, flat_name
from router.http.openapi import Described
from router.http.request_bodies import JsonFormat, JsonObjectFormat, adapt_roles, function_text
from router.http.response_items import joined, reference_of
from router.http.response_store import Owner, Recalled
from router.http.responses_body import ResponsesBody
from router.http.sse import KEEP_ALIVE
from router.http.whole_answer import EMPTY
from router.json_pieces import Json, json_pieces, small
from twostep.rpc.v1 import inference_pb2 as pb

routes = web.RouteTableDef()


@routes.post("/v1/responses")
@Described("Answers to a conversation, as items.", bodies=(ResponsesBody,), events=True, headers=HEADERS)
async def responses(request: web.Request) -> web.StreamResponse:
    return await respond(request, ResponsesBody, ResponsesGeneration)


class ResponsesGeneration(BlockGeneration[ResponsesBody]):
    """See HttpGeneration."""

    dialect: ResponsesDialect

    prefix, object, chunk_object = "resp", "response", "response"

    def __init__(self, front: Front, body: ResponsesBody, call: HttpCall) -> None:
        super().__init__(front, body, call)
        self.id = f"resp_{uuid4().hex}"
        self._recalled = Recalled([], [], [])
        logprobs = None if body.num_logprobs is None else ChatLogprobsWriter(self.names)
        in_json = isinstance(body.response_format, JsonFormat | JsonObjectFormat)
        namespaces = {tool.name: tool.namespace for tool in body.offered.functions if tool.namespace}
        self.dialect = ResponsesDialect(
            {"id": self.id, **self._request_fields()},
            self.name,
            logprobs,
            stored=body.store is not False and front.responses is not None,
            namespaces=namespaces,
            in_json=in_json,
            must_call=self.tools.must,
        )

    @property
    def name(self) -> str:
        """The id without its prefix: items are called after it."""
        return self.id.removeprefix("resp_")

    async def conversation(self) -> pb.Chat:
        """See ChatGeneration. Raises HttpError 400 and 404, Unavailable for what is not stored."""
        chat, previous = await super().conversation(), self.body.previous_response_id
        num_opening = len(pb.Chat.FromString(self.body.opening).messages)
        opening, own = chat.messages[:num_opening], chat.messages[num_opening:]
        if previous is None and not any(reference_of(part) for part in own):
            self._recalled = Recalled([], [], list(own))
        elif self.front.responses is None:
            param = "input" if previous is None else "previous_response_id"
            message = f"{param} refers to an earlier answer, and this router stores none; send the items so far as `input`"
            raise HttpError(400, message, param=param, code="unsupported_parameter")
        else:
            self._recalled = await self.front.responses.recall(owner_of(self.call.identity), previous, own, seconds=self._left_s())
        whole = pb.Chat()
        whole.CopyFrom(chat)
        del whole.messages[:]
        # What is joined is changed, and what is stored later is not.
        parts = pb.Chat(messages=[*opening, *self._recalled.before, *self._recalled.own]).messages
        whole.messages.extend(joined(parts))
        adapt_roles(whole, self.front.card.chat_template)
        return whole

    async def keep(self, answer: BlockAnswer) -> None:
        store, dialect = self.front.responses, self.dialect
        if store is None or not dialect.stored or (self._is_line and not self.body.store):
            dialect.stored = False
            return
        own = self._recalled.own
        fragments = pb.Chat(messages=[*own, *(_fragment(block) for block in answer.blocks)])
        fields = dialect.whole(answer.blocks, answer.finished)
        dialect.stored = await store.keep(
            owner_of(self.call.identity),
            self.name,
            previous=self._recalled.names,
            num_input=len(own),
            fragments=fragments,
            pieces=json_pieces(fields),
            num_bytes=answer.num_json_bytes + sum(len(tool.text) for tool in self.body.offered.functions) + len(self.body.opening),
            seconds=self._left_s(),
        )

    def _left_s(self) -> float:
        """Returns how much of the request's own time is left."""
        return self.call.received + self.timeout_s - time.monotonic()

    def _request_fields(self) -> dict[str, Any]:
        """Returns what of the request its answer repeats."""
        body, defaults = self.body, self.front.card.generation
        return {
            "object": self.object,
            "created_at": self.common["created"],
            "model": self.common["model"],
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_tokens,
            "max_tool_calls": None,
            "metadata": Json(body.metadata or "{}"),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning_effort, "summary": None},
            "service_tier": self.common.get("service_tier", "default"),
            "temperature": defaults.temperature if body.temperature is None else body.temperature,
            "text": {"format": self._format()},
            "tool_choice": _choice(body.tool_choice or Choice("auto")),
            "tools": [Json(f'{{"type":"function",{function_text(tool)[1:]}') for tool in body.offered.functions],
            "top_logprobs": body.num_logprobs or 0,
            "top_p": defaults.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def _format(self) -> dict[str, Any]:
        given = self.body.response_format
        if isinstance(given, JsonFormat):
            schema = given.json_schema
            schema_fields = {"description": schema.description, "schema": Json(schema.schema_), "strict": schema.strict is not False}
            return {"type": given.type, "name": schema.name, **schema_fields}
        return {"type": "text"} if given is None else given.model_dump()


def owner_of(identity: Identity) -> Owner:
    """Raises InvalidRequest for a tenant that is no name."""
    return Owner(identity.key_id, tenant_name(identity))


def _fragment(block: Block) -> pb.ChatMessage:
    """Returns what later turns have of a block."""
    text = str(block.text)
    match block.kind:
        case Kind.REASONING:
            return pb.ChatMessage(role="assistant", reasoning=text)
        case Kind.TEXT:
            return pb.ChatMessage(role="assistant", content=text)
        case Kind.CALL:
            return pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id=block.id, name=block.name, arguments=text)])


def _choice(choice: Choice) -> Any:
    if choice.function:
        return {"type": "function", "name": choice.function}
    if choice.allowed is not None:
        tools = [{"type": "function", "name": name} for name in choice.allowed]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return choice.mode


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
_DELTAS = {Kind.REASONING: "reasoning_text", Kind.TEXT: "output_text", Kind.CALL: "function_call_arguments"}


class ResponsesDialect(Dialect):
    """Each block is an item of the answer; those of text and reasoning have one part."""

    ping, tells_again = KEEP_ALIVE, True

    def __init__(
        self,
        response: dict[str, Any],
        name: str,
        logprobs: ChatLogprobsWriter | None,
        *,
        stored: bool = False,
        namespaces: Mapping[str, str] = EMPTY,
        in_json: bool = False,
        must_call: bool = False,
    ) -> None:
        """`response`: fields that the answer always has. `name`: its items are called after it. `logprobs` None: none were asked for.
        `stored`: what the answer says of `store`. `namespaces`: of functions that belong to one, by the names that the model calls them
        by. `in_json`, `must_call`: what the answer is held to."""
        self._response, self._name, self._logprobs, self._namespaces = response, name, logprobs, namespaces
        self.in_json, self._must_call, self.stored = in_json, must_call, stored
        self._numbers = count()

    def begin(self, num_prompt_tokens: int) -> Iterable[Event]:
        response = self._response_with("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def opened(self, block: Block) -> Iterator[Event]:
        yield self._event("output_item.added", output_index=block.index, item=self._item(block, "in_progress", ()))
        if block.kind is not Kind.CALL:
            yield self._event("content_part.added", **self._place(block), part=self._part(block, "", KeptLogprobs()))

    def more(self, block: Block, text: str, logprobs: KeptLogprobs) -> Event:
        beside = {"logprobs": self._named(logprobs, list)} if block.kind is Kind.TEXT else {}
        return self._event(f"{_DELTAS[block.kind]}.delta", **self._place(block), delta=text, **beside)

    def closed(self, block: Block) -> Iterator[Event]:
        name, place, text = f"{_DELTAS[block.kind]}.done", self._place(block), str(block.text)
        status = "incomplete" if block.cut else "completed"
        if block.kind is Kind.CALL:
            yield self._event(name, **place, **self._called(block), arguments=text)
            yield self._event("output_item.done", output_index=block.index, item=self._item(block, status, ()))
            return
        beside = {"logprobs": self._named(block.logprobs)} if block.kind is Kind.TEXT else {}
        yield self._event(name, **place, text=text, **beside)
        yield self._event("content_part.done", **place, part=self._part(block, text, block.logprobs))
        item = self._item(block, status, [self._part(block, text, block.logprobs)])
        yield self._event("output_item.done", output_index=block.index, item=item)

    def ended(self, blocks: Sequence[Block], end: pb.End) -> Iterator[Event]:
        response = self.whole(blocks, end)
        yield self._event(response["status"], response=response)

    def failed(self, error: BaseException) -> Event:
        status, body, _ = body_of(error)
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(status, "server_error")
        return self._event("failed", response=self._response_with("failed", error={"code": code, "message": body["error"]["message"]}))

    def whole(self, blocks: Sequence[Block], end: pb.End) -> Event:
        usage, reason = end.usage, self._incomplete(blocks, end)
        return self._response_with(
            "completed" if reason is None else "incomplete",
            incomplete_details=None if reason is None else {"reason": reason},
            output=(self._whole_item(block) for block in blocks),
            usage={
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        )

    def _incomplete(self, blocks: Sequence[Block], end: pb.End) -> str | None:
        """Returns why there would be more. OpenAI's endpoint has no stop strings and no name for the third reason."""
        finish = finish_of(end)
        if finish == "stop" and end.stop_reason and (self._must_call or (blocks and (blocks[-1].cut or blocks[-1].kind is Kind.CALL))):
            return "stop_sequence"
        return _INCOMPLETE.get(finish)

    def _response_with(self, status: str, **others: Any) -> dict[str, Any]:
        nothing = {"error": None, "incomplete_details": None, "output": (), "usage": None}
        return {**self._response, "store": self.stored, "status": status, **nothing, **others}

    def _event(self, name: str, /, **fields: Any) -> Event:
        return {"type": f"response.{name}", "sequence_number": next(self._numbers), **fields}

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._name}_{block.index}"

    def _place(self, block: Block) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind is Kind.CALL else place | {"content_index": 0}

    def _called(self, block: Block) -> dict[str, str]:
        """Returns the function's name as the client sent it."""
        namespace = self._namespaces.get(block.name)
        if namespace is None:
            return {"name": block.name}
        return {"name": block.name.removeprefix(flat_name(namespace, "")), "namespace": namespace}

    def _whole_item(self, block: Block) -> dict[str, Any]:
        parts = () if block.kind is Kind.CALL else (self._part(block, str(block.text), block.logprobs),)
        return self._item(block, "incomplete" if block.cut else "completed", parts)

    def _item(self, block: Block, status: str, parts: Sequence[Any]) -> dict[str, Any]:
        fields: dict[str, Any]
        match block.kind:
            case Kind.REASONING:
                fields = {"type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
            case Kind.TEXT:
                fields = {"type": "message", "role": "assistant", "content": parts}
            case Kind.CALL:
                arguments = "" if status == "in_progress" else str(block.text)
                fields = {"type": "function_call", "call_id": block.id, **self._called(block), "arguments": arguments}
        return {"id": self._id(block), **fields, "status": status}

    def _part(self, block: Block, text: str, logprobs: KeptLogprobs) -> dict[str, Any]:
        if block.kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._named(logprobs)}

    def _named(self, logprobs: KeptLogprobs, listed: Callable[[Iterator[Any]], Any] = small) -> Any:
        return [] if self._logprobs is None else self._logprobs.of_all(logprobs, listed)["content"]
