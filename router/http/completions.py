"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from aiohttp import web

from router.http.choices import Folded, Said, Teller
from router.http.errors import blaming
from router.http.front import Front
from router.http.generation import HEADERS, HttpCall, HttpGeneration, respond
from router.http.logprobs import TextLogprobsWriter
from router.http.openapi import Described
from router.http.request_bodies import DEFAULT_MAX_TOKENS, CompletionBody
from router.http.text_places import TextPlaces
from router.http.tokens import decoded
from router.prompting.prompt import Prompt, no_room
from twostep.rpc.v1 import inference_pb2 as pb

routes = web.RouteTableDef()


@routes.post("/v1/completions")
@Described("Texts that go on with prompts.", bodies=(CompletionBody,), events=True, headers=HEADERS)
async def completions(request: web.Request) -> web.StreamResponse:
    return await respond(request, CompletionBody, CompletionGeneration)


class CompletionGeneration(HttpGeneration[CompletionBody]):
    """See HttpGeneration."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, front: Front, body: CompletionBody, call: HttpCall) -> None:
        super().__init__(front, body, call)
        self._prompts = body.prompts()
        # What the texts of each prompt's answers begin with.
        self._echoes = [""] * len(self._prompts)
        self._read: list[Prompt | None] = [None] * len(self._prompts)
        self._request.text = ""  # it is one of text; the prompt is read apart
        for index, prompt in enumerate(self._prompts):
            # Before millions of them are looked at once more.
            if not isinstance(prompt, str) and len(prompt) >= front.card.max_model_len:
                with blaming({}, item=self.item(index)):
                    raise no_room(len(prompt), front.card.max_model_len)

    @property
    def num_choices(self) -> int:
        return len(self._prompts) * self.n

    def item(self, index: int) -> str:
        return f"prompt[{index}]" if isinstance(self.body.prompt, list) else ""

    async def read_prompt(self, index: int) -> Prompt:
        inference, given, share = self.front.inference, self._prompts[index], self.call.identity.share
        request = pb.GenerateRequest(keep_special_tokens=self._request.keep_special_tokens)
        name = self.item(index) or "prompt"
        with blaming({"text": name, "token_ids": name}):
            if not isinstance(given, str):
                request.token_ids.ids.extend(given)
            elif self.body.add_special_tokens is False:
                request.token_ids.ids.extend(await inference.prompts.text_ids(given, share, add_special_tokens=False))
            else:
                request.text = given
            prompt = await inference.prompts.prompt(request, share)
        self.check_room(prompt)
        if self.body.echo:
            self._echoes[index] = given if isinstance(given, str) else await decoded(self.front.tokenizer, given)
        self.check_repeated(prompt, self._echoes[index])
        self._read[index] = prompt
        return replace(prompt, unasked=DEFAULT_MAX_TOKENS)

    def teller(self, index: int) -> TextTeller:
        number = index // self.n
        return TextTeller(TextLogprobsWriter(self.names, partial(self._places, number)), lambda: self._echoes[number])

    def _places(self, number: int) -> TextPlaces:
        prompt = self._read[number]
        assert prompt is not None, "tokens come after their prompt is read"
        detokenizer = prompt.detokenizer(in_grammar=self._request.sampling.HasField("grammar"))
        return TextPlaces(prompt.tokenizer, detokenizer, echo=self._echoes[number])


class TextTeller(Teller):
    text, wrap = "text", ('"text":', "")
    silence: ClassVar[Said] = {"text": ""}
    prompt_ids_beside = False

    def __init__(self, logprobs: TextLogprobsWriter, echo: Callable[[], str]) -> None:
        """`echo`: what the text begins with, known once the prompt is read."""
        super().__init__(logprobs)
        self._echo: Callable[[], str] | None = echo

    def pieces(self, piece: pb.Piece) -> list[Said]:
        text = self._echoed() + piece.text
        return [{"text": text}] if text else []

    def prompt_words(self) -> list[Said]:
        echoed = self._echoed()
        return [{"text": echoed}] if echoed else []

    def last_words(self, end: pb.End) -> list[Said]:
        return self.prompt_words()

    def whole(self, folded: Folded) -> Said:
        return {"text": str(folded.texts["text"])}

    def _echoed(self) -> str:
        """Once, before all else."""
        echo, self._echo = self._echo, None
        return "" if echo is None else echo()
