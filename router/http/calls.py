"""One HTTP request as a caller of router.serving.inference: who asks, until when, and what each of its answers is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from aiohttp import web

from router.access.identity import Identity
from router.http.bodies import BODIES
from router.http.errors import HttpError
from router.http.front import FRONT, IDENTITY, RECEIVED, REQUEST_ID, forwarded
from router.prompting.prompt import Prompt, ReadPrompt
from router.request.job import Metadata
from router.serving.inference import Inference
from twostep.errors import TwostepError
from twostep.rpc.v1 import inference_pb2 as pb

T = TypeVar("T")

# Of one HTTP request; the others wait for these.
MAX_AT_ONCE = 128
# Of its prompts: the threads that tokenize are everybody's, and refuse when too many wait for them.
_MAX_READ_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is known of a request besides its body. `received` is in time.monotonic() seconds: all of its body was there."""

    request_id: str
    identity: Identity
    metadata: Metadata = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    received: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, request: web.Request) -> Call:
        """Once its body is parsed()."""
        return cls(
            request_id=request[REQUEST_ID],
            identity=request[IDENTITY],
            metadata=forwarded(request),
            headers=request.headers,
            received=request[RECEIVED],
        )


class Reader(Protocol):
    """Takes one answer."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @prompt.setter
    def prompt(self, token_ids: Sequence[int]) -> None: ...

    async def write(self, response: pb.GenerateResponse) -> None: ...

    async def end(self, end: pb.End) -> None:
        """After the last piece; everything that the answer held is free."""
        ...


class HttpCaller:
    """See router.serving.inference.Caller."""

    def __init__(self, call: Call, reader: Reader, timeout_s: float, *, repeated: bool = False) -> None:
        """`repeated`: a further answer to a prompt."""
        self.identity = call.identity.again() if repeated else call.identity
        self.metadata, self.received = call.metadata, call.received
        self._until = call.received + timeout_s
        self._reader = reader
        self.write: Callable[[pb.GenerateResponse], Awaitable[None]] = reader.write  # of every token: no step between

    def remaining_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def accepted(self, prompt: Sequence[int]) -> None:
        self._reader.prompt = prompt

    async def begin(self, request_id: str, seed: int) -> None:
        """The headers of the answer say both, and go with its first piece."""


async def ask_all(
    inference: Inference,
    call: Call,
    readers: Sequence[Reader],
    request_of: Callable[[int], pb.GenerateRequest],
    read_prompt: Callable[[int], Awaitable[Prompt]],
    *,
    timeout_s: float,
    num_each: int = 1,
) -> None:
    """Every answer to its reader; `num_each` in a row are to the same prompt, which is read once. `request_of` an answer: all but the
    prompt; made when its turn comes. The first that fails ends all of them, and its error is raised."""

    async def ask(index: int, prompt: ReadPrompt) -> None:
        caller = HttpCaller(call, readers[index], timeout_s, repeated=index % num_each > 0)
        await readers[index].end(await inference.generate(request_of(index), caller, prompt))

    if len(readers) == 1:
        await ask(0, partial(read_prompt, 0))
        return
    gate = asyncio.Semaphore(_MAX_READ_AT_ONCE)
    prompts = [_SharedPrompt(partial(read_prompt, i), gate) for i in range(len(readers) // num_each)]
    turns = iter(range(len(readers)))

    async def ask_in_turn() -> None:
        for index in turns:
            await ask(index, prompts[index // num_each])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(readers), MAX_AT_ONCE)):
                group.create_task(ask_in_turn())
                # All begun in one turn of the event loop would hold up everybody else for as long as it takes to begin them.
                await asyncio.sleep(0)
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    finally:
        for prompt in prompts:
            prompt.close()


class _SharedPrompt:
    """Read when the first answer to it wants it, for all of them."""

    def __init__(self, read: ReadPrompt, gate: asyncio.Semaphore) -> None:
        self._read, self._gate = read, gate
        self._reading: asyncio.Task[Prompt] | None = None

    async def __call__(self) -> Prompt:
        if self._reading is None:
            self._reading = asyncio.create_task(self._gated())
        return await asyncio.shield(self._reading)

    async def _gated(self) -> Prompt:
        async with self._gate:
            return await self._read()

    def close(self) -> None:
        """Nobody wants it any more."""
        if self._reading is not None and not self._reading.cancel() and not self._reading.cancelled():
            self._reading.exception()  # whoever waited for it was told


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What the client is told: an error of ours rather than one that nobody expected."""
    return next((error for error in errors.exceptions if isinstance(error, TwostepError)), errors.exceptions[0])


async def parsed(request: web.Request, read: Callable[[bytes], T]) -> T:
    """The body of a request, as `read` has it: see BodyParser. Raises HttpError 415: what a browser sends from anywhere without asking
    first is not taken."""
    raw = await json_body(request)
    request[RECEIVED] = time.monotonic()
    try:
        return await request.app[FRONT].parser.parse(read, raw)
    finally:
        request.app[BODIES].free(request)


async def json_body(request: web.Request) -> bytes:
    """Raises HttpError 415."""
    if request.content_type != "application/json":
        raise HttpError(415, f"the body is {request.content_type}; send JSON, with the header content-type: application/json")
    return await request.app[BODIES].read(request)
