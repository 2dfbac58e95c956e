"""The blocking client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack

import grpc

from twostep.client import _channel, _status, _wire
from twostep.client._answer import Answer
from twostep.client._base import ClientBase
from twostep.client._messages import Messages
from twostep.client._pool import ConnectionLease, HealthProbe, Pool
from twostep.client._types import ChatOptions, Completion, Compression, Model, Piece, RequestOptions, Tokens
from twostep.errors import Cancelled, DeadlineExceeded, InvalidRequest, TwostepError
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc as pb_grpc
from twostep.rpc.v1 import status_pb2, status_pb2_grpc

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _SyncWire:
    """One connection."""

    channel: grpc.Channel
    inference: pb_grpc.InferenceStub
    status: status_pb2_grpc.StatusStub
    check: Any


class _Call(Protocol):
    """Describes the part of grpc's streaming call that a Generation uses."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> bool: ...

    def initial_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...


@dataclass(frozen=True, slots=True)
class _Started:
    call: _Call
    lease: ConnectionLease[_SyncWire]


# Sends a request to a router, one not among the targets if there is another, to be answered within so many seconds.
_Start = Callable[[pb.GenerateRequest, Collection[str], float], _Started]


class Generation(Answer):
    """An answer on its way. Iterate over it once for its pieces, or call result() for all of it.

    The request is sent when this object is made. Leaving the loop early cancels it, and so does dropping the object.
    Raises while iterating: any twostep.errors.TwostepError; StreamBroken if the answer broke off half-way.
    """

    def __init__(
        self, request: pb.GenerateRequest, start: _Start, pool: Pool[_SyncWire], attempts: _channel.Attempts, *, resume: bool
    ) -> None:
        super().__init__(request, resume=resume)
        self._start, self._pool, self._attempts = start, pool, attempts
        self._cancelled = threading.Event()
        self._tried: set[str] = set()
        self._begin(request)

    def _begin(self, request: pb.GenerateRequest) -> None:
        started = self._start(request, self._tried, self._attempts.remaining_s())
        self._call, self._lease = started.call, started.lease

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
                self._again_after(failure)
                continue
            except BaseException:
                self._lease.abandon()
                raise
            if not self._begun():
                self._heard(self._call.initial_metadata())
            self._lease.answered()
            piece = self._take(response)
            if piece is not None and piece.token_ids:
                self._attempts.progressed()
                self._tried.clear()
            return piece

    def _again_after(self, failure: grpc.RpcError) -> None:
        """Sends what is to be sent next, once it is time. Raises if nothing is."""
        target = self._lease.target
        error = _channel.error_of(target, failure, own=self._cancelled.is_set() or self._pool.closed)
        # Of a call that is over: what there is of metadata is there.
        heard = self._heard_of_call or (isinstance(error, DeadlineExceeded) and bool(_channel.request_id_of(self._call.initial_metadata())))
        if not self._cancelled.is_set():
            _channel.judge(self._lease, error, heard=heard)
        self._tried.add(target)
        request = None if self._cancelled.is_set() else self._next_request(error)
        delay = None if request is None else self._attempts.delay_s(error, elsewhere=self._pool.elsewhere(self._tried))
        if request is None or delay is None:
            raise self._failed(error) from failure
        if not self._cancelled.wait(delay):
            self._repeats(request)
            self._begin(request)
            if self._cancelled.is_set():
                # Meanwhile, when only the old call was there to be ended.
                self._call.cancel()


class Client(ClientBase[_SyncWire]):
    """The routers of a deployment, for any number of threads and concurrent requests. Close it, or use it as a context manager.

        with Client("localhost:50051") as client:
            for piece in client.generate("Once upon a time", max_tokens=64, temperature=0.0):
                print(piece.text, end="", flush=True)

    `target` is one router, a name with several behind it, or a list. A request goes to the router of the list that has the fewest requests
    of this client, unless it has failed lately (twostep/client/_pool.py); behind a name, to each address in turn. A router with many
    requests gets up to `max_connections` connections, 100 requests on each.

    `timeout` (seconds) bounds a whole request with its retries, and goes to the router as the call's deadline; each call may give its own.
    `max_retries` more tries are made, with growing jittered pauses, when a request was refused for want of room or the server was away:
    the same request if nothing of its answer had arrived, otherwise one that goes on after what had. While a well router is left that has
    not been tried, there is no pause, and it does not count; 0: nothing is ever sent twice.

    `api_key` is shown to the router with every call. `compression="gzip"` is for long prompts over slow links: requests of 1 KiB and more
    are compressed. `tls` trusts the system's authorities, `tls_ca` those in a file.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancels whatever is still running and closes the connections."""
        self._pool.closed = True
        for wire in self._pool.wires():
            wire.channel.close()

    def generate(
        self, prompt: str | None = None, *, token_ids: Sequence[int] | None = None, **options: Unpack[RequestOptions]
    ) -> Generation:
        """Continues a text, or token ids as they are. Every option is described in RequestOptions and SamplingOptions.

        A lost worker or router costs the answer nothing but time: servers begin it again elsewhere after its last token (`migrate`), and
        so does this client when the router itself is lost (`resume`, which needs `migrate`). Without, the answer breaks off with
        StreamBroken, and `resume_token_ids=broken.token_ids, seed=broken.seed` goes on with it: text and pieces are those after them."""
        return self._generate(_wire.generate_request(prompt, token_ids, options), options)

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Generation:
        """The next turn of a conversation, in the model's own chat template. The options are those of `generate`, and ChatOptions."""
        return self._generate(_wire.chat_request(messages, options), options)

    def tokenize(
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
            self._unary(lambda wire, seconds: wire.inference.Tokenize(request, timeout=seconds, compression=how, metadata=about), timeout)
        )

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """Returns the models that are served here."""
        about = self._metadata()
        return _wire.models(
            self._unary(lambda wire, seconds: wire.inference.ListModels(pb.ListModelsRequest(), timeout=seconds, metadata=about), timeout)
        )

    def status(self, *, timeout: float | None = None) -> _status.ClusterStatus:
        """All workers and their load, as one of the routers sees them, and what that router did in the last seconds."""
        about = self._metadata()
        return _status.cluster_status(
            self._unary(lambda wire, seconds: wire.status.GetStatus(status_pb2.StatusRequest(), timeout=seconds, metadata=about), timeout)
        )

    def _generate(self, request: pb.GenerateRequest, options: RequestOptions) -> Generation:
        how = _channel.compression_for(request.ByteSize(), self._compression)
        about = self._metadata(options.get("traceparent"))

        def start(request: pb.GenerateRequest, tried: Collection[str], seconds: float) -> _Started:
            lease = self._lease(tried)
            try:
                call = lease.wire.inference.Generate(request, timeout=seconds, compression=how, metadata=about)
                ended = not call.add_callback(lease.release)
            except BaseException as error:
                self._let_go(lease, error)
                raise
            if ended:
                lease.release()
            return _Started(call, lease)

        resume = options.get("resume")
        return Generation(request, start, self._pool, self._attempts(options.get("timeout")), resume=resume is None or resume)

    def _unary(self, call: Callable[[_SyncWire, float], T], timeout: float | None) -> T:
        attempts, tried = self._attempts(timeout, _channel.UNARY_TIMEOUT_S), set[str]()
        while True:
            lease = self._lease(tried)
            try:
                result = call(lease.wire, attempts.remaining_s())
                lease.answered()
                return result
            except grpc.RpcError as failure:
                error: TwostepError = _channel.error_of(lease.target, failure, own=self._pool.closed)
                _channel.judge(lease, error, heard=False)
                tried.add(lease.target)
                delay = attempts.delay_s(error, elsewhere=self._pool.elsewhere(tried))
                if delay is None:
                    raise error from failure
            except BaseException as interruption:
                self._let_go(lease, interruption)
                raise
            finally:
                lease.release()
            time.sleep(delay)

    def _lease(self, tried: Collection[str]) -> ConnectionLease[_SyncWire]:
        """Where the next call goes. Whatever the pool has to have done is done now."""
        self._check_open()
        for wire in self._pool.worn():
            wire.channel.close()
        for probe in self._pool.due():
            self._ask(probe)
        return self._pool.take(tried)

    def _ask(self, probe: HealthProbe[_SyncWire]) -> None:
        """Nobody waits for the answer: grpc's own thread brings it."""
        future = probe.wire.check.future(_channel.HEALTH_REQUEST, timeout=_channel.HEALTH_TIMEOUT_S, metadata=self._key)
        # Dropped, it would be cancelled.
        probe.held = future

        def told(answer: Any) -> None:
            probe.held = None
            error = answer.exception() if not answer.cancelled() else grpc.FutureCancelledError()
            if isinstance(error, grpc.RpcError) or error is None:
                self._pool.probed(probe, well=_channel.is_well(answer.result() if error is None else None, error))
            else:
                self._pool.probed(probe, well=False)

        future.add_done_callback(told)

    def _let_go(self, lease: ConnectionLease[_SyncWire], error: BaseException) -> None:
        """Releases the lease of a call that came to nothing: grpc refused to make it, as it does with a ValueError on a closed channel, or
        it was interrupted. Raises InvalidRequest if the client was closed meanwhile."""
        lease.release()
        if isinstance(error, ValueError) and self._pool.closed:
            raise InvalidRequest("this client was closed meanwhile; make a new one") from error
        if not isinstance(error, ValueError | TypeError):
            lease.abandon()


def _open(address: str, credentials: grpc.ChannelCredentials | None) -> _SyncWire:
    options = _channel.options_for(address)
    channel = grpc.insecure_channel(address, options) if credentials is None else grpc.secure_channel(address, credentials, options)
    return _SyncWire(
        channel=channel,
        inference=pb_grpc.InferenceStub(channel),
        status=status_pb2_grpc.StatusStub(channel),
        check=channel.unary_unary(_channel.HEALTH_CHECK, request_serializer=_channel.same_bytes, response_deserializer=_channel.same_bytes),
    )
