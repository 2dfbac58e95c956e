"""The blocking client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from twostep.client import _channel, _wire
from twostep.client._answer import Answer
from twostep.client._types import Completion, Compression, Model, Piece, RequestClass, SamplingOptions, Tokens
from twostep.errors import Cancelled, InvalidRequest, TwostepError
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc as pb_grpc

T = TypeVar("T")


class _Call(Protocol):
    """What a Generation needs of grpc's streaming call."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> bool: ...

    def initial_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...


# Sends a request to a router, to be answered within so many seconds.
_Start = Callable[[pb.GenerateRequest, str, float], _Call]


class Generation(Answer):
    """An answer on its way. Iterate over it once for its pieces, or call result() for all of it.

    The request is sent when this object is made. Leaving the loop early cancels it, and so does dropping the object.
    Raises while iterating: any twostep.errors.TwostepError; StreamBroken if the answer broke off half-way.
    """

    def __init__(
        self, request: pb.GenerateRequest, start: _Start, routers: _channel.Routers, attempts: _channel.Attempts, *, resume: bool
    ) -> None:
        super().__init__(request, resume=resume)
        self._start, self._routers, self._attempts = start, routers, attempts
        self._cancelled = threading.Event()
        self._target = routers.current
        self._call = start(request, self._target, attempts.remaining_s())

    def __iter__(self) -> Iterator[Piece]:
        try:
            while self._end is None:
                piece = self._next()
                if piece is not None:
                    yield piece
        finally:
            # Reached at the end, by an error, and by the generator's close when the caller leaves its loop.
            if self._end is None:
                self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends the request and frees everything it holds on the servers. From any thread; nothing happens after the end."""
        if self._end is None:
            self._cancelled.set()
            self._call.cancel()

    def result(self) -> Completion:
        """Waits for the end and returns the whole answer, with what earlier iteration took."""
        for _ in self:
            pass
        return self._completion()

    def _next(self) -> Piece | None:
        while True:
            if self._cancelled.is_set():
                raise Cancelled("the request was cancelled on this side; ask again if you want an answer")
            try:
                response = next(self._call)
            except StopIteration:
                raise self._broken("the server closed the stream without an end") from None
            except grpc.RpcError as failure:
                error = _channel.error_of(self._target, failure)
                request = None if self._cancelled.is_set() else self._next_request(error)
                delay = None if request is None else self._attempts.delay_s(error)
                if request is None or delay is None:
                    raise self._failed(error) from failure
                if not self._cancelled.wait(delay):
                    self._repeats(request)
                    self._routers.skip(self._target)
                    self._target = self._routers.current
                    self._call = self._start(request, self._target, self._attempts.remaining_s())
                    if self._cancelled.is_set():
                        # Meanwhile, when only the old call was there to be ended.
                        self._call.cancel()
                continue
            if not self._begun():
                self._heard(self._call.initial_metadata())
            piece = self._take(response)
            if piece is not None and piece.token_ids:
                self._attempts.progressed()
            return piece


class Client:
    """A connection to a router, for any number of threads and concurrent requests. Close it, or use it as a context manager.

        with Client("localhost:50051") as client:
            for piece in client.generate("Once upon a time", max_tokens=64, temperature=0.0):
                print(piece.text, end="", flush=True)

    `timeout` (seconds) bounds a whole request with its retries; each call may give its own. `max_retries` more tries are made, with
    growing jittered pauses, when a request was refused for want of room or the server was away: the same request if nothing of its answer
    had arrived, otherwise one that goes on after what had.

    `target` is one router, a name with several behind it, or a list of routers: the first is used until it fails, then the next one.
    `compression="gzip"` is for long prompts over slow links: requests of 1 KiB and more are compressed.
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
        self._channels: list[grpc.Channel] = []
        self._stubs: dict[str, pb_grpc.InferenceStub] = {}
        for address in self._routers.targets:
            channel = _open(address, credentials)
            self._channels.append(channel)
            self._stubs[address] = pb_grpc.InferenceStub(channel)
        self._closed = False

    def __repr__(self) -> str:
        return f"Client({self._routers!r}, timeout={self._timeout:g}, max_retries={self._max_retries}, tls={self._tls})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancels whatever is still running and closes the connection."""
        self._closed = True
        for channel in self._channels:
            channel.close()

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
    ) -> Generation:
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
    ) -> Generation:
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

    def tokenize(
        self, text: str | None = None, *, messages: _wire.Messages | None = None, model: str = "", timeout: float | None = None
    ) -> Tokens:
        """The token ids that `generate(text)` or `chat(messages)` would send to the model."""
        request = _wire.tokenize_request(text, messages, model=model)
        how = _channel.compression_for(request.ByteSize(), self._compression)
        return _wire.tokens(self._unary(lambda stub, seconds: stub.Tokenize(request, timeout=seconds, compression=how), timeout))

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """What is served here."""
        return _wire.models(self._unary(lambda stub, seconds: stub.ListModels(pb.ListModelsRequest(), timeout=seconds), timeout))

    def _generate(self, request: pb.GenerateRequest, timeout: float | None, resume: bool) -> Generation:
        def start(request: pb.GenerateRequest, target: str, seconds: float) -> _Call:
            self._check_open()
            how = _channel.compression_for(request.ByteSize(), self._compression)
            call: _Call = self._stubs[target].Generate(request, timeout=seconds, compression=how)
            return call

        attempts = _channel.Attempts(_channel.checked_timeout(timeout, self._timeout), self._max_retries)
        return Generation(request, start, self._routers, attempts, resume=resume)

    def _unary(self, call: Callable[[pb_grpc.InferenceStub, float], T], timeout: float | None) -> T:
        attempts = _channel.Attempts(_channel.checked_timeout(timeout, min(self._timeout, _channel.UNARY_TIMEOUT_S)), self._max_retries)
        while True:
            self._check_open()
            target = self._routers.current
            try:
                return call(self._stubs[target], attempts.remaining_s())
            except grpc.RpcError as failure:
                error: TwostepError = _channel.error_of(target, failure)
                delay = attempts.delay_s(error)
                if delay is None:
                    raise error from failure
                time.sleep(delay)
                self._routers.skip(target)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequest("this client is closed; make a new one")


def _open(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    options = _channel.options_for(address)
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)
