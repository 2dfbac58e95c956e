"""The server interceptor between the wire and every async handler.

A message that cannot be decoded (bad UTF-8, truncated, not this protobuf) becomes INVALID_ARGUMENT, a TwostepError its status by
the table in twostep.errors, and anything else INTERNAL with a reference to the traceback in this process's log.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from twostep.errors import TwostepError, Unavailable, status_of, trailing_metadata

log = logging.getLogger(__name__)

# Status text travels in an HTTP/2 header, and clients refuse headers above 8 KiB.
_MAX_MESSAGE_CHARS = 2000

_Context = grpc.aio.ServicerContext[Any, Any]


class Undecodable(Exception):
    """Takes a request's place between its deserializer and the guarded handler."""


class Guard(grpc.aio.ServerInterceptor):
    """Guards unary-unary and unary-stream handlers; others (reflection) pass untouched."""

    def __init__(self) -> None:
        self._calls = _Calls()

    def end_all(self) -> None:
        """The server goes: calls that are still running end with UNAVAILABLE, so that whoever made them asks elsewhere."""
        self._calls.end_all()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        # None: an unknown method, which grpc answers with UNIMPLEMENTED.
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        decode = functools.partial(_decode, handler.request_deserializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, self._calls),
                request_deserializer=decode,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _guard_unary(handler.unary_unary, self._calls),
            request_deserializer=decode,
            response_serializer=handler.response_serializer,
        )


class _Calls:
    """Those that run."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Raises Unavailable if end_all() ended it."""
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended or task.uncancel() > 0:
                raise  # the client is gone
            raise Unavailable("this server is stopping; repeat the request on another") from None
        finally:
            self._tasks.discard(task)
            self._ended.discard(task)

    def end_all(self) -> None:
        for task in self._tasks - self._ended:
            self._ended.add(task)
            task.cancel()


def _decode(deserializer: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserializer(data)
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        return Undecodable(str(error))


def _guard_unary(handler: Any, calls: _Calls) -> Callable[[Any, _Context], Awaitable[Any]]:
    async def guarded(request: Any, context: _Context) -> Any:
        await _refuse_undecodable(request, context)
        try:
            with calls.running():
                return await handler(request, context)
        except Exception as error:  # noqa: BLE001  # _abort logs whatever is not ours
            await _abort(error, context)

    return guarded


def _guard_stream(handler: Any, calls: _Calls) -> Callable[[Any, _Context], Awaitable[None]]:
    async def guarded(request: Any, context: _Context) -> None:
        await _refuse_undecodable(request, context)
        try:
            # Writing here, instead of being a generator too, makes a cancelled write close the handler's generator at
            # once: its `finally` frees what the call holds, and must not wait for the garbage collector.
            responses: AsyncGenerator[Any, None] = handler(request, context)
            with calls.running():
                async with aclosing(responses):
                    async for response in responses:
                        await context.write(response)
        except Exception as error:  # noqa: BLE001  # _abort logs whatever is not ours
            await _abort(error, context)

    return guarded


async def _refuse_undecodable(request: Any, context: _Context) -> None:
    if isinstance(request, Undecodable):
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a valid message ({request}); strings must be UTF-8, fields as in protos/"
        )


async def _abort(error: Exception, context: _Context) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if context.done():
        # Nobody is left to tell (a write to a client that went away ends up here).
        log.debug("call ended before its handler: %r", error)
        return
    behind: tuple[tuple[str, str], ...] = ()
    if isinstance(error, TwostepError):
        message, behind = error.message, trailing_metadata(error)
    else:
        reference = secrets.token_hex(4)
        log.error("unexpected error %s", reference, exc_info=error)
        message = f"internal error {reference}; look for this reference in the log of the process that answered"
    await context.abort(grpc.StatusCode[status_of(error).grpc], message[:_MAX_MESSAGE_CHARS], behind)
