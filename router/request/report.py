"""A record of one request: its usage, the phases of its latency, how its KV cache travelled, how it ended. And what it leaves behind,
however that was: metrics, its part in the deployment's demand, its id in every line of the log meanwhile, its span if it is traced.

A span has parts, made at its end from what was recorded: nothing is traced while tokens flow. The names of attributes are OpenTelemetry's
(semantic conventions for generative AI, of 2025); those that it has no word for begin with `twostep.`. Prompts, answers, stop strings and
keys are none of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from router.placing.placement import Placement
from router.request.answer import AnswerReader
from router.request.gaps import LongestGaps, StepTimes, gap_between, gap_of_hand_over
from router.request.job import Metadata, RequestJob
from router.request.targets import Expired, Reason, Refused
from twostep.errors import status_of
from twostep.metrics.router import RouterMetrics
from twostep.process.log import concerning
from twostep.process.tracing import Attributes, Span, Tracer, trace_id_of
from twostep.request_class import RequestClass
from twostep.rpc.convert import class_from_proto
from twostep.rpc.v1 import decode_pb2, inference_pb2, prefill_pb2

_FINISH = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "stop",
}
_MAX_MODEL_CHARS = 128
# By OpenTelemetry's conventions for servers of RPC: whatever else a request ends with is its client's doing.
_OUR_FAULT = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
# Refused ones are many where all workers are full.
_MAX_BEGUN = 32


# Why no worker ever began, if it was refused; whether its client left.
OnEnd = Callable[["RequestReport", Reason | None, bool], None]


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
    request_id: str = ""  # as the workers have it
    status: str = ""  # how it ended, as a gRPC status; empty: it has not
    attempts: int = 1
    placed: bool = False  # workers have accepted it, once at least
    placement: Placement | None = None  # of its last attempt, accepted or not
    placed_at: float = 0.0  # when that was decided
    cached_tokens: int = 0
    waited_s: float = 0.0  # in queues of this router, so far
    wait_s: float = 0.0  # what of route_s was that
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
    gaps: LongestGaps = field(default_factory=LongestGaps)
    steps: StepTimes | None = None  # that gave the last token
    has_second_token: bool = False
    transfer: inference_pb2.Transfer = field(default_factory=inference_pb2.Transfer)
    # Of each attempt, refused ones included: when it began, and its workers (prefill "": the decode worker alone).
    begun: list[tuple[float, str, str]] = field(default_factory=list)

    @property
    def class_name(self) -> str:
        return self.request_class.name.lower()

    @property
    def embeds(self) -> bool:
        """Returns whether it was read, and is one for an embedding."""
        return self.job is not None and self.job.pooling is not None

    @property
    def num_prompt_tokens(self) -> int:
        """Returns how many there are as the client counts them."""
        return 0 if self.job is None else len(self.job.prompt) - self.job.num_added

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer that this router gave."""
        return 0 if self.answer is None else self.answer.num_tokens - (0 if self.job is None else len(self.job.resumed))

    @property
    def longest_gap_s(self) -> float:
        return self.gaps.longest_s

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

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surrounds a wait in one of this router's queues."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began

    def begin_attempt(self, placement: Placement) -> None:
        """Notes a new attempt. Called before its workers are asked: tokens may come before they have answered."""
        self.placement, self.placed_at = placement, time.monotonic()
        prefill_worker = "" if placement.prefill is None else placement.prefill.worker_id
        decode_worker = placement.decode.worker_id
        if self.embeds:
            prefill_worker, decode_worker = decode_worker, ""
        self.committed_at = self.first_decode_at = self.last_decode_at = self.steps = None
        self.publish_s = self.fetch_s = 0.0
        self.transfer = inference_pb2.Transfer(prefill_worker=prefill_worker, decode_worker=decode_worker)
        if len(self.begun) < _MAX_BEGUN:
            self.begun.append((self.placed_at, prefill_worker, decode_worker))

    def on_first_token(self, first: prefill_pb2.FirstToken, accepted_at: float) -> None:
        now = time.monotonic()
        if self.first_token_at is not None:
            self._migrated(first.token.position, now)
            return
        self.metrics.ttft.observe(now - self.started)
        self._computed(first, accepted_at, now)

    def on_pooled(self, pooled: prefill_pb2.PooledStates, accepted_at: float) -> None:
        """Notes that the vector is here: what a first token is to others."""
        self._computed(pooled, accepted_at, time.monotonic())

    def _computed(self, first: prefill_pb2.FirstToken | prefill_pb2.PooledStates, accepted_at: float, now: float) -> None:
        self.first_token_at = now
        self.observe_prediction("ttft", now - self.placed_at)
        if self.last_token_at is None:
            self.last_token_at = now
        # The first token may have overtaken what says that it was accepted.
        accepted_at = min(accepted_at, now - first.queue_s - first.prefill_s)
        self.route_s, self.wait_s = max(0.0, accepted_at - self.started), self.waited_s
        self.queue_s, self.prefill_s = first.queue_s, first.prefill_s
        self.cached_tokens = min(first.cached_tokens, self.num_prompt_tokens)

    def observe_prediction(self, kind: str, took_s: float) -> None:
        """`kind`: ttft or tpot. Of workers that have not measured themselves nothing was predicted that could be wrong."""
        placed = self.placement
        predicted_s: float = getattr(placed, f"predicted_{kind}_s", 0.0)
        if placed is not None and placed.computing.curve is not None and placed.decode.curve is not None and predicted_s > 0:
            self.metrics.prediction.labels(kind, placed.path).observe(took_s / predicted_s)

    def on_piece(self, piece: inference_pb2.Piece) -> None:
        """Notes that the client is about to be sent it."""
        if piece.text and self.visible_at is None:
            self.visible_at = time.monotonic()
        self.metrics.num_generation_tokens += len(piece.token_ids)

    def on_computed_here(self, steps: StepTimes | None) -> None:
        """Notes that the decode worker has computed the prompt: nothing is published, nothing fetched."""
        self.committed_at = time.monotonic()
        self.transfer.transport, self.steps = "none", steps

    def on_committed(self, committed: decode_pb2.Committed) -> None:
        self.committed_at = time.monotonic()
        self.transfer.transport = committed.transport
        self.transfer.bytes, self.transfer.chunks = committed.bytes, committed.chunks
        self.transfer.blocks_moved, self.transfer.blocks_reused = committed.blocks_moved, committed.blocks_reused
        self.fetch_s = committed.fetch_s

    def on_decode_token(self, position: int, steps: StepTimes | None) -> None:
        """Notes when a token came. Called for every token of every request: keep it short."""
        now = self.last_decode_at = time.monotonic()
        # Between tokens of one step there is no gap.
        of_one_step = steps is not None and steps is self.steps and steps.step == steps.last_step
        if self.last_token_at is not None and not of_one_step:
            gap_s = now - self.last_token_at
            self.metrics.itl.observe(gap_s)
            if gap_s > self.gaps.least_s:
                self._keep_gap(position, gap_s, steps)
        self.last_token_at, self.steps = now, steps
        if self.first_decode_at is None:
            self.first_decode_at = now
            if self.first_token_at is not None and not self.has_second_token:
                self.has_second_token = True
                self.metrics.second_token.observe(now - self.first_token_at)

    def _keep_gap(self, position: int, gap_s: float, steps: StepTimes | None) -> None:
        if self.first_decode_at is None and self.transfer.transport != "none":
            hand_over_s = gap_s if self.committed_at is None else max(0.0, self.committed_at - (self.last_token_at or 0.0))
            self.gaps.keep(gap_s, partial(gap_of_hand_over, position, gap_s, hand_over_s, steps))
        else:
            self.gaps.keep(gap_s, partial(gap_between, position, gap_s, self.steps, steps))

    def _migrated(self, position: int, now: float) -> None:
        """Notes another attempt's first token: the answer goes on."""
        gap_s = now - (self.last_token_at or now)
        self.metrics.itl.observe(gap_s)
        if gap_s > self.gaps.least_s:
            self.gaps.keep(gap_s, partial(inference_pb2.Gap, position=position, gap_s=gap_s, migration_s=gap_s))
        self.last_token_at = now

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
            wait_s=self.wait_s,
        )
        usage = inference_pb2.Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=answer.num_tokens,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=answer.num_reasoning_tokens,
        )
        self.finished = inference_pb2.End(
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=usage,
            phases=phases,
            transfer=self.transfer,
            attempts=self.attempts,
            gaps=self.gaps.in_order(),
        )
        return self.finished


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else max(0.0, end - start)


# ---- what it leaves behind -----------------------------------------------------------------------------------------------


@contextmanager
def recorded(
    metrics: RouterMetrics,
    request: inference_pb2.GenerateRequest,
    metadata: Metadata,
    tracer: Tracer | None,
    *,
    received: float,
    model: str,
    on_end: OnEnd,
    embeds: bool = False,
) -> Iterator[RequestReport]:
    """Surrounds all of a request, which came at `received` (time.monotonic()); `metadata` is its caller's trace context."""
    operation = "embeddings" if embeds else "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
    span = None if tracer is None else _begin_span(tracer, operation, request, metadata, received, model)
    report = RequestReport(
        started=received,
        metrics=metrics,
        request_class=class_from_proto(request.request_class),
        gaps=LongestGaps(request.num_gaps),
        metadata=metadata if span is None else span.metadata,
        span=span,
    )
    status, refused = "INTERNAL", None
    try:
        yield report
        status = "OK"
    except asyncio.CancelledError:
        status = "CANCELLED"
        raise
    except BaseException as error:
        status = status_of(error).grpc
        if isinstance(error, Refused | Expired):
            refused = error.reason
            metrics.refused.labels(error.reason.value, report.class_name).inc()
        raise
    finally:
        finish = "" if report.finished is None else _FINISH.get(report.finished.finish_reason, "other")
        report.status = status
        _observe(report, status, finish, refused)
        on_end(report, refused, status == "CANCELLED")
        if span is not None:
            _end_span(span, report, status, finish)


def name_request(report: RequestReport, request_id: str) -> None:
    """Names it in logs and in its span as this router and the workers do. Called in the task that serves it, before that starts others."""
    report.request_id = request_id
    concerning(request_id, trace_id_of(report.metadata))
    if report.span is not None:
        report.span.set({"gen_ai.response.id": request_id, "twostep.request_id": request_id})


def _observe(report: RequestReport, status: str, finish: str, refused: Reason | None) -> None:
    metrics = report.metrics
    metrics.requests.labels(status, finish, report.class_name).inc()
    _observe_targets(report, status, refused)
    if report.answer is not None or report.embeds:
        metrics.prompt_sizes.observe(report.num_prompt_tokens)
        metrics.migrations.inc(report.attempts - 1)
        if report.first_token_at is not None:
            metrics.attempts.inc(report.attempts)
            metrics.prompt_tokens.inc(report.num_prompt_tokens)
            metrics.cached_tokens.inc(report.cached_tokens)
            metrics.queue.labels(report.class_name).observe(report.route_s + report.queue_s)
    if report.answer is not None:
        metrics.generation_sizes.observe(report.answer.num_tokens)
        if report.visible_at is not None:
            metrics.visible_ttft.observe(report.visible_at - report.started)
        if (tpot_s := report.tpot_s) is not None:
            metrics.tpot.observe(tpot_s)
            if report.attempts == 1:
                report.observe_prediction("tpot", tpot_s)
    if report.finished is not None:
        phases = report.finished.phases
        metrics.e2e.observe(phases.total_s)
        for name, histogram in metrics.phases.items():
            histogram.observe(getattr(phases, f"{name}_s"))


def _observe_targets(report: RequestReport, status: str, refused: Reason | None) -> None:
    """Counts whether the client got what it was promised; one `refused` for a target missed that one. A cancelled request was not waited
    for, and the beginning of one that is resumed came from another router."""
    job, metrics, name = report.job, report.metrics, report.class_name
    if job is None or not job.targets or job.resumed or status == "CANCELLED":
        return
    metrics.slo.labels(name).inc()
    # There from the first request on: where no targets are kept, the share is 0, and not unknown.
    attained = metrics.slo_attained.labels(name)
    missed = job.targets.missed(report.ttft_s, report.tpot_s, report.longest_gap_s)
    if refused in (Reason.TARGET_TTFT, Reason.TARGET_TPOT, Reason.TARGET_GAP):
        missed = frozenset((refused,))
    for reason in missed:
        metrics.slo_missed.labels(reason.value, name).inc()
    if status == "OK" and not missed:
        attained.inc()


# ---- its span ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpanPart:
    """A child of the request's span; instants in monotonic seconds."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)


def span_parts(report: RequestReport, ended_at: float) -> Iterator[SpanPart]:
    """Yields one after the other:

    route       arrival until workers accepted it: prompt, admission, queue for workers, placement, reservation
    queue       in the worker that computes the prompt
    prefill     until the first token is here
    hand_over   of a prompt computed elsewhere: until the decode worker has its KV
    decode      until the last token is here

    The way to the first token is that of the attempt that gave it, what follows that of the last one.
    """
    transfer = report.transfer
    placed: Attributes = {"twostep.prefill_worker": transfer.prefill_worker, "twostep.decode_worker": transfer.decode_worker}
    first = report.first_token_at
    if first is None:
        # What it waited for in vain.
        yield SpanPart("route", report.started, ended_at, placed if report.placed else {})
        return
    accepted = min(first, report.started + report.route_s)
    begun = min(first, accepted + report.queue_s)
    yield SpanPart("route", report.started, accepted, placed)
    yield SpanPart("queue", accepted, begun)
    prompt: Attributes = {"twostep.prompt_tokens": report.num_prompt_tokens, "twostep.cached_tokens": report.cached_tokens}
    yield SpanPart("prefill", begun, first, prompt)
    if report.committed_at is None:
        return
    start = max(first, report.committed_at)
    if transfer.transport not in ("", "none"):
        moved: Attributes = {
            "twostep.transport": transfer.transport,
            "twostep.bytes": transfer.bytes,
            "twostep.chunks": transfer.chunks,
            "twostep.blocks_moved": transfer.blocks_moved,
            "twostep.blocks_reused": transfer.blocks_reused,
            "twostep.publish_s": report.publish_s,
            "twostep.fetch_s": report.fetch_s,
        }
        yield SpanPart("hand_over", first, start, moved)
    if report.last_decode_at is not None:
        yield SpanPart("decode", start, max(start, report.last_decode_at))


def _begin_span(
    tracer: Tracer, operation: str, request: inference_pb2.GenerateRequest, metadata: Metadata, received: float, model: str
) -> Span:
    span = tracer.start(f"{operation} {model}", metadata, at=received)
    span.set(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "twostep",
            # The only attribute that is a client's own text.
            "gen_ai.request.model": request.model[:_MAX_MODEL_CHARS] or model,
            "gen_ai.response.model": model,
        }
    )
    return span


def _end_span(span: Span, report: RequestReport, status: str, finish_reason: str) -> None:
    if span.recording and report.job is not None:
        ended_at = time.monotonic()
        span.set(_attributes(report, report.job, ended_at))
        if report.answer is not None or report.embeds:
            for at, prefill_worker, decode_worker in report.begun:
                span.event("attempt", at, {"twostep.prefill_worker": prefill_worker, "twostep.decode_worker": decode_worker})
            for part in span_parts(report, ended_at):
                span.child(part.name, part.start, part.end, part.attributes)
    if finish_reason:
        span.set({"gen_ai.response.finish_reasons": (finish_reason,)})
    span.set({"rpc.response.status_code": status} | ({} if status == "OK" else {"error.type": status}))
    # Only the code: messages quote what clients send.
    span.end(failure=status if status in _OUR_FAULT else "")


def _attributes(report: RequestReport, job: RequestJob, ended_at: float) -> Attributes:
    """Describes the request, and its answer as far as it came."""
    sampling, targets = job.sampling, job.targets
    found: dict[str, str | int | float | bool | None] = {
        "twostep.request_class": report.class_name,
        "twostep.target_ttft_s": targets.ttft_s,
        "twostep.target_tpot_s": targets.tpot_s,
        "twostep.target_gap_s": targets.gap_s,
    }
    if report.answer is not None or report.embeds:
        found |= {
            "gen_ai.usage.input_tokens": report.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
            "gen_ai.server.request.duration": ended_at - report.started,
            "twostep.attempts": report.attempts,
        }
    if report.embeds:
        return {name: value for name, value in found.items() if value is not None}
    found |= {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
    }
    if report.answer is not None:
        found |= {
            "gen_ai.usage.output_tokens": report.answer.num_tokens,
            "gen_ai.usage.reasoning.output_tokens": (report.finished and report.finished.usage.reasoning_tokens) or None,
            "gen_ai.server.time_to_first_token": report.ttft_s,
            "gen_ai.response.time_to_first_chunk": None if report.visible_at is None else report.visible_at - report.started,
            "gen_ai.server.time_per_output_token": report.tpot_s,
        }
    return {name: value for name, value in found.items() if value is not None}
