"""Holds what both clients are: where the routers are, how long a request may take, what every call carries, and how one is made.

As in _answer.py, what may wait is a coroutine over hooks (`_finish`, `_sleep`), which block in Client.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, Unpack

import grpc

from twostep.client import _channel, _status, _wire
from twostep.client._answer import Answer
from twostep.client._pool import ConnectionLease, HealthProbe, Pool, RouterEndpoint
from twostep.client._types import (
    ChatOptions,
    Compression,
    Embeddings,
    EmbedOptions,
    Model,
    RequestOptions,
    RouterState,
    Tokens,
    read_message,
)
from twostep.client._wire import Messages
from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc as pb_grpc
from twostep.rpc.v1 import status_pb2, status_pb2_grpc

AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(frozen=True, slots=True)
class Wire:
    """One connection: a channel of grpc or of grpc.aio, and stubs of the same kind."""

    channel: Any
    inference: Any
    status: Any
    check: Any


class ClientBase(ABC, Generic[AnswerT]):
    _answer: type[AnswerT]

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
        credentials = _channel.credentials_of(tls, tls_ca, tls_cert, tls_key)
        routers: list[RouterEndpoint[Wire]] = _channel.routers_of(target)
        self._compression = _channel.checked_compression(compression)
        self._timeout = _channel.checked_timeout(timeout, _channel.DEFAULT_TIMEOUT_S)
        self._max_retries = max_retries
        self._tls = credentials is not None
        self._key = _channel.key_metadata(api_key, [router.target for router in routers], tls=self._tls)
        # Of the asyncio client, what goes on beside the calls: health checks, each with its own deadline, and connections that close.
        self._tasks: set[asyncio.Task[None]] = set()
        most = _channel.checked_connections(max_connections)
        self._pool = Pool(routers, lambda address: self._open(address, credentials), max_connections=most)

    def __repr__(self) -> str:
        where = _channel.targets_repr(self._pool.targets)
        return f"{type(self).__name__}({where}, timeout={self._timeout:g}, max_retries={self._max_retries}, tls={self._tls})"

    @property
    def routers(self) -> tuple[RouterState, ...]:
        """Returns the state of each router that this client was given, as it sees it now."""
        return self._pool.states()

    def generate(self, prompt: str | None = None, *, token_ids: Sequence[int] | None = None, **options: Unpack[RequestOptions]) -> AnswerT:
        """Continues a text, or token ids as they are. Every option is described in RequestOptions and SamplingOptions.

        A lost worker or router costs the answer nothing but time: servers begin it again elsewhere after its last token (`migrate`), and
        so does this client when the router itself is lost (`resume`, which needs `migrate`). Without, the answer breaks off with
        StreamBroken, and `resume_token_ids=broken.token_ids, seed=broken.seed` goes on with it: text and pieces are those after them."""
        return self._generate(_wire.generate_request(prompt, token_ids, options), options)

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> AnswerT:
        """The next turn of a conversation, in the model's own chat template; a text is a user's only message. The options are those of
        `generate`, and ChatOptions."""
        return self._generate(_wire.chat_request(messages, options), options)

    # ---- hooks ---------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _channel_to(self, address: str, options: Any, credentials: grpc.ChannelCredentials | None) -> Any:
        """Opens a channel."""

    @abstractmethod
    def _when_done(self, call: Any, then: Callable[[], None]) -> None:
        """Calls `then` at the end of the call, now if that has come."""

    @abstractmethod
    async def _finish(self, call: Callable[[], Any]) -> Any:
        """Makes a call of one answer, and returns that."""

    @abstractmethod
    async def _sleep(self, seconds: float) -> None: ...

    @abstractmethod
    def _dispose(self, wire: Wire) -> None:
        """Closes a connection that is out of use, and waits for nothing."""

    @abstractmethod
    def _ask(self, probe: HealthProbe[Wire]) -> None:
        """Has the pool told of a router's health, and waits for nothing."""

    def _let_go(self, lease: ConnectionLease[Wire], error: BaseException) -> None:
        lease.release()

    # ---- calls ---------------------------------------------------------------------------------------------------------------

    def _generate(self, request: pb.GenerateRequest, options: RequestOptions) -> AnswerT:
        how = _channel.compression_for(request.ByteSize(), self._compression)
        about = (*self._key, *_channel.trace_of(options.get("traceparent")))

        def send(request: pb.GenerateRequest, tried: Collection[str], seconds: float) -> tuple[Any, ConnectionLease[Wire]]:
            lease = self._lease(tried)
            try:
                call = lease.wire.inference.Generate(request, timeout=seconds, compression=how, metadata=about)
                self._when_done(call, lease.release)
            except BaseException as error:
                self._let_go(lease, error)
                raise
            return call, lease

        attempts = _channel.Attempts(_channel.checked_timeout(options.get("timeout"), self._timeout), self._max_retries)
        form = _wire.form_of(options)
        return self._answer(request, send, self._pool, attempts, resume=options.get("resume") is not False, form=form)

    async def _tokenize(
        self,
        text: str | None,
        messages: Messages | None,
        tools: Sequence[Mapping[str, Any]] | None,
        model: str,
        timeout: float | None,
    ) -> Tokens:
        request = _wire.tokenize_request(text, messages, model=model, tools=tools)
        return read_message(await self._unary(lambda wire: wire.inference.Tokenize, request, timeout), Tokens)

    async def _embed(self, inputs: str | Sequence[str] | Sequence[Sequence[int]], options: EmbedOptions) -> Embeddings:
        request = _wire.embed_request(inputs, options)
        found = await self._unary(
            lambda wire: wire.inference.Embed, request, options.get("timeout"), most=self._timeout, traceparent=options.get("traceparent")
        )
        return _wire.embeddings(found)

    async def _models(self, timeout: float | None) -> list[Model]:
        found = await self._unary(lambda wire: wire.inference.ListModels, pb.ListModelsRequest(), timeout)
        return [read_message(model, Model) for model in found.models]

    async def _cluster(self, timeout: float | None) -> _status.ClusterStatus:
        return _status.cluster_status(await self._unary(lambda wire: wire.status.GetStatus, status_pb2.StatusRequest(), timeout))

    async def _unary(
        self,
        method: Callable[[Wire], Any],
        request: Any,
        timeout: float | None,
        *,
        most: float = _channel.UNARY_TIMEOUT_S,
        traceparent: str | None = None,
    ) -> Any:
        """`most`: nobody waits longer, unless told to."""
        how = _channel.compression_for(request.ByteSize(), self._compression)
        about = (*self._key, *_channel.trace_of(traceparent))
        limit = _channel.checked_timeout(timeout, min(self._timeout, most))
        attempts, tried = _channel.Attempts(limit, self._max_retries), set[str]()
        while True:
            lease = self._lease(tried)
            ask, seconds = method(lease.wire), attempts.remaining_s()
            try:
                result = await self._finish(lambda: ask(request, timeout=seconds, compression=how, metadata=about))  # noqa: B023  now
                lease.answered()
                return result
            except grpc.RpcError as failure:
                error = _channel.error_of(lease.target, failure, own=self._pool.closed)
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
            await self._sleep(delay)

    def _lease(self, tried: Collection[str]) -> ConnectionLease[Wire]:
        """Where the next call goes. Whatever the pool has to have done is begun now."""
        if self._pool.closed:
            raise InvalidRequest("this client is closed; make a new one")
        for wire in self._pool.worn():
            self._dispose(wire)
        for probe in self._pool.due():
            self._ask(probe)
        return self._pool.take(tried)

    def _open(self, address: str, credentials: grpc.ChannelCredentials | None) -> Wire:
        channel = self._channel_to(address, _channel.options_for(address), credentials)
        check = channel.unary_unary(
            _channel.HEALTH_CHECK, request_serializer=_channel.same_bytes, response_deserializer=_channel.same_bytes
        )
        return Wire(channel, pb_grpc.InferenceStub(channel), status_pb2_grpc.StatusStub(channel), check)
