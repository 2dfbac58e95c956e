"""The prefill worker's edge: Prefill for routers, Kv for decode workers.

The life of a request for an answer here (one for an embedding is 1 and 3, without a lease, and the vector is its end):

 1. Run       checks the request, queues the prompt (engine.submit, hold) and opens a lease; Accepted carries the ticket, at once,
              so that the router can attach the decode worker while the prompt is still queued. The decode worker may not have been
              asked yet whether it takes the request: the end of the call is all that is heard if it does not.
 2. Watch     the decode worker asks what is published, says what it holds already, and which transports work between the two: the first
              Watch decides which blocks are published, by which one (prefill_worker.publisher), and in which form
              (prefill_worker.encoder). Manifest now, chunks as they become ready.
 3. steps     the engine computes the prompt in chunks of its token budget; blocks that have become final are published while the
              next ones are computed (prefill_worker.hand_over).
 4. first     log probabilities of the prompt, if they are asked for, leave as they are computed. The step that ends the prompt samples
              the first token: FirstToken leaves at once and never waits for the publishing. If it ends the request, the lease is
              aborted: there is nothing to hand over.
 5. published the last chunk is out: Watch ends with Complete. What was copied out is done with: the blocks go back to the
              pool (and stay findable as cached prefix). What is read where it lies stays until the lease ends.
 6. end       Acknowledge (COMMITTED or ABORTED), the end of the Run call, or the lease's expiry ends the lease; the published objects are
              dropped, once; Done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from kv_transfer.lease import Abort, Commit, FetchProgress
from kv_transfer.telemetry import TransferSpans
from kv_transfer.ticket import ProbePass, Ticket, layout_to_proto
from prefill_worker.embeddings import Embedder, Embedding, encode_vector
from prefill_worker.hand_over import MAX_LIFE_S, HandOvers
from prefill_worker.publisher import HandOver
from twostep.engine.types import EngineRequest
from twostep.errors import InvalidRequest, Unavailable
from twostep.pooling import Pooling
from twostep.process.log import concerning
from twostep.process.tracing import Attributes, Metadata, Span, Tracer, metadata_of, trace_id_of
from twostep.rpc.convert import pooling_from_proto
from twostep.rpc.v1 import kv_pb2, kv_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from twostep.worker.requests import RequestReader, scores_to_proto, token_to_proto

_Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, hand_overs: HandOvers, embeddings: Embedder, reader: RequestReader, spans: HandOverSpans | None = None) -> None:
        """`spans` None: nothing is traced."""
        self._hand_overs = hand_overs
        self._embeddings = embeddings
        self._reader = reader
        self._spans = spans
        # Why no new work is taken, for callers; None while it is.
        self.refusal: str | None = None
        self.num_running = 0

    async def Run(self, request: prefill_pb2.PrefillRequest, context: _Context) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        engine_request, metadata = await self._read(request, context, None)
        life_s = context.time_remaining()
        hand_over = await self._hand_overs.open(
            engine_request,
            num_decode_cached_tokens=request.num_decode_cached_tokens,
            life_s=MAX_LIFE_S if life_s is None else max(0.0, life_s),
            tenant=request.tenant,
        )
        self.num_running += 1
        span = None if self._spans is None else self._spans.begin(hand_over, metadata)
        try:
            yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.PrefillAccepted(ticket=hand_over.ticket.to_proto()))
            while hand_over.scores or (hand_over.first_token is None and not hand_over.lease.state.ended):
                if not hand_over.scores:
                    await hand_over.wait_change()
                    continue
                for part in scores_to_proto(hand_over.scores.popleft()):
                    yield prefill_pb2.PrefillEvent(prompt_logprobs=part)
            if hand_over.first_token is None:
                raise hand_over.error or Unavailable(f"the hand-over ended before the first token ({hand_over.lease.reason}); try again")
            first_token = prefill_pb2.FirstToken(
                token=token_to_proto(hand_over.first_token),
                cached_tokens=hand_over.num_cached_tokens,
                queue_s=hand_over.queue_s,
                prefill_s=hand_over.prefill_s,
            )
            yield prefill_pb2.PrefillEvent(first_token=first_token)
            while not hand_over.lease.finished:
                await hand_over.wait_change()
            done = prefill_pb2.PrefillDone(
                state=kv_pb2.LeaseState.ValueType(hand_over.lease.state),
                transport=hand_over.transport.name if hand_over.transport is not None else "",
                bytes=hand_over.num_bytes,
                chunks=len(hand_over.published),
                blocks=hand_over.published_blocks,
                publish_s=hand_over.publish_s,
            )
            yield prefill_pb2.PrefillEvent(done=done)
        finally:
            self.num_running -= 1
            self._hand_overs.abort(hand_over, "the router ended the call")
            if self._spans is not None and span is not None:
                self._spans.end(hand_over, span)

    async def Embed(self, request: prefill_pb2.PrefillRequest, context: _Context) -> AsyncIterator[prefill_pb2.EmbedEvent]:
        params = pooling_from_proto(request.pooling)
        engine_request, metadata = await self._read(request, context, params.kind)
        self.num_running += 1
        try:
            async with self._embeddings.queued(engine_request) as embedding:
                span = None if self._spans is None else self._spans.begin_embedding(embedding, metadata)
                try:
                    yield prefill_pb2.EmbedEvent(accepted=prefill_pb2.EmbedAccepted())
                    vector = await embedding.pooled
                finally:
                    if span is not None:
                        _end_span(embedding, span)
            pooled = prefill_pb2.PooledStates(
                values=encode_vector(vector, params),
                cached_tokens=embedding.num_cached_tokens,
                queue_s=embedding.queue_s,
                prefill_s=embedding.prefill_s,
            )
            yield prefill_pb2.EmbedEvent(pooled=pooled)
        finally:
            self.num_running -= 1

    async def _read(
        self, request: prefill_pb2.PrefillRequest, context: _Context, pooling: Pooling | None
    ) -> tuple[EngineRequest, Metadata]:
        """Raises Unavailable if no new work is taken, and InvalidRequest."""
        if self.refusal is not None:
            raise Unavailable(self.refusal)
        metadata = metadata_of(context)
        concerning(request.request_id, trace_id_of(metadata))
        engine_request = await self._reader.read(request, pooling=pooling)
        if self.refusal is not None:
            raise Unavailable(self.refusal)
        return engine_request, metadata


class KvService(kv_pb2_grpc.KvServicer):
    def __init__(self, hand_overs: HandOvers) -> None:
        self._hand_overs = hand_overs

    async def Watch(self, request: kv_pb2.WatchRequest, context: _Context) -> AsyncIterator[kv_pb2.WatchEvent]:
        concerning(request.ticket.request_id, trace_id_of(metadata_of(context)))
        hand_over = self._hand_overs.find(Ticket.from_proto(request.ticket))
        layout = self._hand_overs.layout
        cached = request.num_cached_tokens if request.HasField("num_cached_tokens") else None
        transport = self._hand_overs.watched(hand_over, request.transports, request.wire, num_cached_tokens=cached)
        yield kv_pb2.WatchEvent(
            manifest=kv_pb2.Manifest(
                layout=layout_to_proto(layout),
                transport=transport.name,
                endpoint=transport.endpoint,
                first_block=hand_over.first_block,
                num_blocks=hand_over.wanted_blocks,
                checksum=transport.checksum_name,
                wire=hand_over.wire,
            )
        )
        num_sent = 0
        while True:
            for chunk in hand_over.published[num_sent:]:
                yield kv_pb2.WatchEvent(
                    chunk=kv_pb2.Chunk(
                        index=chunk.index,
                        first_layer=chunk.first_layer,
                        num_layers=chunk.num_layers or layout.num_layers,
                        first_block=chunk.first_block,
                        num_blocks=chunk.num_blocks,
                        num_bytes=chunk.num_bytes,
                        checksum=chunk.checksum,
                        source_blocks=chunk.source_blocks,
                        generations=chunk.generations,
                    )
                )
                num_sent += 1
            if hand_over.lease.state.ended:
                raise self._hand_overs.ended_error(hand_over)
            if hand_over.first_token is not None and hand_over.lease.num_chunks == num_sent:
                output_ids, publish_s = [hand_over.first_token.token_id], hand_over.publish_s
                yield kv_pb2.WatchEvent(complete=kv_pb2.Complete(num_chunks=num_sent, output_ids=output_ids, publish_s=publish_s))
                return
            self._hand_overs.renew(hand_over)
            if num_sent == len(hand_over.published):
                await hand_over.wait_change(self._hand_overs.lease_ttl_s / 3)

    async def Probe(self, request: kv_pb2.ProbeRequest, context: _Context) -> kv_pb2.ProbeResponse:
        return kv_pb2.ProbeResponse(
            paths=[
                kv_pb2.ProbeResponse.Path(transport=transport.name, endpoint=transport.endpoint)
                for transport in self._hand_overs.probed(ProbePass.from_proto(request))
            ]
        )

    async def Acknowledge(self, request: kv_pb2.AcknowledgeRequest, context: _Context) -> kv_pb2.AcknowledgeResponse:
        concerning(request.ticket.request_id, trace_id_of(metadata_of(context)))
        event: FetchProgress | Commit | Abort
        match request.outcome:
            case kv_pb2.AcknowledgeRequest.OUTCOME_PROGRESS:
                event = FetchProgress()
            case kv_pb2.AcknowledgeRequest.OUTCOME_COMMITTED:
                event = Commit(reader=request.reader, source_blocks=tuple(request.source_blocks), generations=tuple(request.generations))
            case kv_pb2.AcknowledgeRequest.OUTCOME_ABORTED:
                event = Abort(request.reason[:200] or "aborted by the decode worker")
            case other:
                raise InvalidRequest(f"outcome is {other}; give PROGRESS, COMMITTED or ABORTED")
        answer = await self._hand_overs.acknowledge(Ticket.from_proto(request.ticket), event)
        return kv_pb2.AcknowledgeResponse(state=kv_pb2.LeaseState.ValueType(answer.state), refusal=answer.refusal)


class _Computed(Protocol):
    """An attempt at a prompt: a HandOver or an Embedding."""

    @property
    def request(self) -> EngineRequest: ...
    @property
    def submitted_at(self) -> float: ...
    @property
    def queue_s(self) -> float: ...
    @property
    def prefill_s(self) -> float: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def computed(self) -> bool: ...
    @property
    def error(self) -> BaseException | None: ...


class HandOverSpans:
    """Opens the span of an attempt: as long as its call, with the times of the engine's steps.

    queue      until a step begins with the prompt
    compute    until the first token, or the vector
    publish    from the first final block to the last chunk published (kv_transfer/telemetry.py)
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.transfers = TransferSpans()

    def begin(self, hand_over: HandOver, metadata: Metadata) -> Span:
        """`metadata`: of the call that brought it."""
        span = self._tracer.start("prefill_worker", metadata, at=hand_over.submitted_at)
        self.transfers.open(hand_over.seq_id, span)
        return span

    def begin_embedding(self, embedding: Embedding, metadata: Metadata) -> Span:
        return self._tracer.start("prefill_worker", metadata, at=embedding.submitted_at)

    def end(self, hand_over: HandOver, span: Span) -> None:
        """Ends the span: the call is over; its publisher may still be on its way out."""
        if span.recording:
            span.set({"twostep.lease": hand_over.lease.state.name.lower()})
        _end_span(hand_over, span)
        if hand_over.publisher is not None and not hand_over.publisher.done():
            hand_over.publisher.add_done_callback(lambda _: self.transfers.close(hand_over.seq_id))
        else:
            self.transfers.close(hand_over.seq_id)


def _end_span(work: _Computed, span: Span) -> None:
    request_id, _, attempt = work.request.seq_id.rpartition("/")
    if span.recording:
        found: dict[str, str | int | float | bool] = {
            "twostep.request_id": request_id,
            "twostep.attempt": int(attempt),
            "twostep.prompt_tokens": len(work.request.token_ids),
            "twostep.cached_tokens": work.num_cached_tokens,
        }
        span.set(found)
        if work.queue_s or work.computed:
            started = work.submitted_at + work.queue_s
            span.child("queue", work.submitted_at, started)
            if work.computed:
                cached: Attributes = {"twostep.computed_tokens": len(work.request.token_ids) - work.num_cached_tokens}
                span.child("compute", started, started + work.prefill_s, cached)
    span.end(failure="" if work.error is None else type(work.error).__name__)
