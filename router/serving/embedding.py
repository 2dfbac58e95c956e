"""One attempt at an embedding: one call to one prefill worker, which computes the prompt and keeps nothing of it.

begin     Prefill.Embed up to Accepted. Raises WorkerRefused: try another placement
finish    waits for the vector. Raises AttemptFailed if the worker is lost before
close     ends the call, which frees whatever the worker still holds
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc.aio

from router.request.job import RequestJob
from router.request.report import RequestReport
from router.request.vector import VectorOutput
from router.serving.worker_calls import (
    ACCEPT_TIMEOUT_S,
    RETRYABLE,
    AttemptFailed,
    CallFailed,
    WorkerRefused,
    call_errors,
    client_error,
    refusal_of,
)
from router.workers.pool import WorkerLink
from router.workers.prefix_index import WorkerLife
from twostep.errors import InternalError, TwostepError, Unavailable
from twostep.rpc.convert import class_to_proto, pooling_to_proto, sampling_to_proto
from twostep.rpc.v1 import prefill_pb2


class EmbeddingAttempt:
    def __init__(
        self,
        job: RequestJob,
        number: int,
        *,
        worker: WorkerLink,
        output: VectorOutput,
        report: RequestReport,
        on_computed: Callable[[], None],
    ) -> None:
        """`on_computed`: it has left the worker's queue."""
        self._job, self._number = job, number
        self._worker = worker
        self._output, self._report = output, report
        self._on_computed = on_computed
        self._queued_tokens = 0
        self._accepted_at = 0.0
        self._call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.EmbedEvent] | None = None
        worker.users.add(self)

    async def begin(self, cached_tokens: int) -> None:
        """`cached_tokens`: what the worker is thought to have of the prompt, for the count of its queue. Raises WorkerRefused, or what is
        wrong with the request."""
        job, worker = self._job, self._worker
        assert job.pooling is not None, "it is one for an embedding"
        self._queued_tokens = max(1, len(job.prompt) - cached_tokens)
        worker.queue(self._queued_tokens, job.request_class)
        request = prefill_pb2.PrefillRequest(
            request_id=job.request_id,
            attempt=self._number,
            token_ids=job.prompt,
            num_prompt_tokens=len(job.prompt),
            sampling=sampling_to_proto(job.sampling),
            tenant=job.tenant,
            cache_salt=job.cache_salt,
            request_class=class_to_proto(job.request_class),
            pooling=pooling_to_proto(job.pooling),
        )
        try:
            with call_errors():
                self._call = worker.prefill.Embed(request, timeout=job.remaining_s(), metadata=job.metadata)
                async with asyncio.timeout(min(ACCEPT_TIMEOUT_S, job.remaining_s())):
                    event = await self._call.read()
        except TimeoutError:
            raise WorkerRefused(worker.life, Unavailable(f"prefill worker {worker.record.worker_id} does not answer")) from None
        except CallFailed as error:
            raise refusal_of(worker, error) from error
        if not isinstance(event, prefill_pb2.EmbedEvent) or not event.HasField("accepted"):
            raise WorkerRefused(worker.life, InternalError(f"prefill worker {worker.record.worker_id} did not say that it accepts"))
        worker.touch()
        self._accepted_at = time.monotonic()

    async def finish(self) -> None:
        assert self._call is not None, "it has begun"
        worker = self._worker
        try:
            with call_errors():
                event = await self._call.read()
        except CallFailed as error:
            message = f"{worker.record.role} worker {worker.record.worker_id}: {error.details}"
            raise AttemptFailed(worker.life, client_error(error.code, message), retryable=error.code in RETRYABLE) from error
        if not isinstance(event, prefill_pb2.EmbedEvent) or not event.HasField("pooled"):
            message = f"{worker.record.role} worker {worker.record.worker_id} closed the call without a vector"
            raise AttemptFailed(worker.life, Unavailable(message), retryable=True)
        worker.touch()
        self._unqueue()
        self._on_computed()
        self._report.on_pooled(event.pooled, self._accepted_at)
        self._output.push(event.pooled)

    def close(self) -> None:
        """Ends it on the worker. Called once, whatever happened before."""
        self._unqueue()
        self._worker.users.discard(self)
        if self._call is not None:
            self._call.cancel()

    def on_worker_lost(self, life: WorkerLife, error: TwostepError) -> None:
        """See router.workers.pool.LinkUser. Who waits for the call learns of its end."""
        if self._call is not None:
            self._call.cancel()

    def _unqueue(self) -> None:
        if self._queued_tokens:
            self._worker.queue(-self._queued_tokens, self._job.request_class)
            self._queued_tokens = 0
