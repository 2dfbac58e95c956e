"""Fake workers for benchmarks of the router: prefill workers whose first token takes a set time, decode workers that send all tokens of
a step in one message, as real ones do, at a set pace. Steps are put together of parts that are encoded once, so that one process can feed
many routers. On command they hold their tokens back until all streams have begun.

    router_workers.py DIRECTORY STEP_S PREFILL_S NAME...      one process of the fake workers NAME..., p0 or d7
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from redis.asyncio import Redis
from router_helper import obey
from router_place import HASH_UNIT, SECRET, RigFiles

from decode_worker.reservations import ReservationCalls
from twostep.checkpoint.fingerprint import dummy_fingerprint
from twostep.cluster.records import WORKERS_KEY, LayoutRecord, WorkerRecord, worker_key
from twostep.cluster.signed import RECORDS, Signer
from twostep.keys.secret import secret_check
from twostep.rpc import event_loop
from twostep.rpc.server import GrpcServer, ServerConfig
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, kv_pb2, prefill_pb2, prefill_pb2_grpc

_TTL_S = 4.0
# Tag of the field, which is length-delimited.
_EVENTS_TAG = bytes((decode_pb2.StepEvents.EVENTS_FIELD_NUMBER << 3 | 2,))

AttemptId = tuple[str, int]


def token_at(answer: Sequence[int], position: int, max_tokens: int) -> prefill_pb2.Token:
    token = prefill_pb2.Token(token_id=answer[position % len(answer)], position=position)
    if position + 1 >= max_tokens:
        token.finish_reason = inference_pb2.FINISH_REASON_LENGTH
    return token


def framed(event: bytes) -> bytes:
    """Returns an encoded DecodeEvent as an element of StepEvents.events; elements one after the other are StepEvents."""
    size = len(event)
    assert size < 1 << 14, "an event of one token is short"
    return (_EVENTS_TAG + (bytes((size,)) if size < 128 else bytes((size & 127 | 128, size >> 7)))) + event


class TokenEvents:
    """Encoded events with one token. Protobuf joins messages by joining their bytes: attempt and token are encoded apart, and the token at
    a position is the same to all."""

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer
        self._tokens: list[bytes] = []

    @staticmethod
    def attempt(attempt: AttemptId) -> bytes:
        return decode_pb2.DecodeEvent(request_id=attempt[0], attempt=attempt[1]).SerializeToString()

    def event(self, attempt: bytes, position: int, max_tokens: int) -> bytes:
        """Returns an element of StepEvents.events. `attempt`: what the method of that name returned."""
        if position + 1 >= max_tokens:
            return framed(attempt + self._encoded(position, max_tokens))
        while position >= len(self._tokens):
            self._tokens.append(self._encoded(len(self._tokens), 1 << 30))
        return framed(attempt + self._tokens[position])

    def _encoded(self, position: int, max_tokens: int) -> bytes:
        return decode_pb2.DecodeEvent(token=token_at(self._answer, position, max_tokens)).SerializeToString()


class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    async def Embed(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[prefill_pb2.EmbedEvent]:
        yield prefill_pb2.EmbedEvent(accepted=prefill_pb2.EmbedAccepted())
        yield prefill_pb2.EmbedEvent(pooled=prefill_pb2.PooledStates(values=bytes(16)))

    def __init__(self, name: str, answer: Sequence[int], prefill_s: float) -> None:
        self._name, self._answer, self._prefill_s = name, answer, prefill_s

    async def Run(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        began = time.monotonic()
        ticket = kv_pb2.Ticket(worker_id=self._name, request_id=request.request_id, attempt=request.attempt)
        yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.PrefillAccepted(ticket=ticket))
        if self._prefill_s:
            await asyncio.sleep(self._prefill_s)
        token = token_at(self._answer, 0, request.sampling.max_tokens)
        took = time.monotonic() - began
        yield prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(token=token, prefill_s=took))
        yield prefill_pb2.PrefillEvent(done=prefill_pb2.PrefillDone(state=kv_pb2.LEASE_STATE_RELEASED, transport="local"))


class FakeDecode(decode_pb2_grpc.DecodeServicer):
    """Steps of `step_s`, each one message to every router that has sequences here; none while `held`."""

    def __init__(self, answer: Sequence[int], step_s: float, epoch: int) -> None:
        self._events, self._step_s, self._epoch = TokenEvents(answer), step_s, epoch
        self._reserved: dict[AttemptId, decode_pb2.ReserveRequest] = {}
        # By router; of an attempt its encoded name, its next position and how many tokens it is to have.
        self._running: dict[str, dict[AttemptId, tuple[bytes, int, int]]] = {}
        self._outboxes: dict[str, asyncio.Queue[bytes]] = {}
        self.held = False
        self._num_steps = 0

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """As the generated function does, but for the stream: its messages are encoded already."""
        unary: Callable[..., Any] = grpc.unary_unary_rpc_method_handler
        handlers = {
            "Reserve": unary(self.Reserve, decode_pb2.ReserveRequest.FromString, decode_pb2.ReserveResponse.SerializeToString),
            "Attach": unary(self.Attach, decode_pb2.AttachRequest.FromString, decode_pb2.AttachResponse.SerializeToString),
            "Cancel": unary(self.Cancel, decode_pb2.CancelRequest.FromString, decode_pb2.CancelResponse.SerializeToString),
            "Reservations": grpc.stream_stream_rpc_method_handler(
                self.Reservations, decode_pb2.ReservationCall.FromString, decode_pb2.ReservationAnswer.SerializeToString
            ),
            "Stream": grpc.unary_stream_rpc_method_handler(self.Stream, decode_pb2.StreamRequest.FromString, None),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("twostep.v1.Decode", handlers),))

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        self._reserved[request.request_id, request.attempt] = request
        return decode_pb2.ReserveResponse(lease_s=5.0, epoch=self._epoch)

    async def Reservations(
        self, calls: AsyncIterator[decode_pb2.ReservationCall], context: Any
    ) -> AsyncIterator[decode_pb2.ReservationAnswer]:
        async for answer in ReservationCalls(lambda request, _: self.Reserve(request, None), self._cancel).answers(calls):
            yield answer

    async def Attach(self, request: decode_pb2.AttachRequest, context: Any) -> decode_pb2.AttachResponse:
        attempt = (request.request_id, request.attempt)
        reserved = self._reserved.pop(attempt)
        committed = decode_pb2.DecodeEvent(
            request_id=attempt[0], attempt=attempt[1], committed=decode_pb2.Committed(transport="local", bytes=4096, chunks=1)
        )
        self._outboxes[reserved.router_id].put_nowait(framed(committed.SerializeToString()))
        running = self._running.setdefault(reserved.router_id, {})
        running[attempt] = (self._events.attempt(attempt), 1, reserved.sampling.max_tokens)
        return decode_pb2.AttachResponse()

    async def Cancel(self, request: decode_pb2.CancelRequest, context: Any) -> decode_pb2.CancelResponse:
        return decode_pb2.CancelResponse(found=await self._cancel(request.request_id, request.attempt))

    async def _cancel(self, request_id: str, number: int) -> bool:
        attempt = (request_id, number)
        found = [running.pop(attempt, None) for running in self._running.values()]
        return self._reserved.pop(attempt, None) is not None or any(found)

    async def Stream(self, request: decode_pb2.StreamRequest, context: Any) -> AsyncIterator[Any]:
        outbox = self._outboxes[request.router_id] = asyncio.Queue()
        await context.send_initial_metadata(())
        while True:
            yield await outbox.get()

    async def steps(self) -> None:
        due = time.monotonic()
        while True:
            self._num_steps += 1
            record = decode_pb2.StepRecord(step=self._num_steps, ended_s=due, duration_s=self._step_s, decodes=1)
            message = decode_pb2.StepEvents(step=record.step, steps=[record], sent_s=time.monotonic()).SerializeToString()
            for router_id, running in self._running.items():
                if running and not self.held:
                    self._outboxes[router_id].put_nowait(self._step(running) + message)
            due = max(due + self._step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def _step(self, running: dict[AttemptId, tuple[bytes, int, int]]) -> bytes:
        event, events = self._events.event, []
        for attempt, (name, position, max_tokens) in list(running.items()):
            events.append(event(name, position, max_tokens))
            if position + 1 < max_tokens:
                running[attempt] = (name, position + 1, max_tokens)
            else:
                del running[attempt]
        return b"".join(events)


async def serve(place: RigFiles, step_s: float, prefill_s: float, names: Sequence[str]) -> None:
    answer, epoch = place.answer(), time.time_ns() // 1000
    records: list[WorkerRecord] = []
    tasks: list[asyncio.Task[None]] = []
    servers: list[GrpcServer] = []
    decodes: list[FakeDecode] = []
    layout = LayoutRecord(
        model_fingerprint=dummy_fingerprint(place.model), dtype="float32", block_size=16, num_layers=2, num_kv_heads=2, head_dim=8
    )
    for name in names:
        server = GrpcServer(ServerConfig(max_concurrent_rpcs=8192, health_port=-1))
        if name.startswith("p"):
            prefill = FakePrefill(name, answer, prefill_s)
            server.add(prefill, prefill_pb2_grpc.add_PrefillServicer_to_server, "twostep.v1.Prefill")
        else:
            decode = FakeDecode(answer, step_s, epoch)
            server.add(decode, FakeDecode.add_to_server, "twostep.v1.Decode")
            decodes.append(decode)
            tasks.append(asyncio.create_task(decode.steps()))
        port = await server.start()
        servers.append(server)
        records.append(
            WorkerRecord(
                worker_id=name,
                role="prefill" if name.startswith("p") else "decode",
                address=f"127.0.0.1:{port}",
                epoch=epoch,
                model="m",
                layout=layout,
                hash_unit=HASH_UNIT,
                secret_check=secret_check(SECRET),
                num_blocks=1 << 20,
                max_num_seqs=8192,
                max_model_len=32768,
                step_tokens=1 << 20,
                transports=("local",),
            )
        )

    async def hold(held: bool) -> None:
        for decode in decodes:
            decode.held = held

    tasks.append(asyncio.create_task(_heartbeat(place.redis_url, records)))
    await obey({"hold": hold}, tasks)


async def _heartbeat(redis_url: str, records: Sequence[WorkerRecord]) -> None:
    redis = Redis.from_url(redis_url)
    while True:
        async with redis.pipeline(transaction=False) as pipe:
            for record in records:
                pipe.set(worker_key(record.worker_id), Signer(SECRET, RECORDS).sign_object(record.to_json()), px=int(1e3 * _TTL_S))
                pipe.sadd(WORKERS_KEY, record.worker_id)
            await pipe.execute()
        await asyncio.sleep(_TTL_S / 4)


if __name__ == "__main__":
    _directory, _step_s, _prefill_s, *_names = sys.argv[1:]
    event_loop.run(serve(RigFiles(Path(_directory)), float(_step_s), float(_prefill_s), _names))
