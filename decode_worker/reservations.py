"""Reserve calls that come over one stream: each is a task, answered when it is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine

from twostep.errors import InternalError, ResourceExhausted, TwostepError, status_of
from twostep.process.tracing import Metadata, context_of
from twostep.rpc.v1 import decode_pb2

log = logging.getLogger(__name__)

# At once, of one router; it has fewer requests in flight.
_MAX_RUNNING = 2048

Reserve = Callable[[decode_pb2.ReserveRequest, Metadata], Awaitable[decode_pb2.ReserveResponse]]
Cancel = Callable[[str, int], Awaitable[bool]]


class ReservationCalls:
    """The calls of one stream."""

    def __init__(self, reserve: Reserve, cancel: Cancel) -> None:
        """`cancel` frees what an attempt holds, if there is anything."""
        self._reserve, self._cancel = reserve, cancel
        # None: no more will come.
        self._answers: asyncio.Queue[decode_pb2.ReservationAnswer | None] = asyncio.Queue()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def answers(self, calls: AsyncIterator[decode_pb2.ReservationCall]) -> AsyncGenerator[decode_pb2.ReservationAnswer, None]:
        """Yields them until the calls end, behind one that says that calls are taken. What is not answered then is cancelled."""
        # It ends with the stream, and not before: gRPC's core writes to what a cancelled task would have given back.
        self._spawn(self._read(calls))
        try:
            yield decode_pb2.ReservationAnswer()
            while (answer := await self._answers.get()) is not None:
                yield answer
        finally:
            for task in self._running.values():
                task.cancel()

    def close(self) -> None:
        """Ends the stream."""
        self._answers.put_nowait(None)

    async def _read(self, calls: AsyncIterator[decode_pb2.ReservationCall]) -> None:
        try:
            async for call in calls:
                if call.HasField("cancel"):
                    self._spawn(self._free(self._running.get(call.number), call.cancel))
                elif len(self._running) >= _MAX_RUNNING:
                    self._refuse(call.number, ResourceExhausted(f"{_MAX_RUNNING} reservations are under way; use another worker"))
                else:
                    self._running[call.number] = self._spawn(self._answer(call))
        finally:
            self.close()

    async def _answer(self, call: decode_pb2.ReservationCall) -> None:
        try:
            reserved = await self._reserve(call.reserve, context_of(tuple(call.metadata.items())))
            self._answers.put_nowait(decode_pb2.ReservationAnswer(number=call.number, reserved=reserved))
        except TwostepError as error:
            self._refuse(call.number, error)
        except Exception as error:
            log.exception("a reservation failed")
            self._refuse(call.number, InternalError(f"{error!r}; see the worker's log"))
        finally:
            del self._running[call.number]

    def _refuse(self, number: int, error: TwostepError) -> None:
        refused = decode_pb2.ReservationRefused(code=status_of(error).grpc, message=error.message)
        self._answers.put_nowait(decode_pb2.ReservationAnswer(number=number, refused=refused))

    async def _free(self, running: asyncio.Task[None] | None, attempt: decode_pb2.CancelRequest) -> None:
        if running is not None:
            running.cancel()
            await asyncio.wait((running,))
        await self._cancel(attempt.request_id, attempt.attempt)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a stream of reservations ended: %r", error)
