"""The prefill worker's span of an attempt: as long as its Run call, with the times of the engine's steps.

queue      until a step begins with the prompt
compute    until the first token
publish    from the first final block to the last chunk published (kv_transfer/tracing.py)
"""

from __future__ import annotations

from kv_transfer.tracing import TransferSpans
from prefill_worker.job import Job
from twostep.process.tracing import Attributes, Metadata, Span, Tracer


class JobSpans:
    """Of one edge."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.transfers = TransferSpans()

    def begin(self, job: Job, metadata: Metadata) -> Span:
        """`metadata`: of the call that brought it."""
        span = self._tracer.start("prefill_worker", metadata, at=job.submitted_at)
        self.transfers.open(job.seq_id, span)
        return span

    def end(self, job: Job, span: Span) -> None:
        """The call is over; its publisher may still be on its way out."""
        _tell(job, span)
        if job.publisher is not None and not job.publisher.done():
            job.publisher.add_done_callback(lambda _: self.transfers.close(job.seq_id))
        else:
            self.transfers.close(job.seq_id)


def _tell(job: Job, span: Span) -> None:
    request_id, _, attempt = job.seq_id.rpartition("/")
    if span.recording:
        found: dict[str, str | int | float | bool] = {
            "twostep.request_id": request_id,
            "twostep.attempt": int(attempt),
            "twostep.prompt_tokens": len(job.request.token_ids),
            "twostep.cached_tokens": job.num_cached_tokens,
            "twostep.lease": job.lease.state.name.lower(),
        }
        span.set(found)
        if job.queue_s or job.first_token is not None:
            started = job.submitted_at + job.queue_s
            span.child("queue", job.submitted_at, started)
            if job.first_token is not None:
                cached: Attributes = {"twostep.computed_tokens": len(job.request.token_ids) - job.num_cached_tokens}
                span.child("compute", started, started + job.prefill_s, cached)
    span.end(failure="" if job.error is None else type(job.error).__name__)
