"""Chats and completions as requests of router.serving.inference: one body asks for `n` answers to each of its prompts.

body ─▶ HttpGeneration ─ check_size ─┬─ whole ──▶ WholeChoices ──────▶ one JSON document
                                 └─ stream ─▶ StreamedChoices ───▶ events
"""

from __future__ import annotations

import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from aiohttp import web

from router.access.account import Identity
from router.http.body import parse_body
from router.http.choices import AnswerOptions, AnswerSink, Events, Send, StreamedChoice, Teller, WholeChoice
from router.http.errors import HttpError, blaming
from router.http.front import FRONT, IDENTITY, RECEIVED, REQUEST_ID, Front, forwarded, parsed
from router.http.logprobs import KeptPromptLogprobs, TokenNames
from router.http.request_bodies import (
    ChatBody,
    CommonBody,
    CompletionBody,
    JsonFormat,
    JsonObjectFormat,
    LarkFormat,
    RegexFormat,
    RequestBody,
    ResponseFormat,
    StructuredOutputs,
)
from router.http.sse import ANSWERS, KEEP_ALIVE, EventStream, failure_event
from router.http.whole_answer import ENCODER, WholeAnswer, check_prompt_logprobs, check_repeated, check_size
from router.json_pieces import json_pieces
from router.prompting.prompt import Prompt, ReadPrompt
from router.request.job import Metadata
from router.serving.answers import ask_all, choice_name, choice_seed
from twostep.errors import ContextExceeded
from twostep.rpc.v1 import inference_pb2 as pb

_CLASSES = {name: pb.RequestClass.Value(f"REQUEST_CLASS_{name.upper()}") for name in ("interactive", "standard", "batch")}
_TIERS = {"flex": pb.REQUEST_CLASS_BATCH, "priority": pb.REQUEST_CLASS_INTERACTIVE}
_MAX_TARGET_MS = 3_600_000.0
_MAX_TIMEOUT_MS = 86_400_000.0
# What an answer that tells its phases tells of gaps.
_NUM_GAPS = 8
_SEED = re.compile(r"-?[0-9]{1,19}")

# Fields that a request calls as the body does.
_SAME_NAME = [
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "speculate",
]


def drawn_seed_of(headers: Mapping[str, str]) -> int:
    """Draws a seed for a request that gives none, or returns that of the request which it repeats. Raises HttpError 400."""
    text = headers.get("x-twostep-seed")
    if not text:
        return secrets.randbits(63)
    if not _SEED.fullmatch(text) or not -(1 << 63) <= int(text) < 1 << 63:
        raise HttpError(400, f"x-twostep-seed is {text[:40]!r}; give a whole number from -2^63 to 2^63 - 1", param="x-twostep-seed")
    return int(text)


def request_of(body: ChatBody | CompletionBody, headers: Mapping[str, str], *, seed: int) -> pb.GenerateRequest:
    """Returns all of the request but the prompt, the name and the choice's seed. `headers` say what the body leaves open. Raises HttpError
    400."""
    request = terms_of(body, headers)
    request.sampling.CopyFrom(sampling_of(body, seed=seed))
    request.keep_special_tokens = body.skip_special_tokens is False
    return request


def terms_of(body: RequestBody, headers: Mapping[str, str]) -> pb.GenerateRequest:
    """Reads what any request says: its model, its cached prefixes, how urgent it is, what it was promised. Raises HttpError 400."""
    request = pb.GenerateRequest(model=body.model, cache_salt=body.cache_salt or "", request_class=_class(body, headers))
    for name in ("ttft_ms", "tpot_ms", "gap_ms"):
        value = getattr(body, name, None)
        if value is None:
            value = _number(headers, f"x-twostep-{name.replace('_', '-')}", _MAX_TARGET_MS)
        if value is not None:
            setattr(request, name, value)
    return request


def sampling_of(body: ChatBody | CompletionBody, *, seed: int) -> pb.SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options is for streams; set stream to true or leave it out", param="stream_options")
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    if body.limit_field is not None:
        given["max_tokens"] = body.token_limit
    if body.num_logprobs is not None:
        given["logprobs"] = body.num_logprobs
    given["logit_bias"] = body.logit_bias
    given["prompt_logprobs"] = max((n for n in (body.prompt_logprobs, body.num_echoed_logprobs) if n is not None), default=None)
    return pb.SamplingParams(seed=seed, stop=body.stop_strings, stop_token_ids=body.stop_token_ids or (), grammar=grammar_of(body), **given)


def grammar_of(body: CommonBody) -> pb.Grammar | None:
    """Returns what the answer is held to. Raises HttpError 400 if it is said in two ways."""
    given = {
        "response_format": _formatted(body.response_format),
        "structured_outputs": None if body.structured_outputs is None else _structured(body.structured_outputs),
        "regex": None if body.regex is None else pb.Grammar(regex=body.regex),
        "json_schema": None if body.json_schema is None else pb.Grammar(json_schema=body.json_schema),
    }
    first, *others = [*((name, grammar) for name, grammar in given.items() if grammar is not None), ("", None)]
    if len(others) > 1:
        names = body.names()
        message = f"{names[first[0]]} and {names[others[0][0]]} each say what the answer must look like; keep one"
        raise HttpError(400, message, param=names[others[0][0]])
    return first[1]


def _formatted(given: ResponseFormat | None) -> pb.Grammar | None:
    match given:
        case JsonObjectFormat():
            return pb.Grammar(json_object=True)
        case JsonFormat(json_schema=schema):
            return pb.Grammar(json_schema=schema.schema_, strict=schema.strict)
        case RegexFormat(pattern=pattern):
            return pb.Grammar(regex=pattern)
        case LarkFormat(grammar=lark):
            return pb.Grammar(lark=lark)
        case _:
            return None


def _structured(given: StructuredOutputs) -> pb.Grammar:
    field = "structured_outputs"
    choice = None if given.choice is None else "|".join(map(_escaped, given.choice))
    asked: list[dict[str, Any]] = [
        {"json_schema": given.json_},
        {"regex": given.regex},
        {"regex": choice},
        {"lark": given.grammar},
        {"lark": given.structural_tag},
        {"json_object": given.json_object or None},
    ]
    found = [kind for kind in asked if None not in kind.values()]
    if len(found) != 1:
        raise HttpError(400, f"{field} takes exactly one of json, json_object, regex, choice, grammar, structural_tag", param=field)
    return pb.Grammar(**found[0], strict=given.disable_additional_properties)


def _escaped(text: str) -> str:
    """Escapes text for regular expressions of every dialect: nothing is escaped that needs no escape."""
    return re.sub(r"[\\.+*?()|\[\]{}^$]", lambda found: "\\" + found.group(), text)


def _class(body: RequestBody, headers: Mapping[str, str]) -> pb.RequestClass.ValueType:
    named = body.request_class or headers.get("x-twostep-class")
    if named:
        if named not in _CLASSES:
            raise HttpError(400, f"x-twostep-class is {named[:40]!r}; give one of {', '.join(_CLASSES)}", param="x-twostep-class")
        return _CLASSES[named]
    if body.service_tier in _TIERS:
        return _TIERS[body.service_tier]
    if body.priority:
        return pb.REQUEST_CLASS_INTERACTIVE if body.priority < 0 else pb.REQUEST_CLASS_BATCH
    return pb.REQUEST_CLASS_UNSPECIFIED


def timeout_of(body: RequestBody, headers: Mapping[str, str]) -> float:
    """Returns the seconds that the client gives the request; infinite where it says none. Raises HttpError 400."""
    if body.timeout is not None:
        return body.timeout
    given = _number(headers, "x-twostep-timeout-ms", _MAX_TIMEOUT_MS)
    return float("inf") if given is None else given / 1e3


def keep_alive_of(headers: Mapping[str, str]) -> float | None:
    """Returns after how many silent seconds comments are sent, also before the first event. Raises HttpError 400."""
    given = _number(headers, "x-twostep-keep-alive-s", 3600.0)
    return None if given is None else max(1.0, given)


def _number(headers: Mapping[str, str], name: str, most: float) -> float | None:
    text = headers.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value <= most:
        raise HttpError(400, f"{name} is {text[:40]!r}; give a number above 0, up to {most:g}", param=name)
    return value


def flag_of(headers: Mapping[str, str], name: str) -> bool:
    return headers.get(name, "").strip().lower() in ("1", "true", "yes")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """Holds what is known of a request besides its body. `received` is in time.monotonic() seconds: all of its body was there."""

    request_id: str
    identity: Identity
    metadata: Metadata = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    received: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, request: web.Request) -> HttpCall:
        """Returns the generation of a request whose body is parsed()."""
        return cls(
            request_id=request[REQUEST_ID],
            identity=request[IDENTITY],
            metadata=forwarded(request),
            headers=request.headers,
            received=request[RECEIVED],
        )


class HttpAsker:
    """See router.serving.inference.Asker."""

    def __init__(self, call: HttpCall, timeout_s: float, *, repeated: bool = False) -> None:
        """`repeated`: a further answer to a prompt."""
        self.identity = call.identity.again() if repeated else call.identity
        self.metadata, self.received = call.metadata, call.received
        self._until = call.received + timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._until - time.monotonic())


class HttpCaller(HttpAsker):
    """See router.serving.inference.Caller."""

    def __init__(self, call: HttpCall, reader: AnswerSink, timeout_s: float, *, repeated: bool = False) -> None:
        super().__init__(call, timeout_s, repeated=repeated)
        self._reader = reader
        self.write: Callable[[pb.GenerateResponse], Awaitable[None]] = reader.write  # of every token: no step between

    def accepted(self, prompt: Sequence[int]) -> None:
        self._reader.prompt = prompt

    async def write_prompt(self, part: pb.PromptLogprobs) -> None:
        await self._reader.write_prompt(part)

    async def begin(self, request_id: str, seed: int) -> None:
        """Does nothing: the headers of the answer say both, and go with its first piece."""


AnyBody = TypeVar("AnyBody", bound=ChatBody | CompletionBody)
_NUMBER = {"type": "string", "pattern": r"^[1-9][0-9]{0,5}$"}
_SECONDS = {"type": "string", "pattern": r"^[1-9][0-9]{0,2}$"}
# Request headers that say what a body may say too, or concern the connection: their names, what they mean, and their schemas.
HEADERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("x-request-id", "the request's name; one is made if it has other than 1 to 128 of A-Z a-z 0-9 . _ : -", {"type": "string"}),
    ("x-twostep-class", "how urgent it is", {"type": "string", "enum": list(_CLASSES)}),
    ("x-twostep-ttft-ms", "the first token is promised within so many milliseconds", _NUMBER),
    ("x-twostep-tpot-ms", "each further token is promised within so many milliseconds", _NUMBER),
    ("x-twostep-gap-ms", "no two tokens are promised to be further apart than so many milliseconds", _NUMBER),
    ("x-twostep-timeout-ms", "the request ends after so many milliseconds", _NUMBER),
    ("x-twostep-seed", "an answer's header: repeats a request without `seed`", {"type": "string", "pattern": "^-?[0-9]{1,19}$"}),
    ("x-twostep-phases", "1: the answer says how long each phase took", {"type": "string", "enum": ["0", "1"]}),
    ("x-twostep-keep-alive-s", "streams have comments after so many silent seconds; early failures are events", _SECONDS),
)


class HttpGeneration(ABC, Generic[AnyBody]):
    """One body that asks for answers: `n` to each prompt. Constructing it refuses what cannot be done, with HttpError 400; then either
    `whole` or `stream`."""

    # What ids of answers begin with, and what OpenAI calls an answer and an event of a stream.
    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, front: Front, body: AnyBody, call: HttpCall) -> None:
        self.body: AnyBody = body
        self.front, self.call = front, call
        self.n = body.n or 1
        self.seed = drawn_seed_of(call.headers) if body.seed is None else body.seed
        self.timeout_s = timeout_of(body, call.headers)
        options = body.stream_options
        self.wanted = AnswerOptions(
            n=self.n,
            stop_strings=body.stop_strings,
            logprobs=body.num_logprobs is not None,
            echoed_logprobs=body.num_echoed_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            phases=bool(body.return_phases) or flag_of(call.headers, "x-twostep-phases"),
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )
        self.names = TokenNames(front.token_bytes, by_id=bool(body.return_tokens_as_token_ids))
        self._name = body.request_id or call.request_id
        self._request = request_of(body, call.headers, seed=self.seed)
        if self.wanted.phases:
            self._request.num_gaps = _NUM_GAPS
        if body.stream and self.n > 1 and self._request.sampling.HasField("prompt_logprobs"):
            raise HttpError(400, f"n is {self.n}: a stream tells the log probabilities of a prompt with one answer; leave n out", param="n")
        self._is_line = False
        self.id = f"{self.prefix}-{self._name}"
        self.common: dict[str, Any] = {"created": int(time.time()), "model": front.inference.model_name}
        if body.service_tier is not None:
            self.common["service_tier"] = {"auto": "default"}.get(body.service_tier, body.service_tier)
        self.common["system_fingerprint"] = f"fp_{front.inference.fingerprint[:12]}"

    @abstractmethod
    async def read_prompt(self, index: int) -> Prompt:
        """Reads the index-th prompt of the body. Raises TwostepError."""

    def item(self, index: int) -> str:
        """Returns what the index-th prompt is called, where there are several: then messages say which one they are about."""
        return ""

    @abstractmethod
    def teller(self, index: int) -> Teller: ...

    @property
    def num_choices(self) -> int:
        return self.n

    def check_size(self, *, is_line: bool = False) -> None:
        """Raises HttpError 400 for a whole answer that could become too large; `is_line`: for a line of a batch's file."""
        self._is_line = is_line
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
        """Raises ContextExceeded for a prompt that leaves too little room for as many tokens as the client asks for."""
        limit, field, longest = self.body.token_limit, self.body.limit_field, self.front.inference.max_model_len
        room = longest - len(prompt.ids)
        if limit is None or field is None or not 0 < room < limit:
            return
        raise ContextExceeded.of(
            f"the prompt has {len(prompt.ids)} and {field} is {limit}",
            f"shorten the prompt or ask for at most {room}",
            max_model_len=longest,
            prompt_tokens=len(prompt.ids),
            max_tokens=limit,
        )

    def check_repeated(self, prompt: Prompt, echo: str = "") -> None:
        """Raises HttpError 400 for a prompt that each answer would repeat, at too great a length."""
        if self.wanted.tells_prompt:
            named = (1 + self._request.sampling.prompt_logprobs) * len(prompt.ids)
            check_prompt_logprobs(num_answers=self.num_choices, num_each=self.n, num_named=named, is_line=self._is_line)
        if echo or self.wanted.token_ids:
            check_repeated(num_answers=self.num_choices, num_chars=len(echo), num_ids=len(prompt.ids) if self.wanted.token_ids else 0)

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[WholeAnswer]:
        """Gives the answer, which holds memory until the context's end. Raises TwostepError."""
        async with self.front.inference.memory.hold(self.call.identity.caller) as holding:
            tellers = [self.teller(index) for index in range(self.num_choices)]
            kept = [KeptPromptLogprobs(holding) for _ in range(self.num_choices // self.n)]
            choices = [WholeChoice(teller, index, self.wanted, holding, kept[index // self.n]) for index, teller in enumerate(tellers)]
            await self._ask(choices)
            ends = [choice.finished for choice in choices]
            usage = self.wanted.usage_of_all(ends)
            answer: dict[str, Any] = {
                "id": self.id,
                "object": self.object,
                **self.common,
                "choices": (choice.choice() for choice in choices),
                "usage": usage,
                **self.wanted.phases_of_all(ends),
            }
            if self.wanted.token_ids and tellers[0].prompt_ids_beside:
                answer["prompt_token_ids"] = list(choices[0].prompt)
            if tellers[0].prompt_ids_beside:
                answer |= choices[0].prompt_logprobs()
            yield WholeAnswer(usage, sum(choice.num_json_bytes for choice in choices), json_pieces(answer))

    async def stream(self, send: Send) -> None:
        """Sends all events, `[DONE]` included. Raises TwostepError."""
        events = Events(self.wanted, {"id": self.id, "object": self.chunk_object, **self.common}, self.num_choices, send)
        await self._ask([StreamedChoice(self.teller(index), index, events) for index in range(self.num_choices)])

    @property
    def ping(self) -> bytes:
        """Goes to the client of a stream where nothing else has for long."""
        return KEEP_ALIVE

    def failure(self, error: BaseException) -> bytes:
        """Returns the last event of a stream that breaks off."""
        return failure_event(error)

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self._name, "x-twostep-seed": str(self.seed)}

    def request(self, index: int) -> pb.GenerateRequest:
        """Returns the request of the choice, but for its prompt."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        # One that was drawn is of all prompts: equal ones are to be answered in different ways. One that was given is of each of them.
        request.sampling.seed = choice_seed(self.seed, index if self.body.seed is None else index % self.n)
        if index % self.n:
            request.sampling.ClearField("prompt_logprobs")  # the first answer to a prompt gets them for the others
        request.request_id = choice_name(self._name, index)
        return request

    async def _ask(self, readers: Sequence[AnswerSink]) -> None:
        """Raises TwostepError; what a message says of a field of the body is said of it by name."""

        fields = self.body.grammar_fields
        called = self.body.names() | ({"grammar": fields[0]} if len(fields) == 1 else {})

        async def ask(index: int, prompt: ReadPrompt) -> None:
            caller = HttpCaller(self.call, readers[index], self.timeout_s, repeated=index % self.n > 0)
            with blaming(called, item=self.item(index // self.n)):
                await readers[index].end(await self.front.inference.generate(self.request(index), caller, prompt))

        with blaming(self.body.names()):
            await ask_all(len(readers), ask, self.read_prompt, num_each=self.n)


async def respond(
    request: web.Request, body_kind: type[AnyBody], kind: Callable[[Front, AnyBody, HttpCall], HttpGeneration[AnyBody]]
) -> web.StreamResponse:
    """Answers a request whose body is of that kind."""
    body = await parsed(request, partial(parse_body, body_kind))
    generation, answers = kind(request.app[FRONT], body, HttpCall.of(request)), request.app[ANSWERS]
    if not body.stream:
        generation.check_size()
        async with AsyncExitStack() as held:
            async with answers.giving(None):
                answer = await held.enter_async_context(generation.whole())
            return await request.app[ENCODER].respond(request, answer, generation.headers)
    events = EventStream(request, generation.headers, keep_alive_of(request.headers), ping=generation.ping, failure=generation.failure)
    async with answers.giving(events):
        await generation.stream(events.send)
    return events.response
