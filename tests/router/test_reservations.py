"""Tests of Reserve over one stream: a router's end and a worker's, over gRPC as they are served. Each call gets its own answer, and whoever
stops waiting leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from decode_worker.reservations import ReservationCalls
from router.request.job import Metadata
from router.workers.reservations import Reservations, ReserveRefused
from twostep.errors import ResourceExhausted
from twostep.rpc.channel import open_channel
from twostep.rpc.server import GrpcServer, ServerConfig
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc

Request, Response = decode_pb2.ReserveRequest, decode_pb2.ReserveResponse
WAIT_S = 30.0


class Worker(decode_pb2_grpc.DecodeServicer):
    """Reserves as it is told, by the name of the request. `held`: attempts that have blocks."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[], Awaitable[Response]]] = {}
        self.seen: list[tuple[str, Metadata]] = []
        self.held: set[str] = set()
        self.cancelled: list[str] = []
        self.changed = asyncio.Condition()
        self.num_calls = self.num_streams = 0

    async def Reserve(self, request: Request, context: Any) -> Response:
        self.num_calls += 1
        return await self.reserve(request, ())

    async def Reservations(self, calls: Any, context: Any) -> AsyncIterator[decode_pb2.ReservationAnswer]:
        self.num_streams += 1
        async for answer in ReservationCalls(self.reserve, self.cancel).answers(calls):
            yield answer

    async def reserve(self, request: Request, metadata: Metadata) -> Response:
        await self._note(lambda: self.seen.append((request.request_id, metadata)))
        try:
            response = await self.answers[request.request_id]()
        except asyncio.CancelledError:
            await self._note(lambda: self.cancelled.append(request.request_id))
            raise
        self.held.add(request.request_id)
        return response

    async def cancel(self, request_id: str, attempt: int) -> bool:
        await self._note(lambda: self.held.discard(request_id))
        return True

    async def _note(self, change: Callable[[], object]) -> None:
        async with self.changed:
            change()
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(condition)


class OldWorker(decode_pb2_grpc.DecodeServicer):
    """One that does not know the stream."""

    async def Reserve(self, request: Request, context: Any) -> Response:
        return Response(epoch=7)


async def _at_once() -> Response:
    return Response(num_cached_tokens=16, epoch=7)


async def _never() -> Response:
    await asyncio.Event().wait()
    raise AssertionError


async def _full() -> Response:
    raise ResourceExhausted("no free blocks")


async def _broken() -> Response:
    raise ValueError("a bug")


@asynccontextmanager
async def served(worker: decode_pb2_grpc.DecodeServicer) -> AsyncIterator[Reservations]:
    server = GrpcServer(ServerConfig(health_port=-1))
    server.add(worker, decode_pb2_grpc.add_DecodeServicer_to_server, "twostep.v1.Decode")
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        reservations = Reservations(decode_pb2_grpc.DecodeStub(channel))
        yield reservations
        await reservations.close()
    await server.drain(0.0)


async def ask(reservations: Reservations, name: str, timeout: float = WAIT_S) -> Response:
    return await reservations.ask(Request(request_id=name, attempt=1), timeout=timeout, metadata=(("traceparent", name),))


async def opened(reservations: Reservations, worker: Worker) -> None:
    """Returns once calls go over the stream."""
    reservations.begin()
    worker.answers["probe"] = _at_once
    async with asyncio.timeout(WAIT_S):
        while True:
            before = worker.num_calls
            await ask(reservations, "probe")
            if worker.num_calls == before:
                break
    worker.seen.clear()
    worker.held.clear()


async def test_each_call_gets_its_own_answer_in_whatever_order_they_come() -> None:
    worker = Worker()
    async with served(worker) as reservations:
        await opened(reservations, worker)
        gate = asyncio.Event()

        async def slow() -> Response:
            await gate.wait()
            return Response(num_cached_tokens=1)

        worker.answers |= {"slow": slow, "quick": _at_once, "full": _full, "broken": _broken}
        slow_one = asyncio.create_task(ask(reservations, "slow"))
        assert (await ask(reservations, "quick")).num_cached_tokens == 16
        for name, code in (("full", "RESOURCE_EXHAUSTED"), ("broken", "INTERNAL")):
            with pytest.raises(ReserveRefused) as refused:
                await ask(reservations, name)
            assert refused.value.code == code
        assert not slow_one.done()
        gate.set()
        assert (await slow_one).num_cached_tokens == 1
        assert dict(worker.seen)["quick"] == (("traceparent", "quick"),), "the caller's trace context comes along"
        assert worker.num_streams == 1


async def test_who_is_cancelled_or_late_leaves_nothing_there() -> None:
    worker = Worker()
    async with served(worker) as reservations:
        await opened(reservations, worker)
        worker.answers |= {"cancelled": _never, "late": _never}
        asking = asyncio.create_task(ask(reservations, "cancelled"))
        await worker.until(lambda: bool(worker.seen))
        asking.cancel()
        await worker.until(lambda: worker.cancelled == ["cancelled"])
        with pytest.raises(ReserveRefused) as refused:
            await ask(reservations, "late", timeout=0.01)
        assert refused.value.code == "DEADLINE_EXCEEDED"
        await worker.until(lambda: worker.cancelled == ["cancelled", "late"])
        assert worker.held == set()


async def test_what_was_reserved_when_nobody_waits_any_more_is_freed() -> None:
    """The answer and the word that nobody waits cross on the way."""
    worker = Worker()
    worker.answers["r"] = _at_once
    calls: asyncio.Queue[decode_pb2.ReservationCall | None] = asyncio.Queue()

    async def coming() -> AsyncIterator[decode_pb2.ReservationCall]:
        while (call := await calls.get()) is not None:
            yield call

    answers = ReservationCalls(worker.reserve, worker.cancel).answers(coming())
    assert not (await anext(answers)).number, "it is there"
    calls.put_nowait(decode_pb2.ReservationCall(number=1, reserve=Request(request_id="r", attempt=1)))
    assert (await anext(answers)).reserved.num_cached_tokens == 16
    assert worker.held == {"r"}
    calls.put_nowait(decode_pb2.ReservationCall(number=1, cancel=decode_pb2.CancelRequest(request_id="r", attempt=1)))
    await worker.until(lambda: not worker.held)
    calls.put_nowait(None)
    with pytest.raises(StopAsyncIteration):
        await anext(answers)


async def test_the_end_of_the_stream_refuses_who_waits_and_cancels_what_runs() -> None:
    worker = Worker()
    async with served(worker) as reservations:
        await opened(reservations, worker)
        worker.answers |= {"r": _never, "again": _at_once}
        asking = asyncio.create_task(ask(reservations, "r"))
        await worker.until(lambda: bool(worker.seen))
        await reservations.close()
        with pytest.raises(ReserveRefused) as refused:
            await asking
        assert refused.value.code == "UNAVAILABLE"
        await worker.until(lambda: worker.cancelled == ["r"])
        assert (await ask(reservations, "again")).epoch == 7, "by a call of its own"
        await opened(reservations, worker)
        assert worker.num_streams == 2


async def test_a_worker_that_does_not_know_the_stream_is_called() -> None:
    async with served(OldWorker()) as reservations:
        reservations.begin()
        for _ in range(3):
            assert (await ask(reservations, "r")).epoch == 7


async def test_a_worker_that_is_not_there_is_an_error() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        reservations = Reservations(decode_pb2_grpc.DecodeStub(channel))
        reservations.begin()
        with pytest.raises((grpc.aio.AioRpcError, ReserveRefused)):
            await ask(reservations, "r")
        await reservations.close()
