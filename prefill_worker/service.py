"""The prefill worker's edge: Prefill for routers, Kv for decode workers.

The life of a request here:

 1. Run       checks the request, queues the prompt (engine.submit, hold) and opens a lease; Accepted carries the ticket, at once,
              so that the router can attach the decode worker while the prompt is still queued.
 2. Watch     the decode worker asks what is published, and says which transports work between the two: the first Watch decides by which
              one (prefill_worker.outlet), and in which form (prefill_worker.encoder). Manifest now, chunks as they become ready.
 3. steps     the engine computes the prompt in chunks of its token budget; blocks that have become final are published while the
              next ones are computed (prefill_worker.hand_over).
 4. first     the step that ends the prompt samples the first token: FirstToken leaves at once and never waits for the publishing.
              If it ends the request, the lease is aborted: there is nothing to hand over.
 5. published the last chunk is out: Watch ends with Complete. What was copied out is in nobody's way any more: the blocks go back to the
              pool (and stay findable as cached prefix). What is read where it lies stays until the lease ends.
 6. end       Acknowledge (COMMITTED or ABORTED), the end of the Run call, or the lease's expiry ends the lease; the published objects are
              dropped, once; Done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from kv_transfer import layout as kv_layout
from kv_transfer.lease import Abort, Commit, FetchProgress
from kv_transfer.probing import ProbePass
from kv_transfer.ticket import Ticket
from prefill_worker.hand_over import HandOvers
from prefill_worker.job import Job
from prefill_worker.tracing import JobSpans
from twostep.errors import InvalidRequest, Unavailable
from twostep.process.log import concerning
from twostep.process.tracing import metadata_of, trace_id_of
from twostep.rpc.v1 import kv_pb2, kv_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from twostep.worker.requests import RequestReader, token_to_proto

_Context = grpc.aio.ServicerContext[Any, Any]


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, hand_overs: HandOvers, reader: RequestReader, spans: JobSpans | None = None) -> None:
        """`spans` None: nothing is traced."""
        self._hand_overs = hand_overs
        self._reader = reader
        self._spans = spans
        # Set when no new work is taken: what callers are told.
        self.refusal: str | None = None
        self.num_running = 0

    async def Run(self, request: prefill_pb2.PrefillRequest, context: _Context) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        if self.refusal is not None:
            raise Unavailable(self.refusal)
        metadata = metadata_of(context)
        concerning(request.request_id, trace_id_of(metadata))
        engine_request = await self._reader.read(request)
        if self.refusal is not None:
            raise Unavailable(self.refusal)
        life_s = context.time_remaining()
        job = self._hand_overs.open(
            engine_request,
            num_decode_cached_tokens=request.num_decode_cached_tokens,
            life_s=self._hand_overs.config.max_life_s if life_s is None else max(0.0, life_s),
            tenant=request.tenant,
        )
        self.num_running += 1
        span = None if self._spans is None else self._spans.begin(job, metadata)
        try:
            yield prefill_pb2.PrefillEvent(accepted=prefill_pb2.PrefillAccepted(ticket=job.ticket.to_proto()))
            while job.first_token is None and not job.lease.state.ended:
                await job.wait_change()
            if job.first_token is None:
                raise job.error or Unavailable(f"the hand-over ended before the first token ({job.lease.reason}); try again")
            yield prefill_pb2.PrefillEvent(first_token=_first_token(job))
            while not job.lease.finished:
                await job.wait_change()
            yield prefill_pb2.PrefillEvent(done=self._done(job))
        finally:
            self.num_running -= 1
            self._hand_overs.abort(job, "the router ended the call")
            if self._spans is not None and span is not None:
                self._spans.end(job, span)

    def _done(self, job: Job) -> prefill_pb2.PrefillDone:
        return prefill_pb2.PrefillDone(
            state=kv_pb2.LeaseState.ValueType(job.lease.state),
            transport=job.outlet.name if job.outlet is not None else "",
            bytes=job.num_bytes,
            chunks=len(job.published),
            blocks=job.published_blocks,
            publish_s=job.publish_s,
        )


def _first_token(job: Job) -> prefill_pb2.FirstToken:
    assert job.first_token is not None
    return prefill_pb2.FirstToken(
        token=token_to_proto(job.first_token), cached_tokens=job.num_cached_tokens, queue_s=job.queue_s, prefill_s=job.prefill_s
    )


class KvService(kv_pb2_grpc.KvServicer):
    def __init__(self, hand_overs: HandOvers) -> None:
        self._hand_overs = hand_overs

    async def Watch(self, request: kv_pb2.WatchRequest, context: _Context) -> AsyncIterator[kv_pb2.WatchEvent]:
        concerning(request.ticket.request_id, trace_id_of(metadata_of(context)))
        job = self._hand_overs.find(Ticket.from_proto(request.ticket))
        config = self._hand_overs.config
        transport = self._hand_overs.watched(job, request.transports, request.wire)
        yield kv_pb2.WatchEvent(
            manifest=kv_pb2.Manifest(
                layout=kv_layout.layout_to_proto(config.layout),
                transport=transport.name,
                endpoint=transport.endpoint,
                first_block=job.first_block,
                num_blocks=job.wanted_blocks,
                checksum=transport.checksum_name,
                wire=job.wire,
            )
        )
        num_sent = 0
        while True:
            for chunk in job.published[num_sent:]:
                yield kv_pb2.WatchEvent(
                    chunk=kv_pb2.Chunk(
                        index=chunk.index,
                        first_layer=chunk.first_layer,
                        num_layers=chunk.num_layers or config.layout.num_layers,
                        first_block=chunk.first_block,
                        num_blocks=chunk.num_blocks,
                        num_bytes=chunk.num_bytes,
                        checksum=chunk.checksum,
                        source_blocks=chunk.source_blocks,
                        generations=chunk.generations,
                    )
                )
                num_sent += 1
            if job.lease.state.ended:
                raise self._hand_overs.ended_error(job)
            if job.first_token is not None and job.lease.num_chunks == num_sent:
                yield kv_pb2.WatchEvent(complete=kv_pb2.Complete(num_chunks=num_sent, output_ids=[job.first_token.token_id]))
                return
            self._hand_overs.renew(job)
            if num_sent == len(job.published):
                await job.wait_change(config.lease_ttl_s / 3)

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
        answer = self._hand_overs.acknowledge(Ticket.from_proto(request.ticket), event)
        return kv_pb2.AcknowledgeResponse(state=kv_pb2.LeaseState.ValueType(answer.state), refusal=answer.refusal)
