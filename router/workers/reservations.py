"""Reserve calls to one decode worker, over a stream that stays open beside that of its tokens. A call of its own takes three times as long
to get there; it is what is left where there is no stream: a worker may not know it."""

from __future__ import annotations

import asyncio
import itertools
import logging

import grpc
import grpc.aio

from router.request.job import Metadata
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc

log = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 5.0

_Call = grpc.aio.StreamStreamCall[decode_pb2.ReservationCall, decode_pb2.ReservationAnswer]
_Calls = asyncio.Queue[decode_pb2.ReservationCall]


class ReserveRefused(Exception):
    """The worker does not reserve, or is not there. `code`: a gRPC status code's name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Reservations:
    """begin() whenever the worker's token stream is open; ask() at any time. A stream that has broken is not missed before the next
    begin()."""

    def __init__(self, stub: decode_pb2_grpc.DecodeAsyncStub) -> None:
        self._stub = stub
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[decode_pb2.ReserveResponse]] = {}
        # To be sent; None: there is no stream.
        self._calls: _Calls | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Opens the stream, unless it is."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Refuses whoever waits with UNAVAILABLE. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def ask(self, request: decode_pb2.ReserveRequest, *, timeout: float, metadata: Metadata) -> decode_pb2.ReserveResponse:
        """Raises ReserveRefused, and AioRpcError where there is no stream. Who is cancelled, or late, leaves nothing there."""
        calls = self._calls
        if calls is None:
            response: decode_pb2.ReserveResponse = await self._stub.Reserve(request, timeout=timeout, metadata=metadata)
            return response
        number = next(self._numbers)
        answered: asyncio.Future[decode_pb2.ReserveResponse] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        calls.put_nowait(decode_pb2.ReservationCall(number=number, reserve=request, metadata=dict(metadata)))
        try:
            async with asyncio.timeout(timeout):
                return await answered
        except (TimeoutError, asyncio.CancelledError) as error:
            attempt = decode_pb2.CancelRequest(request_id=request.request_id, attempt=request.attempt)
            calls.put_nowait(decode_pb2.ReservationCall(number=number, cancel=attempt))
            if isinstance(error, TimeoutError):
                raise ReserveRefused("DEADLINE_EXCEEDED", "it does not answer") from error
            raise
        finally:
            self._waiting.pop(number, None)

    async def _run(self) -> None:
        call = self._stub.Reservations()
        calls: _Calls = asyncio.Queue()
        sending = asyncio.create_task(_send(call, calls))
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                if not isinstance(await call.read(), decode_pb2.ReservationAnswer):
                    return
            self._calls = calls
            while isinstance(answer := await call.read(), decode_pb2.ReservationAnswer):
                self._take(answer)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, TimeoutError) as error:
            log.debug("no stream of reservations: %s", error)
        finally:
            self._calls = None
            sending.cancel()
            call.cancel()
            for answered in self._waiting.values():
                if not answered.done():
                    answered.set_exception(ReserveRefused("UNAVAILABLE", "its connection was closed"))

    def _take(self, answer: decode_pb2.ReservationAnswer) -> None:
        answered = self._waiting.get(answer.number)
        if answered is None or answered.done():
            return
        if answer.HasField("reserved"):
            answered.set_result(answer.reserved)
        else:
            answered.set_exception(ReserveRefused(answer.refused.code, answer.refused.message))


async def _send(call: _Call, calls: _Calls) -> None:
    """Until it is cancelled, or the call has ended. One after the other: a write that is cancelled ends the call."""
    try:
        while True:
            await call.write(await calls.get())
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        log.debug("reservations are not sent any more: %s", error)
