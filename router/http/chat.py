"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from router.http.asked import HEADERS, Asked, Finale, Send, respond
from router.http.calls import Call, json_body
from router.http.chat_body import ChatBody, adapt_roles
from router.http.chunks import CHAT_WRAP, ChunkWriter
from router.http.described import described
from router.http.fields import parse_body
from router.http.front import FRONT, Front
from router.http.logprobs import chat_logprobs
from router.http.replies import ChatChunk, ChatCompletion
from router.http.tool_use import ToolMessage, ToolUse, deltas_of, finish_with_calls
from router.http.usage import finish_of, stop_reason_of, usage_of
from router.prompt import Prompt
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
    raw = await json_body(request)
    call = Call.of(request)
    body = parse_body(ChatBody, raw)
    return await respond(request, Chat(request.app[FRONT], body, call), stream=bool(body.stream))


class Chat(Asked[ChatBody]):
    """Constructing it refuses what cannot be done; then either `whole` or `stream`."""

    def __init__(self, front: Front, body: ChatBody, call: Call) -> None:
        super().__init__(front, body, call, prefix="chatcmpl")
        self._chat = body.prompt()
        adapt_roles(self._chat, front.card.chat_template)
        self._request.chat.SetInParent()
        self.tools = ToolUse.of(body, front.chat_format)
        self.tools.prepare(self._request, front.tokenizer)
        if self.tools.format is None:
            del self._chat.tools[:]

    async def read_prompt(self, index: int) -> Prompt:
        request = pb.GenerateRequest(chat=self._chat, keep_special_tokens=self._request.keep_special_tokens)
        return await self.front.inference.read_prompt(request)

    async def whole(self) -> dict[str, Any]:
        readers = [WholeChoice(self, index) for index in range(self.n)]
        await self.ask(readers)
        ends = [reader.finished for reader in readers]
        answer = {"id": self.id, "object": "chat.completion", **self.common}
        answer |= {"choices": [reader.choice() for reader in readers], "usage": self.usage(ends), **self.phases(ends)}
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = list(readers[0].prompt)
        return answer

    async def stream(self, send: Send) -> None:
        head = {"id": self.id, "object": "chat.completion.chunk", **self.common}
        finale = Finale(self, head, self.n)
        readers = [StreamedChoice(self, index, head, finale, send) for index in range(self.n)]
        await self.ask(readers)


class WholeChoice:
    """Keeps its answer until it is whole."""

    def __init__(self, chat: Chat, index: int) -> None:
        self._chat, self._index = chat, index
        self._said = ToolMessage(chat.tools.parser())
        self._reasoning: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[str, Any]] = []
        self.prompt: Sequence[int] = ()
        self.finished = pb.End()

    async def write(self, response: pb.GenerateResponse) -> None:
        piece = response.piece
        if piece.text:
            self._said.write(piece.text)
        if piece.reasoning:
            self._reasoning.append(piece.reasoning)
        if self._chat.body.return_token_ids:
            self._token_ids += piece.token_ids
        if piece.logprobs:
            self._logprobs += chat_logprobs(piece.token_ids, piece.logprobs, self._chat.names)

    async def end(self, end: pb.End) -> None:
        self.finished = end
        self._said.end()

    def choice(self) -> dict[str, Any]:
        body = self._chat.body
        message: dict[str, Any] = {"role": "assistant", "refusal": None, **self._said.fields()}
        if self._reasoning and body.include_reasoning is not False:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": None if body.num_logprobs is None else {"content": self._logprobs, "refusal": None},
            "finish_reason": finish_with_calls(finish_of(self.finished), self._said.num_calls),
            "stop_reason": stop_reason_of(self.finished, body.stop_strings),
        }
        if body.return_token_ids:
            choice["token_ids"] = self._token_ids
        return choice


class StreamedChoice:
    """Sends its answer as it comes: one event a piece."""

    def __init__(self, chat: Chat, index: int, head: dict[str, Any], finale: Finale, send: Send) -> None:
        self._chat, self._index, self._finale, self._send = chat, index, finale, send
        body = chat.body
        self._chunks = ChunkWriter(head, index, wrap=CHAT_WRAP, with_usage=chat.include_usage)
        self._with_reasoning = body.include_reasoning is not False
        # Pieces have text and nothing else to tell.
        self._parser = chat.tools.parser()
        self._plain = self._parser is None and body.num_logprobs is None and not body.return_token_ids and not chat.continuous_usage
        self._num_tokens = 0
        self._begun = False
        self.prompt: Sequence[int] = ()

    async def write(self, response: pb.GenerateResponse) -> None:
        piece = response.piece
        plain = self._plain and not piece.reasoning
        event = self._detailed(piece) if not plain else self._chunks.text(piece.text) if piece.text else b""
        if not self._begun:
            event = self._beginning() + event
        if event:
            await self._send(event)

    async def end(self, end: pb.End) -> None:
        rest = b"" if self._begun else self._beginning()
        reason = finish_of(end)
        if self._parser is not None:
            rest += b"".join(map(self._delta, deltas_of(self._parser.finish())))
            reason = finish_with_calls(reason, self._parser.num_calls)
        fields: dict[str, Any] = {
            "delta": {},
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": stop_reason_of(end, self._chat.body.stop_strings),
        }
        last = self._chunks.choice(fields, **self._finale.beside(end))
        await self._send(rest + last + self._finale.after(self._index, end))

    def _beginning(self) -> bytes:
        self._begun = True
        fields: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        others: dict[str, Any] = {}
        if self._chat.body.return_token_ids:
            others["prompt_token_ids"] = list(self.prompt)
        if self._chat.include_usage or self._chat.continuous_usage:
            others["usage"] = usage_of(len(self.prompt), 0) if self._chat.continuous_usage else None
        return self._chunks.choice(fields, **others)

    def _detailed(self, piece: pb.Piece) -> bytes:
        body = self._chat.body
        deltas = self._deltas(piece)
        fields: dict[str, Any] = {}
        if body.num_logprobs is not None:
            fields["logprobs"] = {"content": chat_logprobs(piece.token_ids, piece.logprobs, self._chat.names), "refusal": None}
        if body.return_token_ids:
            fields["token_ids"] = list(piece.token_ids)
        self._num_tokens += len(piece.token_ids)
        if not deltas:
            return self._delta({}, **fields) if fields else b""
        return self._delta(deltas[0], **fields) + b"".join(map(self._delta, deltas[1:]))

    def _deltas(self, piece: pb.Piece) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if piece.reasoning and self._with_reasoning:
            deltas.append({"reasoning_content": piece.reasoning, "reasoning": piece.reasoning})
        if self._parser is not None:
            return deltas + deltas_of(self._parser.push(piece.text))
        if piece.text:
            deltas.append({"content": piece.text})
        return deltas

    def _delta(self, delta: dict[str, Any], **others: Any) -> bytes:
        """`others` stand beside it: log probabilities, token ids."""
        beside: dict[str, Any] = {}
        if self._chat.continuous_usage:
            beside["usage"] = usage_of(len(self.prompt), self._num_tokens)
        return self._chunks.choice({"delta": delta, "logprobs": None, "finish_reason": None, **others}, **beside)
