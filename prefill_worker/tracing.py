"""The prefill worker's span of an attempt: as long as its Run call, with the times of the engine's steps.

queue      until a step begins with the prompt
compute    until the first token
publish    from the first final block to the last chunk published (kv_transfer/telemetry.py)
"""

from __future__ import annotations

from kv_transfer.telemetry import TransferSpans
from prefill_worker.publisher import HandOver
from twostep.process.tracing import Attributes, Metadata, Span, Tracer


class HandOverSpans:
    """Opens the spans of one prefill worker."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.transfers = TransferSpans()

    def begin(self, hand_over: HandOver, metadata: Metadata) -> Span:
        """`metadata`: of the call that brought it."""
        span = self._tracer.start("prefill_worker", metadata, at=hand_over.submitted_at)
        self.transfers.open(hand_over.seq_id, span)
        return span

    def end(self, hand_over: HandOver, span: Span) -> None:
        """The call is over; its publisher may still be on its way out."""
        _tell(hand_over, span)
        if hand_over.publisher is not None and not hand_over.publisher.done():
            hand_over.publisher.add_done_callback(lambda _: self.transfers.close(hand_over.seq_id))
        else:
            self.transfers.close(hand_over.seq_id)


def _tell(hand_over: HandOver, span: Span) -> None:
    request_id, _, attempt = hand_over.seq_id.rpartition("/")
    if span.recording:
        found: dict[str, str | int | float | bool] = {
            "twostep.request_id": request_id,
            "twostep.attempt": int(attempt),
            "twostep.prompt_tokens": len(hand_over.request.token_ids),
            "twostep.cached_tokens": hand_over.num_cached_tokens,
            "twostep.lease": hand_over.lease.state.name.lower(),
        }
        span.set(found)
        if hand_over.queue_s or hand_over.first_token is not None:
            started = hand_over.submitted_at + hand_over.queue_s
            span.child("queue", hand_over.submitted_at, started)
            if hand_over.first_token is not None:
                cached: Attributes = {"twostep.computed_tokens": len(hand_over.request.token_ids) - hand_over.num_cached_tokens}
                span.child("compute", started, started + hand_over.prefill_s, cached)
    span.end(failure="" if hand_over.error is None else type(hand_over.error).__name__)
