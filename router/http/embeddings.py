"""POST /v1/embeddings."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web

from router.http.body import parse_body
from router.http.errors import HttpError, blaming
from router.http.front import FRONT, Front, parsed
from router.http.generation import HEADERS, HttpAsker, HttpCall, terms_of, timeout_of
from router.http.openapi import Described
from router.http.request_bodies import EmbeddingBody, IdArray
from router.http.sse import ANSWERS
from router.http.whole_answer import ENCODER, MAX_LINE_BYTES, WholeAnswer
from router.json_pieces import json_pieces, small
from router.prompting.prompt import Prompt, ReadPrompt
from router.request.memory_budget import Holding
from router.request.vector import floats_of
from router.serving.answers import ask_all, choice_name
from router.serving.inference import Embedded
from twostep.rpc.v1 import inference_pb2 as pb

routes = web.RouteTableDef()

# Of a number, as JSON.
_JSON_FLOAT_BYTES = 23
_FLOAT_BYTES = 4
_UNUSED_HEADERS = {"x-twostep-tpot-ms", "x-twostep-gap-ms", "x-twostep-seed", "x-twostep-phases", "x-twostep-keep-alive-s"}


@routes.post("/v1/embeddings")
@Described(
    "Vectors of texts, made of a model's hidden states.",
    bodies=(EmbeddingBody,),
    headers=tuple(header for header in HEADERS if header[0] not in _UNUSED_HEADERS),
)
async def embeddings(request: web.Request) -> web.StreamResponse:
    body = await parsed(request, partial(parse_body, EmbeddingBody))
    front, call = request.app[FRONT], HttpCall.of(request)
    asked = HttpEmbeddings(front, body, call)
    async with AsyncExitStack() as held:
        async with request.app[ANSWERS].giving(None):
            answer = await held.enter_async_context(asked.whole())
        return await request.app[ENCODER].respond(request, answer, {"x-request-id": asked.name})


class HttpEmbeddings:
    """One body: as many requests of the core as it has inputs. Constructing it refuses what cannot be done, with HttpError 400."""

    def __init__(self, front: Front, body: EmbeddingBody, call: HttpCall) -> None:
        self._front, self._body, self._call = front, body, call
        self.name = body.request_id or call.request_id
        self._timeout_s = timeout_of(body, call.headers)
        self._terms = terms_of(body, call.headers)
        self._inputs: list[str | IdArray] = list(body.input) if isinstance(body.input, list) else [body.input]
        self._most = most = front.inference.max_input_len
        cut_to = body.truncate_prompt_tokens
        if cut_to is not None and cut_to > most:
            message = f"truncate_prompt_tokens is {cut_to}, and the model's context has {most}; give -1 to cut to that"
            raise HttpError(400, message, param="truncate_prompt_tokens")
        self._cut_to = most if cut_to == -1 else cut_to
        with blaming(body.names()):
            self._params = front.inference.pooling(dimensions=body.dimensions, normalize=body.normalize)

    def check_size(self, *, is_line: bool = False) -> None:
        """Raises HttpError 400 for an answer that would be too large for a line of a batch's file (`is_line`)."""
        params, inference = self._params, self._front.inference
        num_floats = len(self._inputs) * (params.dimensions or inference.embedding.width)
        if is_line and num_floats * _JSON_FLOAT_BYTES > MAX_LINE_BYTES:
            message = (
                f"{len(self._inputs)} vectors could come to {num_floats * _JSON_FLOAT_BYTES >> 20} MiB, and a line of a batch may come to "
            )
            raise HttpError(400, f"{message}{MAX_LINE_BYTES >> 20}; give fewer inputs in a line", param="input")

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[WholeAnswer]:
        """Gives the answer, which holds memory until the context's end. Raises TwostepError; the first input that fails ends all of
        them."""
        async with self._front.inference.memory.hold(self._call.identity.caller) as holding:
            yield self._answer(await self._vectors(holding))

    async def _vectors(self, holding: Holding) -> Sequence[Embedded]:
        found: list[Embedded | None] = [None] * len(self._inputs)
        inference = self._front.inference

        async def ask(index: int, prompt: ReadPrompt) -> None:
            request = pb.GenerateRequest()
            request.CopyFrom(self._terms)
            request.request_id = choice_name(self.name, index)
            with blaming(self._body.names(), item=self._item(index)):
                vector = found[index] = await inference.embed(request, HttpAsker(self._call, self._timeout_s), prompt, self._params)
            holding.add(len(vector.values))

        with blaming(self._body.names()):
            await ask_all(len(self._inputs), ask, self._read)
        return [each for each in found if each is not None]

    def _answer(self, vectors: Sequence[Embedded]) -> WholeAnswer:
        num_tokens = sum(each.num_prompt_tokens for each in vectors)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        body: dict[str, Any] = {
            "id": f"embd-{self.name}",
            "object": "list",
            "created": int(time.time()),
            "model": self._front.inference.model_name,
            "data": small(self._data(vectors)),
            "usage": usage,
        }
        num_bytes = sum(len(each.values) for each in vectors) // _FLOAT_BYTES * _JSON_FLOAT_BYTES
        return WholeAnswer(usage, num_bytes, json_pieces(body))

    def _data(self, vectors: Sequence[Embedded]) -> Iterator[dict[str, Any]]:
        in_base64 = self._body.encoding_format == "base64"
        for index, each in enumerate(vectors):
            vector = b64encode(each.values).decode("ascii") if in_base64 else floats_of(each.values)
            yield {"object": "embedding", "index": index, "embedding": vector}

    def _item(self, index: int) -> str:
        """Makes a message say which of several inputs it is about."""
        return f"input[{index}]" if isinstance(self._body.input, list) else ""

    async def _read(self, index: int) -> Prompt:
        given = self._inputs[index]
        name = self._item(index) or "input"
        with blaming({"text": name, "token_ids": name}):
            return await self._front.inference.prompts.embedding_input(
                given,
                self._call.identity.share,
                most=self._most,
                cut_to=self._cut_to,
                add_special_tokens=self._body.add_special_tokens is not False,
            )
