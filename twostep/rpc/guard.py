"""The server interceptor between the wire and every async handler.

The life of a call:

 1. admitted  by what its headers say alone: whoever has no key, no signature or the wrong version is refused here, and nothing of what it
              sends is read. Health is open to everybody.
 2. place     one of the server's (twostep.rpc.slots), which a call without its message holds only while nobody else wants it.
 3. message   read when it is its caller's turn, within 30 s. One that cannot be decoded (bad UTF-8, truncated, not this protobuf) becomes
              INVALID_ARGUMENT.
 4. handler   A TwostepError becomes its status by the table in twostep.errors, and anything else INTERNAL with a reference to the
              traceback in this process's log.

To gRPC every handler is one of streams, since it reads the message of any other before anybody is asked, and waits for it without end.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from twostep.errors import DeadlineExceeded, InvalidRequest, TwostepError, Unavailable, status_of, trailing_metadata
from twostep.rpc.slots import ReadBounds, Slot, Slots, Unread

log = logging.getLogger(__name__)

# Status text travels in an HTTP/2 header, and clients refuse headers above 8 KiB.
_MAX_MESSAGE_CHARS = 2000
# For a whole message, however slow the line: 16 MiB at 5 Mbit/s.
MESSAGE_S = 30.0
# Probes show nothing: whether a process is well is said to anybody.
_OPEN = ("/grpc.health.v1.Health/",)
# These may stay for ever and cost little; there are so many at a time, apart from all others. What is read of the first comes from
# anybody, and is a few bytes.
_REFLECTION = "/grpc.reflection."
_MAX_ASIDE = 64
_READING_ASIDE = ReadBounds(of_caller=1, of_all=4, patience_s=0.03, own_patience_s=0.25)

_Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Sequence[tuple[str, str | bytes]]
# Given the full name of the method and the call's metadata, says whose call it is, "" if that is not known. Refuses it with a TwostepError.
Admit = Callable[[str, Metadata], str]


class Undecodable(Exception):
    """Takes a request's place between its deserializer and the guarded handler."""


class Guard(grpc.aio.ServerInterceptor):
    """Guards calls of one message, and streams of them (reflection) as well. It must be the innermost interceptor."""

    def __init__(self, max_calls: int, admit: Sequence[Admit] = ()) -> None:
        """All of `admit` are asked; the last that knows whose call it is says so."""
        self.slots = Slots(max_calls, ReadBounds())
        self._open = Slots(_MAX_ASIDE, _READING_ASIDE, all_give_way=True)
        self._reflection = Slots(_MAX_ASIDE, ReadBounds())
        self._unread = Unread()
        self._admit = admit
        self._calls: set[_Call] = set()

    def end_all(self) -> None:
        """The server goes: calls that are still running end with UNAVAILABLE, so that whoever made them asks elsewhere."""
        for call in list(self._calls):
            call.end(Unavailable("this server is stopping; repeat the request on another"))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = str(handler_call_details.method)
        caller = ""
        if not method.startswith(_OPEN):
            try:
                for admit in self._admit:
                    caller = admit(method, handler_call_details.invocation_metadata or ()) or caller
            except TwostepError as error:
                return grpc.stream_stream_rpc_method_handler(functools.partial(_refuse, error))
        handler = await continuation(handler_call_details)
        # None: an unknown method, which grpc answers with UNIMPLEMENTED.
        if handler is None:
            return handler
        slots = self._open if method.startswith(_OPEN) else self._reflection if method.startswith(_REFLECTION) else self.slots
        call = _Call(handler, slots, caller, calls=self._calls, unread=self._unread)
        # Not the call's own: gRPC's context keeps it, and the call keeps the context.
        decode = functools.partial(_decode, handler.request_deserializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                call.stream,
                request_deserializer=decode,
                response_serializer=handler.response_serializer,
            )
        return grpc.stream_unary_rpc_method_handler(
            call.answer,
            request_deserializer=decode,
            response_serializer=handler.response_serializer,
        )


class _Call:
    __slots__ = ("_caller", "_calls", "_context", "_ended", "_handler", "_reading", "_slots", "_task", "_unread")

    def __init__(self, handler: Any, slots: Slots, caller: str, *, calls: set[_Call], unread: Unread) -> None:
        self._handler = handler
        self._slots = slots
        self._caller = caller
        self._calls = calls
        self._unread = unread
        self._ended: TwostepError | None = None
        self._reading = False
        self._context: _Context
        self._task: asyncio.Task[Any]

    def end(self, error: TwostepError) -> None:
        if self._ended is not None:
            return
        self._ended = error
        if self._reading:
            # gRPC's core writes to what a cancelled task would have given back; once the call has a status, it stops reading by itself.
            _keep(asyncio.create_task(self._abort_reading(error)))
        else:
            self._task.cancel()

    # ---- handlers -----------------------------------------------------------------------------------------------------------

    async def answer(self, _messages: Any, context: _Context) -> Any:
        return await self._serve(context, self._answer)

    async def stream(self, messages: Any, context: _Context) -> None:
        await self._serve(context, functools.partial(self._stream, messages) if self._handler.request_streaming else self._stream_one)

    async def _serve(self, context: _Context, work: Callable[[Slot], Awaitable[Any]]) -> Any:
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._task, self._context = task, context
        try:
            place = self._slots.take(self, self._caller or context.peer())
            self._calls.add(self)
            try:
                return await work(place)
            finally:
                place.free()
                self._calls.discard(self)
        except asyncio.CancelledError:
            if self._ended is None or task.uncancel() > 0:
                raise  # the client is gone
            error: Exception = self._ended
        except Exception as raised:  # noqa: BLE001  # _abort logs whatever is not ours
            error = raised
        # Nothing is held here: whoever does not read is not told, and keeps nobody out.
        await _abort(error, context)

    async def _answer(self, place: Slot) -> Any:
        request = await self._request(place)
        answer = await self._handler.unary_unary(request, self._context)
        # gRPC sends it once this call has returned.
        num_bytes = answer.ByteSize() if isinstance(answer, Message) else 0
        self._unread.add(place.caller, num_bytes)
        # Nor does this know the call.
        sent: Any = functools.partial(_sent, self._unread, place.caller, num_bytes)
        self._context.add_done_callback(sent)
        return answer

    async def _stream_one(self, place: Slot) -> None:
        request = await self._request(place)
        await self._write(self._handler.unary_stream(request, self._context))

    async def _stream(self, messages: Any, place: Slot) -> None:
        # It may be reading at any time, and is never ended from here: see end().
        place.running()
        self._calls.discard(self)
        await self._write(self._handler.stream_stream(messages, self._context))

    async def _write(self, responses: AsyncGenerator[Any, None]) -> None:
        # Writing here, instead of being a generator too, makes a cancelled write close the handler's generator at
        # once: its `finally` frees what the call holds, and must not wait for the garbage collector.
        async with aclosing(responses):
            async for response in responses:
                await self._context.write(response)

    # ---- the message --------------------------------------------------------------------------------------------------------

    async def _request(self, place: Slot) -> Any:
        late = DeadlineExceeded(f"the call's message had not come after {MESSAGE_S:g} s; send it at once")
        timer = asyncio.get_running_loop().call_later(MESSAGE_S, self.end, late)
        try:
            await place.turn()
            self._reading = True
            try:
                request = await self._context.read()
            finally:
                self._reading = False
        finally:
            timer.cancel()
        if self._ended is not None:
            raise self._ended
        place.running()
        if request is grpc.aio.EOF:
            raise InvalidRequest("the call ended without its message; send one")
        if isinstance(request, Undecodable):
            raise InvalidRequest(f"the request is not a valid message ({request}); strings must be UTF-8, fields as in protos/")
        return request

    async def _abort_reading(self, error: TwostepError) -> None:
        # In one step with the call of grpc: the message may have come in the meantime.
        if self._reading:
            try:
                await self._context.abort(grpc.StatusCode[status_of(error).grpc], error.message, trailing_metadata(error))
            except grpc.aio.AbortError:
                pass  # as it says


def _decode(deserializer: Callable[[bytes], Any] | None, data: bytes) -> Any:
    try:
        return data if deserializer is None else deserializer(data)
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        return Undecodable(str(error))


def _sent(unread: Unread, caller: str, num_bytes: int, _context: _Context) -> None:
    unread.remove(caller, num_bytes)


async def _refuse(error: TwostepError, _messages: Any, context: _Context) -> None:
    await context.abort(grpc.StatusCode[status_of(error).grpc], error.message[:_MAX_MESSAGE_CHARS], trailing_metadata(error))


async def _abort(error: Exception, context: _Context) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if context.done():
        # Nobody is left to tell (a write to a client that went away ends up here).
        log.debug("call ended before its handler: %r", error)
        return
    behind: tuple[tuple[str, str | bytes], ...] = ()
    if isinstance(error, TwostepError):
        message, behind = error.message, trailing_metadata(error)
    else:
        reference = secrets.token_hex(4)
        log.error("unexpected error %s", reference, exc_info=error)
        message = f"internal error {reference}; look for this reference in the log of the process that answered"
    await context.abort(grpc.StatusCode[status_of(error).grpc], message[:_MAX_MESSAGE_CHARS], behind)


_kept: set[asyncio.Task[None]] = set()


def _keep(task: asyncio.Task[None]) -> None:
    _kept.add(task)
    task.add_done_callback(_kept.discard)
