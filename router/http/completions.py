"""POST /v1/completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from router.http.choices import TEXT_WRAP, Events, KeptText, Said, StreamedChoice, WholeChoice
from router.http.errors import blaming
from router.http.front import FRONT, Front, parsed
from router.http.generation import HEADERS, HttpCall, HttpGeneration, respond
from router.http.logprobs import TextLogprobsWriter
from router.http.openapi import Described
from router.http.request_bodies import CompletionBody, parse_body
from router.http.tokens import decoded
from router.prompting.prompt import Prompt
from router.request.memory_budget import Holding
from twostep.errors import ContextExceeded
from twostep.rpc.v1 import inference_pb2 as pb

routes = web.RouteTableDef()


@routes.post("/v1/completions")
@Described(
    "Texts that go on with prompts.",
    bodies=(CompletionBody,),
    events=True,
    headers=HEADERS,
)
async def completions(request: web.Request) -> web.StreamResponse:
    body = await parsed(request, partial(parse_body, CompletionBody))
    return await respond(request, CompletionGeneration(request.app[FRONT], body, HttpCall.of(request)), stream=bool(body.stream))


class CompletionGeneration(HttpGeneration[CompletionBody]):
    """See Asked."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, front: Front, body: CompletionBody, call: HttpCall) -> None:
        super().__init__(front, body, call)
        self._prompts = body.prompts()
        # What the texts of each prompt's answers begin with.
        self._echoes = [""] * len(self._prompts)
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
        inference, given = self.front.inference, self._prompts[index]
        request = pb.GenerateRequest(keep_special_tokens=self._request.keep_special_tokens)
        # Of several, a message says which one it is about.
        name = f"prompt[{index}]" if isinstance(self.body.prompt, list) else "prompt"
        with blaming((), called={"text": name, "token_ids": name}):
            if not isinstance(given, str):
                request.token_ids.ids.extend(given)
            elif self.body.add_special_tokens is False:
                request.token_ids.ids.extend(await inference.prompts.text_ids(given, add_special_tokens=False))
            else:
                request.text = given
            prompt = await inference.prompts.prompt(request)
        self.check_room(prompt)
        if self.body.echo:
            self._echoes[index] = given if isinstance(given, str) else await decoded(self.front.tokenizer, given)
        self.check_repeated(prompt, self._echoes[index])
        return prompt

    def echo(self, index: int) -> str:
        """Returns the prompt that a choice repeats, once it is read."""
        return self._echoes[index // self.n]

    def whole_choice(self, index: int, holding: Holding) -> WholeText:
        return WholeText(self, index, holding)

    def streamed_choice(self, index: int, events: Events) -> StreamedText:
        return StreamedText(self, index, events)


class WholeText(WholeChoice):
    def __init__(self, completion: CompletionGeneration, index: int, holding: Holding) -> None:
        super().__init__(index, completion.wanted, TextLogprobsWriter(completion.names), holding)
        self._completion = completion
        self._text = KeptText()

    def take(self, piece: pb.Piece) -> None:
        self._text.add(piece.text)

    @property
    def num_text_bytes(self) -> int:
        return self._text.num_bytes

    @property
    def num_json_bytes(self) -> int:
        return super().num_json_bytes + len(self._completion.echo(self._index))

    def said(self) -> Said:
        said: Said = {"text": self._completion.echo(self._index) + str(self._text)}
        if self._wanted.token_ids:
            said["prompt_token_ids"] = list(self.prompt)
        return said


class StreamedText(StreamedChoice):
    def __init__(self, completion: CompletionGeneration, index: int, events: Events) -> None:
        super().__init__(index, events, TextLogprobsWriter(completion.names), wrap=TEXT_WRAP)
        self._completion = completion
        self._echoed = False

    def pieces(self, piece: pb.Piece) -> list[Said]:
        text = self._echo() + piece.text
        return [{"text": text}] if text else []

    def last_words(self, end: pb.End) -> list[Said]:
        return [{"text": self._echo()}]

    def silence(self) -> Said:
        return {"text": ""}

    def details(self, piece: pb.Piece) -> dict[str, Any]:
        first = self._wanted.token_ids and self._num_tokens == 0
        return super().details(piece) | ({"prompt_token_ids": list(self.prompt)} if first else {})

    def _echo(self) -> str:
        """Once, before all else."""
        if self._echoed:
            return ""
        self._echoed = True
        return self._completion.echo(self._index)
