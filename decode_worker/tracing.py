"""The decode worker's span of an attempt: from asking for its blocks until nothing of it is left, with the times of the engine's steps.

reserved   blocks are set aside, and no ticket has come yet
fetch      from the manifest to the last block in place (kv_transfer/telemetry.py)
queue      of a prompt computed here: until a step begins with it
prefill    and until its first token
decode     until the last token
"""

from __future__ import annotations

import time

from kv_transfer.telemetry import TransferSpans
from twostep.process.tracing import Metadata, Span, Tracer
from twostep.worker.requests import attempt_id

CANCELLED = "cancelled"


class SequenceSpans:
    """Opens the spans of one decode worker."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.transfers = TransferSpans()

    def begin(self, request_id: str, attempt: int, metadata: Metadata, *, at: float) -> SequenceSpan:
        """`metadata` is that of the call that brought it; `at` is when it asked for blocks, in monotonic seconds."""
        span = self._tracer.start("decode_worker", metadata, at=at)
        if span.recording:
            span.set({"twostep.request_id": request_id, "twostep.attempt": attempt})
        return SequenceSpan(span, self.transfers, attempt_id(request_id, attempt))


class SequenceSpan:
    """The span of one sequence. A token costs an addition."""

    __slots__ = ("_begun_at", "_decoding_at", "_num_tokens", "_seq_id", "_span", "_transfers", "metadata")

    def __init__(self, span: Span, transfers: TransferSpans, seq_id: str) -> None:
        self._span, self._transfers, self._seq_id = span, transfers, seq_id
        # Of calls made for it.
        self.metadata = span.metadata
        self._begun_at = time.monotonic()
        self._decoding_at: float | None = None
        self._num_tokens = 0
        transfers.open(seq_id, span)

    def attached(self) -> None:
        """Notes that the ticket is here."""
        self._span.child("reserved", self._begun_at, time.monotonic())

    def committed(self) -> None:
        """Notes that the KV is here, and it decodes."""
        self._decoding_at = time.monotonic()

    def computed(self, submitted_at: float, started_at: float, num_cached_tokens: int) -> None:
        """Notes that the prompt was computed here; its first token is counted by `token`."""
        self._decoding_at = now = time.monotonic()
        self._span.child("queue", submitted_at, started_at)
        self._span.child("prefill", started_at, now, {"twostep.cached_tokens": num_cached_tokens})

    def token(self) -> None:
        self._num_tokens += 1

    def end(self, reason: str = "") -> None:
        """Notes that nothing of it is left. `reason` says why if it was not its last token; routers cancel what a stop string has ended."""
        now = time.monotonic()
        if self._decoding_at is not None:
            self._span.child("decode", self._decoding_at, now, {"gen_ai.usage.output_tokens": self._num_tokens})
        if reason:
            self._span.set({"twostep.ended": reason})
        self._span.end(at=now, failure="" if reason == CANCELLED else reason)
        self._transfers.close(self._seq_id)
