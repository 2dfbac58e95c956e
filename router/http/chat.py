"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from router.http.asked import HEADERS, Asked, respond
from router.http.calls import Call, parsed
from router.http.chat_body import ChatBody, adapt_roles
from router.http.choices import Events, Said, StreamedChoice, WholeChoice
from router.http.chunks import CHAT_WRAP
from router.http.described import described
from router.http.fields import parse_body
from router.http.front import FRONT, Front
from router.http.kept_text import KeptText
from router.http.logprobs import ChatLogprobs
from router.http.replies import ChatChunk, ChatCompletion
from router.http.tool_use import ToolMessage, ToolUse, deltas_of, finish_with_calls
from router.http.usage import usage_of, was_cut
from router.prompting.prompt import Prompt
from router.request.memory_budget import Holding
from twostep.rpc.v1 import inference_pb2 as pb

routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
@described(
    "Answers to a chat.",
    bodies=(ChatBody,),
    reply=ChatCompletion,
    events=ChatChunk,
    headers=HEADERS,
)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    body = await parsed(request, partial(parse_body, ChatBody))
    return await respond(request, Chat(request.app[FRONT], body, Call.of(request)), stream=bool(body.stream))


class Chat(Asked[ChatBody]):
    """See Asked."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, front: Front, body: ChatBody, call: Call) -> None:
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
    def __init__(self, chat: Chat, index: int, holding: Holding) -> None:
        super().__init__(index, chat.wanted, ChatLogprobs(chat.names), holding)
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
    def __init__(self, chat: Chat, index: int, events: Events) -> None:
        self._chat = chat
        self._parser = chat.tools.parser()
        super().__init__(index, events, ChatLogprobs(chat.names), wrap=CHAT_WRAP, plain=self._parser is None)

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
