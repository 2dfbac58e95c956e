"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from router.http.asked import HEADERS, Asked, Finale, Send, respond
from router.http.calls import Call, json_body
from router.http.chunks import TEXT_WRAP, ChunkWriter
from router.http.completion_body import CompletionBody
from router.http.described import described
from router.http.fields import parse_body
from router.http.front import FRONT, Front
from router.http.logprobs import TextLogprobs
from router.http.replies import TextChunk, TextCompletion
from router.http.tokens import decoded
from router.http.usage import finish_of, stop_reason_of, usage_of
from router.prompt import Prompt
from twostep.errors import ContextExceeded
from twostep.rpc.v1 import inference_pb2 as pb

routes = web.RouteTableDef()


@routes.post("/v1/completions")
@described(
    "Texts that go on with prompts.",
    bodies=(CompletionBody,),
    reply=TextCompletion,
    events=TextChunk,
    headers=HEADERS,
)
async def completions(request: web.Request) -> web.StreamResponse:
    raw = await json_body(request)
    call = Call.of(request)
    body = parse_body(CompletionBody, raw)
    return await respond(request, Completion(request.app[FRONT], body, call), stream=bool(body.stream))


class Completion(Asked[CompletionBody]):
    """Constructing it refuses what cannot be done; then either `whole` or `stream`."""

    def __init__(self, front: Front, body: CompletionBody, call: Call) -> None:
        super().__init__(front, body, call, prefix="cmpl")
        self._prompts = body.prompts()
        self._request.text = ""  # it is one of text; the prompt is read apart
        for prompt in self._prompts:
            # Before millions of them are looked at once more.
            if not isinstance(prompt, str) and len(prompt) >= front.card.max_model_len:
                raise ContextExceeded(
                    f"a prompt has {len(prompt)} tokens and the context {front.card.max_model_len}; shorten it, leaving one for the answer"
                )

    @property
    def num_choices(self) -> int:
        return len(self._prompts) * self.n

    async def read_prompt(self, index: int) -> Prompt:
        inference, prompt = self.front.inference, self._prompts[index]
        if isinstance(prompt, str) and self.body.add_special_tokens is False:
            prompt = list(await inference.text_ids(prompt, add_special_tokens=False))
        request = pb.GenerateRequest(keep_special_tokens=self._request.keep_special_tokens)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return await inference.read_prompt(request)

    async def _echoes(self) -> list[str]:
        """What the texts of each prompt's answers begin with."""
        if not self.body.echo:
            return [""] * len(self._prompts)
        return [each if isinstance(each, str) else await decoded(self.front.tokenizer, each) for each in self._prompts]

    async def whole(self) -> dict[str, Any]:
        echoes = await self._echoes()
        readers = [WholeChoice(self, index, echoes[index // self.n]) for index in range(self.num_choices)]
        await self.ask(readers)
        ends = [reader.finished for reader in readers]
        answer = {"id": self.id, "object": "text_completion", **self.common}
        return answer | {"choices": [reader.choice() for reader in readers], "usage": self.usage(ends), **self.phases(ends)}

    async def stream(self, send: Send) -> None:
        head = {"id": self.id, "object": "text_completion", **self.common}
        finale = Finale(self, head, self.num_choices)
        echoes = await self._echoes()
        readers = [StreamedChoice(self, index, echoes[index // self.n], head, finale, send) for index in range(self.num_choices)]
        await self.ask(readers)


class WholeChoice:
    """Keeps its answer until it is whole."""

    def __init__(self, completion: Completion, index: int, echoed: str) -> None:
        self._completion, self._index = completion, index
        self._text = [echoed]
        self._pieces: list[pb.Piece] = []
        self.prompt: Sequence[int] = ()
        self.finished = pb.End()

    async def write(self, response: pb.GenerateResponse) -> None:
        self._text.append(response.piece.text)
        self._pieces.append(response.piece)

    async def end(self, end: pb.End) -> None:
        self.finished = end

    def choice(self) -> dict[str, Any]:
        body = self._completion.body
        token_ids = [token_id for piece in self._pieces for token_id in piece.token_ids]
        logprobs = None
        if body.logprobs is not None:
            logprobs = TextLogprobs(self._completion.names).of(token_ids, [each for piece in self._pieces for each in piece.logprobs])
        choice = {
            "index": self._index,
            "text": "".join(self._text),
            "logprobs": logprobs,
            "finish_reason": finish_of(self.finished),
            "stop_reason": stop_reason_of(self.finished, body.stop_strings),
        }
        if body.return_token_ids:
            choice |= {"prompt_token_ids": list(self.prompt), "token_ids": token_ids}
        return choice


class StreamedChoice:
    """Sends its answer as it comes: one event a piece."""

    def __init__(self, completion: Completion, index: int, echoed: str, head: dict[str, Any], finale: Finale, send: Send) -> None:
        self._completion, self._index, self._finale, self._send = completion, index, finale, send
        body = completion.body
        self._chunks = ChunkWriter(head, index, wrap=TEXT_WRAP, with_usage=completion.include_usage)
        self._logprobs = None if body.logprobs is None else TextLogprobs(completion.names)
        # Pieces have text and nothing else to tell.
        self._plain = body.logprobs is None and not body.return_token_ids and not completion.continuous_usage
        self._echoed = echoed
        self._num_tokens = 0
        self.prompt: Sequence[int] = ()

    async def write(self, response: pb.GenerateResponse) -> None:
        piece = response.piece
        text = piece.text
        if self._echoed:
            text, self._echoed = self._echoed + text, ""
        if not self._plain:
            await self._send(self._detailed(text, piece))
        elif text:
            await self._send(self._chunks.text(text))

    async def end(self, end: pb.End) -> None:
        fields = {
            "text": self._echoed,
            "logprobs": None,
            "finish_reason": finish_of(end),
            "stop_reason": stop_reason_of(end, self._completion.body.stop_strings),
        }
        await self._send(self._chunks.choice(fields, **self._finale.beside(end)) + self._finale.after(self._index, end))

    def _detailed(self, text: str, piece: pb.Piece) -> bytes:
        fields: dict[str, Any] = {"text": text, "logprobs": None, "finish_reason": None}
        if self._logprobs is not None:
            fields["logprobs"] = self._logprobs.of(piece.token_ids, piece.logprobs)
        if self._completion.body.return_token_ids:
            fields["token_ids"] = list(piece.token_ids)
            if self._num_tokens == 0:
                fields["prompt_token_ids"] = list(self.prompt)
        self._num_tokens += len(piece.token_ids)
        others: dict[str, Any] = {}
        if self._completion.continuous_usage:
            others["usage"] = usage_of(len(self.prompt), self._num_tokens)
        return self._chunks.choice(fields, **others)
