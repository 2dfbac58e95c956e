"""What chats and completions have in common: the requests of one body, and how their answers go back, whole or as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from aiohttp import web

from router.http.calls import Call, Reader, ask_all
from router.http.chat_body import ChatBody
from router.http.chunks import compact, usage_chunk
from router.http.completion_body import CompletionBody
from router.http.errors import blaming
from router.http.front import Front
from router.http.logprobs import TokenNames
from router.http.sse import ANSWERS, DONE, EventStream
from router.http.translate import choice_seed, flag_of, keep_alive_of, request_of, timeout_of
from router.http.usage import phases_of, total_usage, usage_of
from router.prompt import Prompt
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
    ("x-twostep-phases", "1: the answer says how long each phase took", {"type": "string", "enum": ["0", "1"]}),
    (
        "x-twostep-keep-alive-s",
        "of streams: comments after so many silent seconds, also before the first token, whose failures then are events",
        {"type": "string", "pattern": "^[1-9][0-9]{0,2}$"},
    ),
)
Send = Callable[[bytes], Awaitable[None]]


class Asked(Generic[AnyBody]):
    """One body that asks for answers: `n` to each prompt. Raises HttpError 400 for what cannot be done."""

    def __init__(self, front: Front, body: AnyBody, call: Call, *, prefix: str) -> None:
        self.body: AnyBody = body
        self.front, self.call = front, call
        self.n = body.n or 1
        self.seed = secrets.randbits(63) if body.seed is None else body.seed
        self.timeout_s = timeout_of(body, call.headers)
        self.with_phases = bool(body.return_phases) or flag_of(call.headers, "x-twostep-phases")
        options = body.stream_options
        self.include_usage = options is not None and bool(options.include_usage)
        self.continuous_usage = options is not None and bool(options.continuous_usage_stats)
        self.names = TokenNames(front.token_bytes, by_id=bool(body.return_tokens_as_token_ids))
        self._name = body.request_id or call.request_id
        self._request = request_of(body, call.headers, seed=self.seed)
        model = body.model or front.inference.model_name
        self.id = f"{prefix}-{self._name}"
        self.common: dict[str, Any] = {"created": int(time.time()), "model": model}
        if body.service_tier is not None:
            self.common["service_tier"] = {"auto": "default"}.get(body.service_tier, body.service_tier)
        self.common["system_fingerprint"] = f"fp_{front.inference.fingerprint[:12]}"

    @property
    def headers(self) -> dict[str, str]:
        return {"x-request-id": self._name, "x-twostep-seed": str(self.seed)}

    def request(self, index: int) -> pb.GenerateRequest:
        """That of the choice, but for its prompt."""
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.sampling.seed = choice_seed(self.seed, index % self.n)
        request.request_id = self._name if index == 0 else f"{self._name[:120]}-{index}"
        return request

    async def read_prompt(self, index: int) -> Prompt:
        """The index-th of the body. Raises TwostepError."""
        raise NotImplementedError

    async def ask(self, readers: Sequence[Reader]) -> None:
        """Raises TwostepError; what a message says of a field of the body is said of it by name."""
        with blaming(type(self.body).model_fields):
            await ask_all(
                self.front.inference, self.call, readers, self.request, self.read_prompt, timeout_s=self.timeout_s, num_each=self.n
            )

    def usage(self, ends: Sequence[pb.End]) -> dict[str, Any]:
        """`ends` in the order of the choices' indices."""
        return total_usage([[end.usage for end in ends[i : i + self.n]] for i in range(0, len(ends), self.n)])

    def phases(self, ends: Sequence[pb.End]) -> dict[str, Any]:
        """`twostep`, if it is asked for: that of the first choice, and in a list those of all if there are several."""
        if not self.with_phases:
            return {}
        told = phases_of(ends[0])
        if len(ends) > 1:
            told["choices"] = [phases_of(end) for end in ends]
        return {"twostep": told}


class Finale:
    """What follows the end of the last choice to end: usage if it is asked for, and `[DONE]`."""

    def __init__(self, asked: Asked[Any], head: dict[str, Any], num_choices: int) -> None:
        self._asked, self._head = asked, head
        self._ends: list[pb.End | None] = [None] * num_choices

    def beside(self, end: pb.End) -> dict[str, Any]:
        """What stands in the chunk that ends a choice, beside it. The usage chunk, if there is one, tells the phases."""
        others: dict[str, Any] = {}
        if self._asked.continuous_usage:
            others["usage"] = usage_of(end.usage.prompt_tokens, end.usage.completion_tokens)
        elif self._asked.include_usage:
            others["usage"] = None
        if self._asked.with_phases and not self._asked.include_usage:
            others["twostep"] = phases_of(end)
        return others

    def after(self, index: int, end: pb.End) -> bytes:
        """Nothing while other choices go on."""
        self._ends[index] = end
        ends = [each for each in self._ends if each is not None]
        if len(ends) < len(self._ends):
            return b""
        if not self._asked.include_usage:
            return DONE
        return usage_chunk(self._head, self._asked.usage(ends), **self._asked.phases(ends)) + DONE


class Endpoint(Protocol):
    """How an endpoint writes what it is asked for."""

    async def whole(self) -> dict[str, Any]:
        """The answer's body."""
        ...

    async def stream(self, send: Send) -> None:
        """All events, `[DONE]` included."""
        ...

    @property
    def headers(self) -> dict[str, str]: ...


async def respond(request: web.Request, endpoint: Endpoint, *, stream: bool) -> web.StreamResponse:
    answers = request.app[ANSWERS]
    if not stream:
        async with answers.giving(None):
            answer = await endpoint.whole()
        return web.Response(text=compact(answer), content_type="application/json", headers=endpoint.headers)
    events = EventStream(request, endpoint.headers, keep_alive_of(request.headers))
    async with answers.giving(events):
        await endpoint.stream(events.send)
    return events.response
