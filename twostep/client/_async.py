"""The asyncio client. The same surface as the blocking one; what both need lives in _wire, _channel and _answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack

import grpc
import grpc.aio

from twostep.client import _channel, _status, _wire
from twostep.client._answer import Answer
from twostep.client._base import ClientBase
from twostep.client._messages import Messages
from twostep.client._pool import ConnectionLease, HealthProbe, Pool
from twostep.client._types import ChatOptions, Completion, Compression, Model, Piece, RequestOptions, Tokens
from twostep.errors import Cancelled, DeadlineExceeded, TwostepError
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc as pb_grpc
from twostep.rpc.v1 import status_pb2, status_pb2_grpc

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _AsyncWire:
    """One connection."""

    channel: grpc.aio.Channel
    inference: pb_grpc.InferenceAsyncStub
    status: status_pb2_grpc.StatusAsyncStub
    check: Any


class _Call(Protocol):
    """Describes the part of grpc's streaming call that an AsyncGeneration uses."""

    async def read(self) -> object: ...

    def cancel(self) -> bool: ...

    async def initial_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...


@dataclass(frozen=True, slots=True)
class _Started:
    call: _Call
    lease: ConnectionLease[_AsyncWire]


# Sends a request to a router, one not among the targets if there is another, to be answered within so many seconds.
_Start = Callable[[pb.GenerateRequest, Collection[str], float], _Started]


class AsyncGeneration(Answer):
    """An answer on its way. Iterate over it once for its pieces, or await result() for all of it.

    The request is sent when this object is made. Leaving the loop early cancels it, and so do cancelling the task that iterates and
    dropping the object. Raises while iterating: any twostep.errors.TwostepError; StreamBroken if the answer broke off half-way.
    """

    def __init__(
        self, request: pb.GenerateRequest, start: _Start, pool: Pool[_AsyncWire], attempts: _channel.Attempts, *, resume: bool
    ) -> None:
        super().__init__(request, resume=resume)
        self._start, self._pool, self._attempts = start, pool, attempts
        self._cancelled = False
        self._tried: set[str] = set()
        self._begin(request)

    def _begin(self, request: pb.GenerateRequest) -> None:
        started = self._start(request, self._tried, self._attempts.remaining_s())
        self._call, self._lease = started.call, started.lease

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
                await self._again_after(failure)
                continue
            if not isinstance(response, pb.GenerateResponse):
                raise self._broken("the server closed the stream without an end")
            if not self._begun():
                self._heard(await self._call.initial_metadata())
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
        heard = self._heard_of_call or (
            isinstance(error, DeadlineExceeded) and bool(_channel.request_id_of(await self._call.initial_metadata()))
        )
        if not self._was_cancelled():
            _channel.judge(self._lease, error, heard=heard)
        self._tried.add(target)
        request = None if self._was_cancelled() else self._next_request(error)
        delay = None if request is None else self._attempts.delay_s(error, elsewhere=self._pool.elsewhere(self._tried))
        if request is None or delay is None:
            raise self._failed(error) from failure
        await asyncio.sleep(delay)
        if not self._was_cancelled():
            self._repeats(request)
            self._begin(request)


class AsyncClient(ClientBase[_AsyncWire]):
    """The routers of a deployment, for one event loop and any number of concurrent requests. Close it, or use it with `async with`.

        async with AsyncClient("localhost:50051") as client:
            async for piece in client.generate("Once upon a time", max_tokens=64, temperature=0.0):
                print(piece.text, end="", flush=True)

    Options are those of Client.
    """

    def __init__(
        self,
        target: str | Sequence[str] = _channel.DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        timeout: float = _channel.DEFAULT_TIMEOUT_S,
        max_retries: int = 3,
        max_connections: int = 4,
        compression: Compression = "none",
        tls: bool = False,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
    ) -> None:
        super().__init__(
            target,
            _open,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            max_connections=max_connections,
            compression=compression,
            credentials=_channel.credentials_of(tls, tls_ca, tls_cert, tls_key),
        )
        # What goes on beside the calls: health checks, each with its own deadline, and connections that close.
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels whatever is still running and closes the connections."""
        self._pool.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for wire in self._pool.wires():
            await wire.channel.close()

    def generate(
        self, prompt: str | None = None, *, token_ids: Sequence[int] | None = None, **options: Unpack[RequestOptions]
    ) -> AsyncGeneration:
        """Continues a text, or token ids as they are. Every option is described in RequestOptions and SamplingOptions.

        A lost worker or router costs the answer nothing but time: servers begin it again elsewhere after its last token (`migrate`), and
        so does this client when the router itself is lost (`resume`, which needs `migrate`). Without, the answer breaks off with
        StreamBroken, and `resume_token_ids=broken.token_ids, seed=broken.seed` goes on with it: text and pieces are those after them."""
        return self._generate(_wire.generate_request(prompt, token_ids, options), options)

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncGeneration:
        """The next turn of a conversation, in the model's own chat template. The options are those of `generate`, and ChatOptions."""
        return self._generate(_wire.chat_request(messages, options), options)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> Tokens:
        """The token ids that `generate(text)` or `chat(messages)` would send to the model."""
        request = _wire.tokenize_request(text, messages, model=model, tools=tools)
        how = _channel.compression_for(request.ByteSize(), self._compression)
        about = self._metadata()
        return _wire.tokens(
            await self._unary(
                lambda wire, seconds: wire.inference.Tokenize(request, timeout=seconds, compression=how, metadata=about), timeout
            )
        )

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """Returns the models that are served here."""
        about = self._metadata()
        return _wire.models(
            await self._unary(
                lambda wire, seconds: wire.inference.ListModels(pb.ListModelsRequest(), timeout=seconds, metadata=about), timeout
            )
        )

    async def status(self, *, timeout: float | None = None) -> _status.ClusterStatus:
        """All workers and their load, as one of the routers sees them, and what that router did in the last seconds."""
        about = self._metadata()
        return _status.cluster_status(
            await self._unary(
                lambda wire, seconds: wire.status.GetStatus(status_pb2.StatusRequest(), timeout=seconds, metadata=about), timeout
            )
        )

    def _generate(self, request: pb.GenerateRequest, options: RequestOptions) -> AsyncGeneration:
        how = _channel.compression_for(request.ByteSize(), self._compression)
        about = self._metadata(options.get("traceparent"))

        def start(request: pb.GenerateRequest, tried: Collection[str], seconds: float) -> _Started:
            lease = self._lease(tried)
            try:
                call: Any = lease.wire.inference.Generate(request, timeout=seconds, compression=how, metadata=about)
            except BaseException:
                lease.release()
                raise
            call.add_done_callback(lambda _: lease.release())
            return _Started(call, lease)

        resume = options.get("resume")
        return AsyncGeneration(request, start, self._pool, self._attempts(options.get("timeout")), resume=resume is None or resume)

    async def _unary(self, call: Callable[[_AsyncWire, float], Awaitable[T]], timeout: float | None) -> T:
        attempts, tried = self._attempts(timeout, _channel.UNARY_TIMEOUT_S), set[str]()
        while True:
            lease = self._lease(tried)
            try:
                result = await call(lease.wire, attempts.remaining_s())
                lease.answered()
                return result
            except grpc.RpcError as failure:
                problem: TwostepError = _channel.error_of(lease.target, failure, own=self._pool.closed)
                _channel.judge(lease, problem, heard=False)
                tried.add(lease.target)
                delay = attempts.delay_s(problem, elsewhere=self._pool.elsewhere(tried))
                if delay is None:
                    raise problem from failure
            finally:
                lease.release()
            await asyncio.sleep(delay)

    def _lease(self, tried: Collection[str]) -> ConnectionLease[_AsyncWire]:
        """Where the next call goes. Whatever the pool has to have done is begun now."""
        self._check_open()
        for wire in self._pool.worn():
            self._spawn(wire.channel.close())
        for probe in self._pool.due():
            self._spawn(self._ask(probe))
        return self._pool.take(tried)

    async def _ask(self, probe: HealthProbe[_AsyncWire]) -> None:
        well = False
        try:
            response = await probe.wire.check(_channel.HEALTH_REQUEST, timeout=_channel.HEALTH_TIMEOUT_S, metadata=self._key)
            well = _channel.is_well(response, None)
        except grpc.RpcError as error:
            well = _channel.is_well(None, error)
        finally:
            self._pool.probed(probe, well=well)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _open(address: str, credentials: grpc.ChannelCredentials | None) -> _AsyncWire:
    options = _channel.options_for(address)
    channel = grpc.aio.insecure_channel(address, options) if credentials is None else grpc.aio.secure_channel(address, credentials, options)
    stub: pb_grpc.InferenceAsyncStub = pb_grpc.InferenceStub(channel)
    status: status_pb2_grpc.StatusAsyncStub = status_pb2_grpc.StatusStub(channel)
    return _AsyncWire(
        channel=channel,
        inference=stub,
        status=status,
        check=channel.unary_unary(_channel.HEALTH_CHECK, request_serializer=_channel.same_bytes, response_deserializer=_channel.same_bytes),
    )
