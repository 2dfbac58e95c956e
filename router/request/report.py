"""A record of one request: its usage, the phases of its latency, how its KV cache travelled, how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from router.request.answer import AnswerReader
from router.request.job import Metadata, RequestJob
from twostep.metrics.router import RouterMetrics
from twostep.process.tracing import Span
from twostep.request_class import RequestClass
from twostep.rpc.v1 import decode_pb2, inference_pb2, prefill_pb2

# Refused ones are many where all workers are full.
_MAX_BEGUN = 32


@dataclass(slots=True, kw_only=True)
class RequestReport:
    """All instants are time.monotonic() seconds. What a later attempt learns replaces what an earlier one did, but the way to the first
    token of the answer stays that of the attempt that gave it. `metadata` goes along with every call to a worker: the caller's trace
    context, or that of the request's own span. `job` and `answer` are there as soon as the request has been read, `finished` once it has
    ended well."""

    started: float
    metrics: RouterMetrics
    request_class: RequestClass = RequestClass.STANDARD
    metadata: Metadata = ()
    span: Span | None = None
    job: RequestJob | None = None
    answer: AnswerReader | None = None
    finished: inference_pb2.End | None = None
    offered: bool = False  # it needs nothing but a worker: the deployment is scaled for it
    attempts: int = 1
    placed: bool = False  # workers have accepted it, once at least
    cached_tokens: int = 0
    route_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    publish_s: float = 0.0
    fetch_s: float = 0.0
    first_token_at: float | None = None
    visible_at: float | None = None  # the first text that is no reasoning
    committed_at: float | None = None
    first_decode_at: float | None = None
    last_decode_at: float | None = None
    # Of all attempts: what the client sees.
    last_token_at: float | None = None
    has_second_token: bool = False
    transfer: inference_pb2.Transfer = field(default_factory=inference_pb2.Transfer)
    # Of each attempt, refused ones included: when it began, and its workers (prefill "": the decode worker alone).
    begun: list[tuple[float, str, str]] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self.job is None else len(self.job.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer that this router gave."""
        return 0 if self.answer is None else self.answer.num_tokens - (0 if self.job is None else len(self.job.resumed))

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.started

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first that this router gave; None: there was none."""
        more = self.num_output_tokens - 1
        if self.first_token_at is None or self.last_token_at is None or more < 1:
            return None
        return (self.last_token_at - self.first_token_at) / more

    def begin_attempt(self, prefill_worker: str, decode_worker: str) -> None:
        self.committed_at = self.first_decode_at = self.last_decode_at = None
        self.publish_s = self.fetch_s = 0.0
        self.transfer = inference_pb2.Transfer(prefill_worker=prefill_worker, decode_worker=decode_worker)
        if len(self.begun) < _MAX_BEGUN:
            self.begun.append((time.monotonic(), prefill_worker, decode_worker))

    def on_first_token(self, first: prefill_pb2.FirstToken, accepted_at: float) -> None:
        if self.first_token_at is not None:
            return
        self.first_token_at = now = time.monotonic()
        self.metrics.ttft.observe(now - self.started)
        if self.last_token_at is None:
            self.last_token_at = now
        self.route_s = accepted_at - self.started
        self.queue_s, self.prefill_s = first.queue_s, first.prefill_s
        self.cached_tokens = min(first.cached_tokens, self.num_prompt_tokens)

    def on_piece(self, piece: inference_pb2.Piece) -> None:
        """The client is about to be sent it."""
        if piece.text and self.visible_at is None:
            self.visible_at = time.monotonic()
        self.metrics.num_generation_tokens += len(piece.token_ids)

    def on_computed_here(self) -> None:
        """The decode worker has computed the prompt: nothing is published, nothing fetched."""
        self.committed_at = time.monotonic()
        self.transfer.transport = "none"

    def on_committed(self, committed: decode_pb2.Committed) -> None:
        self.committed_at = time.monotonic()
        self.transfer.transport = committed.transport
        self.transfer.bytes, self.transfer.chunks = committed.bytes, committed.chunks
        self.transfer.blocks_moved, self.transfer.blocks_reused = committed.blocks_moved, committed.blocks_reused
        self.fetch_s = committed.fetch_s

    def on_decode_token(self) -> None:
        """Called for every token of every request: keep it short."""
        now = self.last_decode_at = time.monotonic()
        if self.last_token_at is not None:
            self.metrics.itl.observe(now - self.last_token_at)
        self.last_token_at = now
        if self.first_decode_at is None:
            self.first_decode_at = now
            if self.first_token_at is not None and not self.has_second_token:
                self.has_second_token = True
                self.metrics.second_token.observe(now - self.first_token_at)

    def on_prefill_done(self, done: prefill_pb2.PrefillDone) -> None:
        self.publish_s = done.publish_s

    def end(self, answer: AnswerReader, reason: inference_pb2.FinishReason.ValueType, stop_reason: str) -> inference_pb2.End:
        """Makes the last message of the stream, and keeps it."""
        phases = inference_pb2.Phases(
            route_s=self.route_s,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            publish_s=self.publish_s,
            fetch_s=self.fetch_s,
            first_decode_s=_between(self.committed_at, self.first_decode_at),
            decode_s=_between(self.first_decode_at, self.last_decode_at),
            ttft_s=_between(self.started, self.first_token_at),
            total_s=time.monotonic() - self.started,
            visible_ttft_s=_between(self.started, self.visible_at),
        )
        usage = inference_pb2.Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=answer.num_tokens,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=answer.num_reasoning_tokens,
        )
        self.finished = inference_pb2.End(
            finish_reason=reason, stop_reason=stop_reason, usage=usage, phases=phases, transfer=self.transfer, attempts=self.attempts
        )
        return self.finished


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(0.0, end - start)
