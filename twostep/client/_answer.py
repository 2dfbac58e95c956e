"""Holds what both kinds of generation are: pieces in, a completion out, and what is sent when the stream breaks.

Whatever may wait is a coroutine here, over hooks (`_read`, `_metadata`, `_pause`) that wait in the asyncio generation and block in the
other. One that never waits ends at its first send(), and needs no event loop: `finished`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from twostep.client import _channel, _wire
from twostep.client._arriving import Arriving
from twostep.client._pool import ConnectionLease, Pool
from twostep.client._types import Choice, Completion, FinishReason, Phases, Piece, TokenLogprobs, ToolCall, Transfer, Usage, read_message
from twostep.errors import (
    Cancelled,
    DeadlineExceeded,
    Incompatible,
    InvalidRequest,
    ResourceExhausted,
    StreamBroken,
    TwostepError,
    Unavailable,
)
from twostep.rpc.api_level import unknown_fields
from twostep.rpc.v1 import inference_pb2 as pb

T = TypeVar("T")

# Sends a request to a router, one not among the targets if there is another, to be answered within so many seconds. Returns grpc's call.
Send = Callable[[pb.GenerateRequest, Collection[str], float], tuple[Any, ConnectionLease[Any]]]


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Returns what a coroutine returns whose hooks block."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a hook of the blocking client waited for an event loop")


class Answer(ABC):
    """The answer so far; of several, the first, but for `usage`. Base of Generation and AsyncGeneration; what the end brings is not known
    before it. Nothing arrives by itself: text, reasoning, tool_calls and token_ids raise InvalidRequest until the answer is read."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        send: Send,
        pool: Pool[Any],
        attempts: _channel.Attempts,
        *,
        resume: bool,
        form: type[Any] | None = None,
    ) -> None:
        """`resume`: go on through another router when one is lost half-way. A request that declined migration declined that too. `form`:
        what the answer is to be an instance of."""
        self._send, self._pool, self._attempts = send, pool, attempts
        self._cancelled = self._reading = False
        self._tried: set[str] = set()
        self._request = request
        self._request_id = request.request_id
        self._resume = resume and not request.no_migration
        self._seed = request.sampling.seed if request.sampling.HasField("seed") else None
        self._num_resumes = 0
        # The call under way has brought something.
        self._heard_of_call = False
        self._form = form
        self._answers = [Arriving() for _ in range(max(1, request.n))]
        self._first = self._answers[0]
        # All answers have ended.
        self._over = False
        self._prompt_logprobs: list[TokenLogprobs] = []  # from its second token on
        self._of_prompt = False
        self._begin(request)

    @property
    def text(self) -> str:
        """Text received so far; the whole answer after the end."""
        return self._received.text

    @property
    def reasoning(self) -> str:
        """Returns what the model thought so far, if it marks that; no part of `text`."""
        return self._received.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Returns the calls so far; the arguments of the last one may lack their end."""
        return self._received.tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._received.token_ids)

    @property
    def _received(self) -> Arriving:
        if not self._reading:
            raise InvalidRequest("nothing of this answer was read yet: iterate over it for its pieces, or call result() for all of it")
        return self._first

    @property
    def request_id(self) -> str:
        """Name of the request in the servers' logs; empty until the first piece if the router chose it."""
        return self._request_id

    @property
    def seed(self) -> int | None:
        """Returns the seed that the answer is drawn with, and that repeats it; None until the first piece if the router chose it."""
        return self._seed

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self._first.end is None else _wire.finish_reason(self._first.end)

    @property
    def usage(self) -> Usage:
        """The sum over all answers. Known after the end; InvalidRequest before."""
        ends = [answer.ended().usage for answer in self._answers]
        return replace(
            read_message(ends[0], Usage),
            completion_tokens=sum(end.completion_tokens for end in ends),
            reasoning_tokens=sum(end.reasoning_tokens for end in ends),
        )

    @property
    def phases(self) -> Phases:
        """Known after the end; InvalidRequest before."""
        return read_message(self._first.ended().phases, Phases)

    @property
    def transfer(self) -> Transfer:
        """Known after the end; InvalidRequest before."""
        return read_message(self._first.ended().transfer, Transfer)

    def __repr__(self) -> str:
        state = self.finish_reason or "open"
        num_tokens = len(self._first.token_ids)
        return f"{type(self).__name__}(request_id={self._request_id!r}, num_tokens={num_tokens}, {state}, text={self._first.text!r:.60})"

    def cancel(self) -> None:
        """Ends the request and frees everything it holds on the servers. Nothing happens after the end."""
        if not self._over:
            self._cancelled = True
            self._call.cancel()

    def _was_cancelled(self) -> bool:
        return self._cancelled

    # ---- what waits ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def _read(self) -> object:
        """The call's next message; anything else at its end. Raises grpc.RpcError."""

    @abstractmethod
    async def _metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Returns what the call began with."""

    @abstractmethod
    async def _pause(self, seconds: float) -> None:
        """Ends early if the answer is cancelled."""

    async def _next(self) -> Piece | None:
        self._reading = True
        while True:
            if self._was_cancelled():
                raise Cancelled("the request was cancelled on this side; ask again if you want an answer")
            try:
                response = await self._read()
            except grpc.RpcError as failure:
                await self._again_after(failure)
                continue
            if not isinstance(response, pb.GenerateResponse):
                # The reading of a call that this side has cancelled may end so, too.
                if self._was_cancelled():
                    continue
                raise self._broken("the server closed the stream without an end")
            if not self._heard_of_call:
                self._check_level(await self._metadata())
            if not self._begun():
                self._heard(await self._metadata())
            self._lease.answered()
            piece = self._take(response)
            if piece is not None and piece.token_ids:
                self._attempts.progressed()
                self._tried.clear()
            return piece

    async def _again_after(self, failure: grpc.RpcError) -> None:
        """Sends what is to be sent next, once it is time. Raises if nothing is."""
        target = self._lease.target
        error = _channel.error_of(target, failure, own=self._was_cancelled() or self._pool.closed)
        # Of a call that is over: what there is of metadata is there.
        heard = self._heard_of_call or (isinstance(error, DeadlineExceeded) and bool(_channel.request_id_of(await self._metadata())))
        if not self._was_cancelled():
            _channel.judge(self._lease, error, heard=heard)
        self._tried.add(target)
        request = None if self._was_cancelled() else self._next_request(error)
        delay = None if request is None else self._attempts.delay_s(error, elsewhere=self._pool.elsewhere(self._tried))
        if request is None or delay is None:
            raise self._failed(error) from failure
        await self._pause(delay)
        if not self._was_cancelled():
            # The call under way has brought nothing yet.
            self._heard_of_call = False
            self._num_resumes += request is not self._request
            self._begin(request)
            if self._was_cancelled():
                # By another thread meanwhile, when only the old call was there to be ended.
                self._call.cancel()

    def _begin(self, request: pb.GenerateRequest) -> None:
        self._asked = request
        self._call, self._lease = self._send(request, self._tried, self._attempts.remaining_s())

    # ---- what has come -----------------------------------------------------------------------------------------------------

    def _begun(self) -> bool:
        """From here on the request must not be repeated as it is: something of the answer was handed out."""
        return any(self._answers)

    def _check_level(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Raises Incompatible if the router has passed over what it does not know."""
        if unknown := unknown_fields(self._asked, metadata or ()):
            raise Incompatible(
                f"the router at {self._lease.target} is older than this client, and knows no {' and no '.join(unknown)}; upgrade it, or "
                "leave that out: ask for one answer (n), and for calls as a part of the text (tool_calls='text')"
            )

    def _heard(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Takes the request's id and its seed from a call's initial metadata, unless they are known."""
        pairs = tuple(metadata or ())
        self._request_id = self._request_id or _channel.request_id_of(pairs)
        if self._seed is None:
            self._seed = _channel.seed_of(pairs)

    def _next_request(self, error: TwostepError) -> pb.GenerateRequest | None:
        """Returns the request to send after `error`: the same one if nothing of the answer was handed out, else one that goes on after it.
        None: neither is possible."""
        if not self._begun():
            return self._request
        if not self._resume or self._seed is None or (self._heard_of_call and not isinstance(error, Unavailable)):
            return None
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.request_id = self._request_id
        request.sampling.seed = self._seed
        if len(self._answers) == 1:
            request.resume_token_ids.extend(self._first.token_ids)
        for index, answer in enumerate(self._answers if request.n else ()):
            if answer.end is None:
                request.begun_answers.add(index=index, token_ids=answer.token_ids)
        return request

    def _take(self, response: pb.GenerateResponse) -> Piece | None:
        """Adds one message of the stream. None: it is no piece."""
        self._heard_of_call = True
        if response.index >= len(self._answers):
            raise self._broken(f"there came a part of answer {response.index}, and {len(self._answers)} were asked for")
        answer = self._answers[response.index]
        if response.HasField("end"):
            answer.end = response.end
            self._over = all(each.end is not None for each in self._answers)
            return None
        if response.HasField("prompt_logprobs"):
            # A call that broke may have brought some of them already.
            part = response.prompt_logprobs
            self._prompt_logprobs[part.position - 1 :] = _wire.prompt_logprobs(part)
            self._of_prompt = True
            return None
        piece = _wire.piece(response.piece, response.index)
        expected = len(self._request.resume_token_ids) + len(answer.token_ids)
        if piece.token_ids and piece.position != expected:
            raise self._broken(f"tokens from position {piece.position} arrived where {expected} was next")
        answer.add(piece)
        return piece

    def _failed(self, error: TwostepError) -> TwostepError:
        """The error to raise for a stream that ended with `error`: half-way, it carries what had arrived."""
        if not self._begun():
            return error
        if isinstance(error, DeadlineExceeded):
            return DeadlineExceeded(error.message, **self._arrived())
        refused = isinstance(error, ResourceExhausted) and not self._heard_of_call
        return self._broken(error.message) if isinstance(error, Unavailable) or refused else error

    def _broken(self, why: str) -> StreamBroken:
        num_tokens = sum(len(answer.token_ids) for answer in self._answers)
        message = f"the answer broke off after {num_tokens} tokens: {why}; ask again, or go on from what was received"
        return StreamBroken(message, **self._arrived())

    def _arrived(self) -> dict[str, Any]:
        token_ids = (*self._request.resume_token_ids, *self._first.token_ids)
        return {"text": self.text, "reasoning": self.reasoning, "token_ids": token_ids, "seed": self._seed}

    def _completion(self) -> Completion:
        choices = tuple(answer.choice(index, self._form) for index, answer in enumerate(self._answers))
        first = {name: getattr(choices[0], name) for name in Choice.__dataclass_fields__}
        return Completion(
            **first | {"usage": self.usage},
            request_id=self._request_id,
            resumes=self._num_resumes,
            choices=choices,
            prompt_logprobs=(None, *self._prompt_logprobs) if self._of_prompt else (),
        )
