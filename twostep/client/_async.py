"""The asyncio client. The same surface as the blocking one; what both need lives in _wire, _channel and _answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc
import grpc.aio

from twostep.client import _channel, _wire
from twostep.client._answer import Answer
from twostep.client._types import Completion, Compression, Model, Piece, RequestClass, SamplingOptions, Tokens
from twostep.errors import Cancelled, InvalidRequest, TwostepError
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc as pb_grpc

T = TypeVar("T")


class _Call(Protocol):
    """What an AsyncGeneration needs of grpc's streaming call."""

    async def read(self) -> object: ...

    def cancel(self) -> bool: ...

    async def initial_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...


# Sends a request to a router, to be answered within so many seconds.
_Start = Callable[[pb.GenerateRequest, str, float], _Call]


class AsyncGeneration(Answer):
    """An answer on its way. Iterate over it once for its pieces, or await result() for all of it.

    The request is sent when this object is made. Leaving the loop early cancels it, and so do cancelling the task that iterates and
    dropping the object. Raises while iterating: any twostep.errors.TwostepError; StreamBroken if the answer broke off half-way.
    """

    def __init__(
        self, request: pb.GenerateRequest, start: _Start, routers: _channel.Routers, attempts: _channel.Attempts, *, resume: bool
    ) -> None:
        super().__init__(request, resume=resume)
        self._start, self._routers, self._attempts = start, routers, attempts
        self._cancelled = False
        self._target = routers.current
        self._call = start(request, self._target, attempts.remaining_s())

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while self._end is None:
                piece = await self._next()
                if piece is not None:
                    yield piece
        finally:
            # Reached at the end, by an error, by the task's cancellation and, through the loop's generator hook, when the caller leaves.
            if self._end is None:
                self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        # grpc's own tasks keep the call alive after the last reference of ours is gone.
        call: _Call | None = getattr(self, "_call", None)
        if call is None or self._end is not None:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # the loop is gone, and the connection with it
        call.cancel()

    def cancel(self) -> None:
        """Ends the request and frees everything it holds on the servers. Nothing happens after the end."""
        if self._end is None:
            self._cancelled = True
            self._call.cancel()

    async def result(self) -> Completion:
        """Waits for the end and returns the whole answer, with what earlier iteration took."""
        async for _ in self:
            pass
        return self._completion()

    def _was_cancelled(self) -> bool:
        return self._cancelled

    async def _next(self) -> Piece | None:
        while True:
            if self._was_cancelled():
                raise Cancelled("the request was cancelled on this side; ask again if you want an answer")
            try:
                response = await self._call.read()
            except asyncio.CancelledError:
                # grpc raises this for its call's cancellation as well as for the task's.
                if not self._was_cancelled():
                    raise
                continue
            except grpc.RpcError as failure:
                error = _channel.error_of(self._target, failure)
                request = None if self._cancelled else self._next_request(error)
                delay = None if request is None else self._attempts.delay_s(error)
                if request is None or delay is None:
                    raise self._failed(error) from failure
                await asyncio.sleep(delay)
                if not self._cancelled:
                    self._repeats(request)
                    self._routers.skip(self._target)
                    self._target = self._routers.current
                    self._call = self._start(request, self._target, self._attempts.remaining_s())
                continue
            if not isinstance(response, pb.GenerateResponse):
                raise self._broken("the server closed the stream without an end")
            if not self._begun():
                self._heard(await self._call.initial_metadata())
            piece = self._take(response)
            if piece is not None and piece.token_ids:
                self._attempts.progressed()
            return piece


class AsyncClient:
    """A connection to a router for one event loop and any number of concurrent requests. Close it, or use it with `async with`.

        async with AsyncClient("localhost:50051") as client:
            async for piece in client.generate("Once upon a time", max_tokens=64, temperature=0.0):
                print(piece.text, end="", flush=True)

    Options are those of Client.
    """

    def __init__(
        self,
        target: str | Sequence[str] = _channel.DEFAULT_TARGET,
        *,
        timeout: float = _channel.DEFAULT_TIMEOUT_S,
        max_retries: int = 3,
        compression: Compression = "none",
        tls: bool = False,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
    ) -> None:
        self._routers = _channel.Routers(target)
        self._compression = _channel.checked_compression(compression)
        self._timeout = _channel.checked_timeout(timeout, _channel.DEFAULT_TIMEOUT_S)
        self._max_retries = max_retries
        credentials = _channel.credentials_of(tls, tls_ca, tls_cert, tls_key)
        self._tls = credentials is not None
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: dict[str, pb_grpc.InferenceAsyncStub] = {}
        for address in self._routers.targets:
            channel = _open(address, credentials)
            self._channels.append(channel)
            self._stubs[address] = pb_grpc.InferenceStub(channel)
        self._closed = False

    def __repr__(self) -> str:
        return f"AsyncClient({self._routers!r}, timeout={self._timeout:g}, max_retries={self._max_retries}, tls={self._tls})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels whatever is still running and closes the connection."""
        self._closed = True
        for channel in self._channels:
            await channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        timeout: float | None = None,
        request_id: str = "",
        cache_salt: str = "",
        migrate: bool = True,
        resume: bool = True,
        resume_token_ids: Sequence[int] = (),
        request_class: RequestClass = "standard",
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        tenant: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGeneration:
        """Continues a text, or token ids as they are. Requests share cached prefixes only with requests of the same `cache_salt`.

        A lost worker or router costs the answer nothing but time: servers begin it again elsewhere after its last token (`migrate`), and
        so does this client when the router itself is lost (`resume`, which needs `migrate`). Without, the answer breaks off with
        StreamBroken, and `resume_token_ids=broken.token_ids, seed=broken.seed` goes on with it: text and pieces are those after them.

        `request_class` says how urgent it is: interactive requests go first, batch ones fill the gaps. `ttft_ms` and `tpot_ms` are what the
        answer is needed within, to its first token and for each one after it: if that cannot be kept, the request is refused at once with
        ResourceExhausted, whose `retry_after_s` says when to come again; retries do (batch requests wait instead). `tenant` is whose
        share of the system it uses; where a front names the tenants, its word counts."""
        request = _wire.generate_request(
            prompt,
            token_ids,
            None,
            model=model,
            request_id=request_id,
            cache_salt=cache_salt,
            sampling=sampling,
            migrate=migrate,
            resume_token_ids=resume_token_ids,
            request_class=request_class,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            tenant=tenant,
        )
        return self._generate(request, timeout, resume)

    def chat(
        self,
        messages: _wire.Messages,
        *,
        model: str = "",
        timeout: float | None = None,
        request_id: str = "",
        cache_salt: str = "",
        migrate: bool = True,
        resume: bool = True,
        resume_token_ids: Sequence[int] = (),
        request_class: RequestClass = "standard",
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        tenant: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGeneration:
        """The next turn of a conversation, in the model's own chat template. The other options are those of `generate`."""
        request = _wire.generate_request(
            None,
            None,
            messages,
            model=model,
            request_id=request_id,
            cache_salt=cache_salt,
            sampling=sampling,
            migrate=migrate,
            resume_token_ids=resume_token_ids,
            request_class=request_class,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            tenant=tenant,
        )
        return self._generate(request, timeout, resume)

    async def tokenize(
        self, text: str | None = None, *, messages: _wire.Messages | None = None, model: str = "", timeout: float | None = None
    ) -> Tokens:
        """The token ids that `generate(text)` or `chat(messages)` would send to the model."""
        request = _wire.tokenize_request(text, messages, model=model)
        how = _channel.compression_for(request.ByteSize(), self._compression)
        return _wire.tokens(await self._unary(lambda stub, seconds: stub.Tokenize(request, timeout=seconds, compression=how), timeout))

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """What is served here."""
        return _wire.models(await self._unary(lambda stub, seconds: stub.ListModels(pb.ListModelsRequest(), timeout=seconds), timeout))

    def _generate(self, request: pb.GenerateRequest, timeout: float | None, resume: bool) -> AsyncGeneration:
        def start(request: pb.GenerateRequest, target: str, seconds: float) -> _Call:
            self._check_open()
            how = _channel.compression_for(request.ByteSize(), self._compression)
            call: _Call = self._stubs[target].Generate(request, timeout=seconds, compression=how)
            return call

        attempts = _channel.Attempts(_channel.checked_timeout(timeout, self._timeout), self._max_retries)
        return AsyncGeneration(request, start, self._routers, attempts, resume=resume)

    async def _unary(self, call: Callable[[pb_grpc.InferenceAsyncStub, float], Awaitable[T]], timeout: float | None) -> T:
        attempts = _channel.Attempts(_channel.checked_timeout(timeout, min(self._timeout, _channel.UNARY_TIMEOUT_S)), self._max_retries)
        while True:
            self._check_open()
            target = self._routers.current
            try:
                return await call(self._stubs[target], attempts.remaining_s())
            except grpc.RpcError as failure:
                problem: TwostepError = _channel.error_of(target, failure)
                delay = attempts.delay_s(problem)
                if delay is None:
                    raise problem from failure
                await asyncio.sleep(delay)
                self._routers.skip(target)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this client is closed; make a new one")


def _open(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    options = _channel.options_for(address)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)
