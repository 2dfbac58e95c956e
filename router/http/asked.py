"""What chats and completions have in common: the requests of one body, and how their answers go back, whole or as events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar, Generic, TypeVar

from aiohttp import web

from router.http.calls import Call, Reader, ask_all
from router.http.chat_body import ChatBody
from router.http.choices import Events, Send, StreamedChoice, Wanted, WholeChoice
from router.http.completion_body import CompletionBody
from router.http.errors import blaming
from router.http.front import Front
from router.http.logprobs import TokenNames
from router.http.sse import ANSWERS, EventStream
from router.http.translate import choice_seed, drawn_seed_of, flag_of, keep_alive_of, request_of, timeout_of
from router.http.whole_answer import ENCODER, WholeAnswer, check_repeated, check_size
from router.json_pieces import json_pieces
from router.prompting.prompt import Prompt
from router.request.memory_budget import Holding
from twostep.errors import ContextExceeded
from twostep.rpc.v1 import inference_pb2 as pb

AnyBody = TypeVar("AnyBody", ChatBody, CompletionBody)
# Request headers that say what a body may say too, or concern the connection.
_NUMBER = {"type": "string", "pattern": r"^[1-9][0-9]{0,5}$"}
HEADERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "x-request-id",
        "the request's name; one is made if it is missing or has other than 1 to 128 of A-Z a-z 0-9 . _ : -",
        {"type": "string"},
    ),
    ("x-twostep-class", "how urgent it is", {"type": "string", "enum": ["interactive", "standard", "batch"]}),
    ("x-twostep-ttft-ms", "the first token is promised within so many milliseconds", _NUMBER),
    ("x-twostep-tpot-ms", "each further token is promised within so many milliseconds", _NUMBER),
    ("x-twostep-timeout-ms", "the request ends after so many milliseconds", _NUMBER),
    (
        "x-twostep-seed",
        "what an answer's header of this name told: repeats a request without `seed`, all of its prompts",
        {"type": "string", "pattern": "^-?[0-9]{1,19}$"},
    ),
    ("x-twostep-phases", "1: the answer says how long each phase took", {"type": "string", "enum": ["0", "1"]}),
    (
        "x-twostep-keep-alive-s",
        "of streams: comments after so many silent seconds, also before the first token, whose failures then are events",
        {"type": "string", "pattern": "^[1-9][0-9]{0,2}$"},
    ),
)


class Asked(ABC, Generic[AnyBody]):
    """One body that asks for answers: `n` to each prompt. Constructing it refuses what cannot be done, with HttpError 400; then either
    `whole` or `stream`."""

    # What ids of answers begin with, and what OpenAI calls an answer and an event of a stream.
    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, front: Front, body: AnyBody, call: Call) -> None:
        self.body: AnyBody = body
        self.front, self.call = front, call
        self.n = body.n or 1
        self.seed = drawn_seed_of(call.headers) if body.seed is None else body.seed
        self.timeout_s = timeout_of(body, call.headers)
        options = body.stream_options
        self.wanted = Wanted(
            n=self.n,
            stop_strings=body.stop_strings,
            logprobs=body.num_logprobs is not None,
            token_ids=bool(body.return_token_ids),
            phases=bool(body.return_phases) or flag_of(call.headers, "x-twostep-phases"),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )
        self.names = TokenNames(front.token_bytes, by_id=bool(body.return_tokens_as_token_ids))
        self._name = body.request_id or call.request_id
        self._request = request_of(body, call.headers, seed=self.seed)
        model = body.model or front.inference.model_name
        self.id = f"{self.prefix}-{self._name}"
        self.common: dict[str, Any] = {"created": int(time.time()), "model": model}
        if body.service_tier is not None:
            self.common["service_tier"] = {"auto": "default"}.get(body.service_tier, body.service_tier)
        self.common["system_fingerprint"] = f"fp_{front.inference.fingerprint[:12]}"

    @abstractmethod
    async def read_prompt(self, index: int) -> Prompt:
        """The index-th of the body. Raises TwostepError."""

    @abstractmethod
    def whole_choice(self, index: int, holding: Holding) -> WholeChoice: ...

    @abstractmethod
    def streamed_choice(self, index: int, events: Events) -> StreamedChoice: ...

    @property
    def num_choices(self) -> int:
        return self.n

    def beside_choices(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What the answer tells of its prompt."""
        return {}

    def check_size(self, *, is_line: bool = False) -> None:
        """Of the answer, whole; `is_line`: of a batch's file. Raises HttpError 400 for what could come to too much."""
        inference, limit = self.front.inference, self.body.token_limit
        check_size(
            num_answers=self.num_choices,
            max_tokens=inference.most_tokens if limit is None else min(limit, inference.max_model_len),
            num_logprobs=self.body.num_logprobs,
            token_ids=self.wanted.token_ids,
            most=inference.memory.of_caller,
            is_line=is_line,
            logprobs_field="top_logprobs" if isinstance(self.body, ChatBody) else "logprobs",
            limit_field=self.body.limit_field,
        )

    def check_room(self, prompt: Prompt) -> None:
        """Of a prompt that was read. Raises ContextExceeded in the body's words: completions that say nothing have a limit too."""
        limit, longest = self.body.token_limit, self.front.inference.max_model_len
        room = longest - len(prompt.ids)
        if limit is None or not 0 < room < limit:
            return
        field = self.body.limit_field
        asked = f"an answer has up to {limit} where max_tokens is not given" if field is None else f"{field} is {limit}"
        raise ContextExceeded(
            f"the prompt has {len(prompt.ids)} tokens, {asked}, and the context has {longest}; "
            f"shorten the prompt or {'give a max_tokens of' if field is None else 'ask for'} at most {room}"
        )

    def check_repeated(self, prompt: Prompt, echo: str = "") -> None:
        """Of a prompt that was read. Raises HttpError 400."""
        if echo or self.wanted.token_ids:
            check_repeated(num_answers=self.num_choices, num_chars=len(echo), num_ids=len(prompt.ids) if self.wanted.token_ids else 0)

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[WholeAnswer]:
        """The answer, which holds memory until the context's end. Raises TwostepError."""
        async with self.front.inference.memory.hold(self.call.identity.caller) as holding:
            choices = [self.whole_choice(index, holding) for index in range(self.num_choices)]
            await self._ask(choices)
            ends = [choice.finished for choice in choices]
            usage = self.wanted.usage_of_all(ends)
            answer = {
                "id": self.id,
                "object": self.object,
                **self.common,
                "choices": (choice.choice() for choice in choices),
                "usage": usage,
                **self.wanted.phases_of_all(ends),
                **self.beside_choices(choices[0].prompt),
            }
            yield WholeAnswer(usage, sum(choice.num_json_bytes for choice in choices), json_pieces(answer))

    async def stream(self, send: Send) -> None:
        """All events, `[DONE]` included. Raises TwostepError."""
        events = Events(self.wanted, {"id": self.id, "object": self.chunk_object, **self.common}, self.num_choices, send)
        await self._ask([self.streamed_choice(index, events) for index in range(self.num_choices)])

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self._name, "x-twostep-seed": str(self.seed)}

    def request(self, index: int) -> pb.GenerateRequest:
        """That of the choice, but for its prompt."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        # One that was drawn is of all prompts: equal ones are to be answered in different ways. One that was given is of each of them.
        request.sampling.seed = choice_seed(self.seed, index if self.body.seed is None else index % self.n)
        request.request_id = self._name if index == 0 else f"{self._name[:120]}-{index}"
        return request

    async def _ask(self, readers: Sequence[Reader]) -> None:
        """Raises TwostepError; what a message says of a field of the body is said of it by name."""
        with blaming(type(self.body).model_fields):
            await ask_all(
                self.front.inference, self.call, readers, self.request, self.read_prompt, timeout_s=self.timeout_s, num_each=self.n
            )


async def respond(request: web.Request, asked: Asked[Any], *, stream: bool) -> web.StreamResponse:
    answers = request.app[ANSWERS]
    if not stream:
        asked.check_size()
        async with AsyncExitStack() as held:
            async with answers.giving(None):
                answer = await held.enter_async_context(asked.whole())
            return await request.app[ENCODER].respond(request, answer, asked.headers)
    events = EventStream(request, asked.headers, keep_alive_of(request.headers))
    async with answers.giving(events):
        await asked.stream(events.send)
    return events.response
