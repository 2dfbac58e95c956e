"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from router.http.choices import CHAT_WRAP, Events, KeptText, Said, StreamedChoice, WholeChoice, usage_of, was_cut
from router.http.errors import HttpError
from router.http.front import FRONT, Front, parsed
from router.http.generation import HEADERS, HttpCall, HttpGeneration, respond
from router.http.logprobs import ChatLogprobsWriter
from router.http.openapi import Described
from router.http.request_bodies import ChatBody, NamedTool, ToolText, adapt_roles, parse_body
from router.prompting.prompt import Prompt
from router.request.memory_budget import Holding
from twostep.rpc.convert import grammar_from_proto, grammar_to_proto
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.answer_grammar import Function, either, strict_grammar, tool_call_grammar
from twostep.text.chat_format import ChatFormat
from twostep.text.tokenizer import Tokenizer
from twostep.text.tool_calls import CallArguments, CallBegun, ContentDelta, Event, ToolCallFormat, ToolCallParser

# What a call takes beside its arguments.
_CALL_BYTES = 600


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`format` None: answers have no calls, and none are looked for. `must`: the answer is nothing but calls, of `tools`."""

    format: ToolCallFormat | None = None
    tools: tuple[ToolText, ...] = ()
    must: bool = False
    parallel: bool = True

    @classmethod
    def of(cls, body: ChatBody, chat_format: ChatFormat) -> ToolUse:
        """Raises HttpError 400 for what cannot be done."""
        choice = "auto" if body.tool_choice is None else body.tool_choice
        tools = body.tools or []
        if not tools:
            if choice in ("none", "auto"):
                return cls()
            raise HttpError(400, "tool_choice asks for a call, and there are no tools; send `tools`", param="tool_choice")
        if len({tool.name for tool in tools}) < len(tools):
            raise HttpError(400, "two tools have the same name; rename one", param="tools")
        if choice == "none":
            return cls()
        if chat_format.tool_calls is None:
            raise HttpError(
                400,
                "this model's chat template writes no tool calls that are known here; leave `tools` out, set tool_choice to none, or "
                "start the router with --tool-call-parser",
                param="tools",
            )
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.name == choice.function.name]
            if not tools:
                raise HttpError(
                    400,
                    f"tool_choice names {choice.function.name[:64]!r}, which is none of the tools; add it, or name another",
                    param="tool_choice.function.name",
                )
        must = choice == "required" or isinstance(choice, NamedTool)
        one = isinstance(choice, NamedTool) or body.parallel_tool_calls is False
        return cls(chat_format.tool_calls, tuple(tools), must, parallel=not one)

    def prepare(self, request: pb.GenerateRequest, tokenizer: Tokenizer) -> None:
        """Holds the answer to calls if there must be some, and the arguments of strict functions to their schemas. What else the answer is
        held to holds where it calls nothing."""
        if self.format is None:
            return
        grammar = None
        if self.must or request.sampling.HasField("grammar"):
            grammar = tool_call_grammar(self.format, self._functions(), tokenizer, parallel=self.parallel)
            if not self.must:
                grammar = either(grammar, grammar_from_proto(request.sampling.grammar))
        elif any(tool.strict for tool in self.tools):
            grammar = strict_grammar(self.format, self._functions(), tokenizer, parallel=self.parallel)
        if grammar is not None:
            request.sampling.grammar.CopyFrom(grammar_to_proto(grammar))

    def _functions(self) -> list[Function]:
        return [Function(tool.name, tool.parameters(), tool.strict) for tool in self.tools]

    def parser(self) -> ToolCallParser | None:
        """Returns one for an answer."""
        if self.format is None:
            return None
        return ToolCallParser(self.format, names=[tool.name for tool in self.tools], parallel=self.parallel, must=self.must)


class ToolMessage:
    """A whole answer, put together from its pieces."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        self._parser = parser
        self._content = KeptText()
        self._calls: list[_Called] = []

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def num_bytes(self) -> int:
        """But for what came last."""
        return self._content.num_bytes + sum(_CALL_BYTES + call.arguments.num_bytes for call in self._calls)

    def write(self, text: str) -> None:
        if self._parser is None:
            self._content.add(text)
        else:
            self._add(self._parser.push(text))

    def end(self, *, cut: bool) -> None:
        if self._parser is not None:
            self._add(self._parser.finish(cut=cut))

    def fields(self) -> dict[str, Any]:
        """Returns the message's fields; the content of one that only calls is null."""
        content = str(self._content)
        if not self._calls:
            return {"content": content}
        return {"content": content or None, "tool_calls": [call.told() for call in self._calls]}

    def _add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    self._content.add(text)
                case CallBegun(_, call_id, name):
                    self._calls.append(_Called(call_id, name))
                case CallArguments(index, text):
                    self._calls[index].arguments.add(text)


@dataclass(slots=True)
class _Called:
    id: str
    name: str
    arguments: KeptText = field(default_factory=KeptText)

    def told(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": str(self.arguments)}}


def deltas_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    """One for each event: there are clients that look at the first call of a delta only."""
    return [_delta(event) for event in events]


def _delta(event: Event) -> dict[str, Any]:
    match event:
        case ContentDelta(text):
            return {"content": text}
        case CallBegun(index, call_id, name):
            call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        case CallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return {"tool_calls": [call]}


def finish_with_calls(reason: str, num_calls: int) -> str:
    """An answer that was cut off is that, calls or not."""
    return "tool_calls" if num_calls and reason == "stop" else reason


routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
@Described(
    "Answers to a chat.",
    bodies=(ChatBody,),
    events=True,
    headers=HEADERS,
)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    body = await parsed(request, partial(parse_body, ChatBody))
    return await respond(request, ChatGeneration(request.app[FRONT], body, HttpCall.of(request)), stream=bool(body.stream))


class ChatGeneration(HttpGeneration[ChatBody]):
    """See HttpGeneration."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, front: Front, body: ChatBody, call: HttpCall) -> None:
        super().__init__(front, body, call)
        self._chat = body.prompt()
        adapt_roles(self._chat, front.card.chat_template)
        self._request.chat.SetInParent()
        self.tools = ToolUse.of(body, front.chat_format)
        self.tools.prepare(self._request, front.tokenizer)
        if self.tools.format is None:
            del self._chat.tools[:]
        self.with_reasoning = body.include_reasoning is not False

    async def read_prompt(self, index: int) -> Prompt:
        request = pb.GenerateRequest(chat=self._chat, keep_special_tokens=self._request.keep_special_tokens)
        prompt = await self.front.inference.prompts.prompt(request)
        self.check_room(prompt)
        self.check_repeated(prompt)
        return prompt

    def beside_choices(self, prompt: Sequence[int]) -> dict[str, Any]:
        return {"prompt_token_ids": list(prompt)} if self.wanted.token_ids else {}

    def whole_choice(self, index: int, holding: Holding) -> WholeMessage:
        return WholeMessage(self, index, holding)

    def streamed_choice(self, index: int, events: Events) -> StreamedMessage:
        return StreamedMessage(self, index, events)


class WholeMessage(WholeChoice):
    def __init__(self, chat: ChatGeneration, index: int, holding: Holding) -> None:
        super().__init__(index, chat.wanted, ChatLogprobsWriter(chat.names), holding)
        self._message = ToolMessage(chat.tools.parser())
        self._with_reasoning = chat.with_reasoning
        self._reasoning = KeptText()

    def take(self, piece: pb.Piece) -> None:
        if piece.text:
            self._message.write(piece.text)
        if piece.reasoning and self._with_reasoning:
            self._reasoning.add(piece.reasoning)

    async def end(self, end: pb.End) -> None:
        self._message.end(cut=was_cut(end))
        await super().end(end)

    @property
    def num_text_bytes(self) -> int:
        return self._message.num_bytes + self._reasoning.num_bytes

    def said(self) -> Said:
        message: dict[str, Any] = {"role": "assistant", "refusal": None, **self._message.fields()}
        if reasoning := str(self._reasoning):
            message["reasoning_content"] = message["reasoning"] = reasoning
        return {"message": message}

    @property
    def finish_reason(self) -> str:
        return finish_with_calls(super().finish_reason, self._message.num_calls)


class StreamedMessage(StreamedChoice):
    def __init__(self, chat: ChatGeneration, index: int, events: Events) -> None:
        self._chat = chat
        self._parser = chat.tools.parser()
        super().__init__(index, events, ChatLogprobsWriter(chat.names), wrap=CHAT_WRAP, plain=self._parser is None)

    def opening(self) -> bytes:
        fields: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        others = self._chat.beside_choices(self.prompt)
        if self._wanted.include_usage or self._wanted.continuous_usage:
            others["usage"] = usage_of(len(self.prompt), 0) if self._wanted.continuous_usage else None
        return self._chunks.choice(fields, **others)

    def pieces(self, piece: pb.Piece) -> list[Said]:
        deltas: list[dict[str, Any]] = []
        if piece.reasoning and self._chat.with_reasoning:
            deltas.append({"reasoning_content": piece.reasoning, "reasoning": piece.reasoning})
        if self._parser is not None:
            deltas += deltas_of(self._parser.push(piece.text))
        elif piece.text:
            deltas.append({"content": piece.text})
        return [{"delta": delta} for delta in deltas]

    def last_words(self, end: pb.End) -> list[Said]:
        deltas = [] if self._parser is None else deltas_of(self._parser.finish(cut=was_cut(end)))
        return [{"delta": delta} for delta in (*deltas, {})]

    def silence(self) -> Said:
        return {"delta": {}}

    def finish_reason(self, end: pb.End) -> str:
        return finish_with_calls(super().finish_reason(end), 0 if self._parser is None else self._parser.num_calls)
