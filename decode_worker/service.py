"""The decode worker's edge: Decode for routers.

The life of a request here:

 1. Reserve   by a call, or over the stream Reservations (decode_worker.reservations), sets blocks aside for the prompt, and says how many
              of the prefix's are here already: those are shared by reference and not moved again. The prefill worker may have begun with
              the prompt; the router gives that up if there is no room.
 2. Attach    brings the prefill worker's ticket, usually while the prompt is still queued there. The answer comes at once; from here on
              everything comes on the router's stream.
 3. fetch     in the background (decode_worker.pull): watch the prefill worker, tell it what is here already, pull each chunk as it
              becomes ready, verify it, write it into the reserved blocks.
 4. commit    only once all of it is here and verified: engine.commit, Acknowledge COMMITTED, a Committed event.
 5. steps     continuous batching; all tokens of one step, or of several where sending is slower, go to a router in one message on its one
              stream, buffered within bounds.
 6. end       the token with a finish reason; or DecodeFailed; or Cancel, after which nothing is sent. The blocks are free by then.

With prefill_here, Reserve queues the prompt instead: the engine computes it in chunks of its step budget, between the others' tokens, and
FirstToken on the stream stands for 2 to 4. A prompt that waits holds no blocks; more than --max-waiting of them are refused.

A stream that broke is opened again within the router's lease, from where it had got for each request: the events since then are sent
again out of their histories (decode_worker.outbox), which outlive their sequences for the length of that lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from decode_worker.reservations import ReservationCalls
from decode_worker.sequences import Sequences
from decode_worker.tracing import SequenceSpans
from kv_transfer.ticket import Ticket
from twostep.engine.types import EngineRequest
from twostep.errors import ResourceExhausted, Unavailable
from twostep.process.log import concerning
from twostep.process.tracing import Metadata, metadata_of, trace_id_of
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc
from twostep.worker.requests import RequestReader

# How long a reservation waits for batch sequences that give way to it.
_GIVING_WAY_S = 0.5

_Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(self, sequences: Sequences, reader: RequestReader, spans: SequenceSpans | None = None, *, epoch: int) -> None:
        """`spans` None: nothing is traced."""
        self._sequences = sequences
        self._spans = spans
        self._reader = reader
        self._epoch = epoch
        self._reservations: set[ReservationCalls] = set()
        # Why no new work is taken, for callers; None while it is.
        self.refusal: str | None = None

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: _Context) -> decode_pb2.ReserveResponse:
        return await self._reserved(request, metadata_of(context))

    async def Reservations(
        self, calls: AsyncIterator[decode_pb2.ReservationCall], context: _Context
    ) -> AsyncIterator[decode_pb2.ReservationAnswer]:
        """See decode_worker.reservations."""
        reservations = ReservationCalls(self._reserved, self._sequences.cancel)
        self._reservations.add(reservations)
        try:
            async with aclosing(reservations.answers(calls)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self._reservations.discard(reservations)

    def close(self) -> None:
        """Ends the streams of reservations."""
        for reservations in self._reservations:
            reservations.close()

    async def _reserved(self, request: decode_pb2.ReserveRequest, metadata: Metadata) -> decode_pb2.ReserveResponse:
        if self.refusal is not None:
            raise Unavailable(self.refusal)
        concerning(request.request_id, trace_id_of(metadata))
        engine_request = await self._reader.read(request)
        if self.refusal is not None:
            raise Unavailable(self.refusal)
        asked_at = time.monotonic()
        num_cached_tokens = await self._reserve(request, engine_request)
        span = None if self._spans is None else self._spans.begin(request.request_id, request.attempt, metadata, at=asked_at)
        self._sequences.trace(request.request_id, request.attempt, span, metadata)
        return decode_pb2.ReserveResponse(
            num_cached_tokens=num_cached_tokens,
            lease_s=self._sequences.config.reservation_lease_s,
            epoch=self._epoch,
        )

    async def _reserve(self, request: decode_pb2.ReserveRequest, engine_request: EngineRequest) -> int:
        """Waits a step or two where batch sequences give way for it."""
        until = time.monotonic() + _GIVING_WAY_S
        while True:
            try:
                return await self._sequences.reserve(
                    engine_request,
                    request_id=request.request_id,
                    attempt=request.attempt,
                    router_id=request.router_id,
                    tenant=request.tenant,
                    prefill_here=request.prefill_here,
                )
            except ResourceExhausted as error:
                if error.retry_after_s is None or time.monotonic() + error.retry_after_s > until:
                    raise
                await asyncio.sleep(error.retry_after_s)
            if self.refusal is not None:
                raise Unavailable(self.refusal)

    async def Attach(self, request: decode_pb2.AttachRequest, context: _Context) -> decode_pb2.AttachResponse:
        concerning(request.request_id, trace_id_of(metadata_of(context)))
        self._sequences.attach(request.request_id, request.attempt, Ticket.from_proto(request.ticket))
        return decode_pb2.AttachResponse()

    async def Cancel(self, request: decode_pb2.CancelRequest, context: _Context) -> decode_pb2.CancelResponse:
        concerning(request.request_id, trace_id_of(metadata_of(context)))
        return decode_pb2.CancelResponse(found=await self._sequences.cancel(request.request_id, request.attempt))

    async def Stream(self, request: decode_pb2.StreamRequest, context: _Context) -> AsyncIterator[decode_pb2.StepEvents]:
        """Sends a router its tokens. Initial metadata is sent as soon as the stream is the router's one; what the router has missed comes
        first."""
        outbox, connection = self._sequences.connect(request.router_id, request.positions)
        try:
            await context.send_initial_metadata(())
            while (message := await outbox.next(connection)) is not None:
                yield message
        finally:
            outbox.disconnect(connection)
