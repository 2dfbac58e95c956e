"""Hand-overs in traces: each is a part of the span of the request that its worker has open."""

from __future__ import annotations

import time

from kv_transfer.observer import Transfer
from kv_transfer.transfer_metrics import attributes
from twostep.process.tracing import Span

# Of the span itself, or in the part's name.
_KNOWN = frozenset({"request", "direction", "failure"})


class TransferSpans:
    """Open spans by the engine's name of the sequence; as many as their worker has sequences. It is the Tracer of
    kv_transfer.transfer_metrics."""

    def __init__(self) -> None:
        self._spans: dict[str, Span] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def open(self, seq_id: str, span: Span) -> None:
        self._spans[seq_id] = span

    def close(self, seq_id: str) -> None:
        """Nothing more is told of it. Idempotent."""
        self._spans.pop(seq_id, None)

    def __call__(self, transfer: Transfer) -> None:
        """It has ended now."""
        span = self._spans.get(transfer.request_id)
        if span is None or not span.recording:
            return
        now = time.monotonic()
        told = {f"twostep.{name}": value for name, value in attributes(transfer).items() if name not in _KNOWN}
        span.child(transfer.direction.value, now - transfer.total_s, now, told, failure=transfer.failure)
