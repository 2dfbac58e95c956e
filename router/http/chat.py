"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from aiohttp import web

from router.http.choices import Folded, Said, Teller
from router.http.errors import blaming
from router.http.front import Front
from router.http.generation import HEADERS, HttpCall, HttpGeneration, respond
from router.http.logprobs import ChatLogprobsWriter
from router.http.openapi import Described
from router.http.request_bodies import ChatBody, adapt_roles
from router.prompting.prompt import Prompt
from twostep.rpc.v1 import inference_pb2 as pb


def call_of(delta: pb.ToolCallDelta) -> dict[str, Any]:
    if delta.id:
        return {"index": delta.index, "id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
    return {"index": delta.index, "function": {"arguments": delta.arguments}}


routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
@Described("Answers to a chat.", bodies=(ChatBody,), events=True, headers=HEADERS)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await respond(request, ChatBody, ChatGeneration)


AnyChat = TypeVar("AnyChat", bound=ChatBody)


class ChatGeneration(HttpGeneration[AnyChat]):
    """See HttpGeneration."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, front: Front, body: AnyChat, call: HttpCall) -> None:
        super().__init__(front, body, call)
        self._chat = body.prompt()
        adapt_roles(self._chat, front.card.chat_template)
        self._request.chat.SetInParent()
        with blaming(body.names()):
            self.tools = body.tool_use(front.chat_format.tool_calls)
        if self.tools.format is None:
            del self._chat.tools[:]
        self.with_reasoning = body.tells_reasoning

    @property
    def headers(self) -> dict[str, str]:
        return super().headers | self.body.offered.headers()

    async def conversation(self) -> pb.Chat:
        """Returns all messages of the chat, in roles that the template knows. Raises TwostepError."""
        return self._chat

    async def read_prompt(self, index: int) -> Prompt:
        chat = await self.conversation()
        request = pb.GenerateRequest(chat=chat, keep_special_tokens=self._request.keep_special_tokens)
        prompt = await self.front.inference.prompts.prompt(request, self.call.identity.share)
        self.check_room(prompt)
        self.check_repeated(prompt)
        return replace(prompt, tools=self.tools)

    def teller(self, index: int) -> MessageTeller:
        return MessageTeller(ChatLogprobsWriter(self.names), plain=self.tools.format is None, with_reasoning=self.with_reasoning)


class MessageTeller(Teller):
    text, wrap = "content", ('"delta":{"content":', "}")
    opening: ClassVar[Said | None] = {"delta": {"role": "assistant", "content": ""}}
    silence: ClassVar[Said] = {"delta": {}}
    prompt_ids_beside = True

    def __init__(self, logprobs: ChatLogprobsWriter, *, plain: bool = True, with_reasoning: bool) -> None:
        super().__init__(logprobs, plain=plain)
        self._with_reasoning = with_reasoning

    def pieces(self, piece: pb.Piece) -> list[Said]:
        """Returns a piece for each call's delta: there are clients that look at the first call of an event only."""
        deltas: list[dict[str, Any]] = []
        if piece.reasoning and self._with_reasoning:
            deltas.append({"reasoning_content": piece.reasoning, "reasoning": piece.reasoning})
        if piece.text:
            deltas.append({"content": piece.text})
        deltas += [{"tool_calls": [call_of(delta)]} for delta in piece.tool_calls]
        return [{"delta": delta} for delta in deltas]

    def whole(self, folded: Folded) -> Said:
        """Returns the whole message. The content of a message that only calls is null."""
        message: dict[str, Any] = {"role": "assistant", "refusal": None, "content": str(folded.texts["content"])}
        if folded.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": str(arguments)}}
                for call_id, name, arguments in folded.calls
            ]
        if reasoning := str(folded.texts["reasoning"]):
            message["reasoning_content"] = message["reasoning"] = reasoning
        return {"message": message}
