"""Each request leaves behind, however it ends: metrics, its part in the deployment's demand, its id in every line of the log meanwhile,
and its span if it is traced.

A span has parts, made at its end from what was recorded: nothing is traced while tokens flow. The names of attributes are OpenTelemetry's
(semantic conventions for generative AI, of 2025); those that it has no word for begin with `twostep.`. Prompts, answers, stop strings and
keys are none of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from router.request.job import Metadata, RequestJob
from router.request.report import RequestReport
from router.request.targets import Expired, Refused
from router.waiting.demand_meter import DemandMeter
from twostep.errors import status_of
from twostep.metrics.router import RouterMetrics
from twostep.process.log import concerning
from twostep.process.tracing import Attributes, Span, Tracer, trace_id_of
from twostep.rpc.convert import class_from_proto
from twostep.rpc.v1 import inference_pb2

_FINISH = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
}
_MAX_MODEL_CHARS = 128
# By OpenTelemetry's conventions for servers of RPC: whatever else a request ends with is its client's doing.
_OUR_FAULT = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})


@contextmanager
def recorded(
    metrics: RouterMetrics,
    request: inference_pb2.GenerateRequest,
    metadata: Metadata,
    tracer: Tracer | None = None,
    *,
    received: float,
    model: str = "",
    demand: DemandMeter | None = None,
) -> Iterator[RequestReport]:
    """Surrounds all of a request, which came at `received` (time.monotonic()); `metadata` is its caller's trace context."""
    span = None if tracer is None else _begin_span(tracer, request, metadata, received, model)
    report = RequestReport(
        started=received,
        metrics=metrics,
        request_class=class_from_proto(request.request_class),
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
            metrics.refused.labels(error.reason.value, _class_name(report)).inc()
        raise
    finally:
        finish = "" if report.finished is None else _FINISH.get(report.finished.finish_reason, "other")
        _observe(report, status, finish)
        if demand is not None:
            demand.ended(report, refused=refused, cancelled=status == "CANCELLED")
        if span is not None:
            _end_span(span, report, status, finish)


def name_request(report: RequestReport, request_id: str) -> None:
    """Names it in logs and in its span as this router and the workers do. Called in the task that serves it, before that starts others."""
    concerning(request_id, trace_id_of(report.metadata))
    if report.span is not None:
        report.span.set({"gen_ai.response.id": request_id, "twostep.request_id": request_id})


def _class_name(report: RequestReport) -> str:
    return report.request_class.name.lower()


def _observe(report: RequestReport, status: str, finish: str) -> None:
    metrics = report.metrics
    metrics.requests.labels(status, finish, _class_name(report)).inc()
    _observe_targets(report, status)
    if report.answer is not None:
        metrics.prompt_sizes.observe(report.num_prompt_tokens)
        metrics.generation_sizes.observe(report.answer.num_tokens)
        metrics.migrations.inc(report.attempts - 1)
        if report.first_token_at is not None:
            metrics.attempts.inc(report.attempts)
            metrics.prompt_tokens.inc(report.num_prompt_tokens)
            metrics.cached_tokens.inc(report.cached_tokens)
            metrics.queue.labels(_class_name(report)).observe(report.route_s + report.queue_s)
        if report.visible_at is not None:
            metrics.visible_ttft.observe(report.visible_at - report.started)
        if (tpot_s := report.tpot_s) is not None:
            metrics.tpot.observe(tpot_s)
    if report.finished is not None:
        phases = report.finished.phases
        metrics.e2e.observe(phases.total_s)
        for name, histogram in metrics.phases.items():
            histogram.observe(getattr(phases, f"{name}_s"))


def _observe_targets(report: RequestReport, status: str) -> None:
    """Counts whether the client got what it was promised. A cancelled request was not waited for, and the beginning of one that is
    resumed came from another router."""
    job, metrics, name = report.job, report.metrics, _class_name(report)
    if job is None or not job.targets or job.resumed or status == "CANCELLED":
        return
    metrics.slo.labels(name).inc()
    # There from the first request on: where no targets are kept, the share is 0, and not unknown.
    attained = metrics.slo_attained.labels(name)
    missed = job.targets.missed(report.ttft_s, report.tpot_s)
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


def _begin_span(tracer: Tracer, request: inference_pb2.GenerateRequest, metadata: Metadata, received: float, model: str) -> Span:
    operation = "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
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
        span.set(_request_attributes(report.job))
        if report.answer is not None:
            ended_at = time.monotonic()
            span.set(_answer_attributes(report, report.answer.num_tokens, ended_at))
            for at, prefill_worker, decode_worker in report.begun:
                span.event("attempt", at, {"twostep.prefill_worker": prefill_worker, "twostep.decode_worker": decode_worker})
            for part in span_parts(report, ended_at):
                span.child(part.name, part.start, part.end, part.attributes)
    if finish_reason:
        span.set({"gen_ai.response.finish_reasons": (finish_reason,)})
    span.set({"rpc.response.status_code": status} | ({} if status == "OK" else {"error.type": status}))
    # Only the code: messages quote what clients send.
    span.end(failure=status if status in _OUR_FAULT else "")


def _request_attributes(job: RequestJob) -> Attributes:
    sampling, targets = job.sampling, job.targets
    found: dict[str, str | int | float | bool | None] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "twostep.request_class": job.request_class.name.lower(),
        "twostep.target_ttft_s": targets.ttft_s,
        "twostep.target_tpot_s": targets.tpot_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def _answer_attributes(report: RequestReport, num_tokens: int, ended_at: float) -> Attributes:
    """Describes the answer as far as it came."""
    found: dict[str, str | int | float | bool | None] = {
        "gen_ai.usage.input_tokens": report.num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.cached_tokens,
        "gen_ai.server.request.duration": ended_at - report.started,
        "twostep.attempts": report.attempts,
        "gen_ai.usage.reasoning.output_tokens": (report.finished and report.finished.usage.reasoning_tokens) or None,
        "gen_ai.server.time_to_first_token": report.ttft_s,
        "gen_ai.response.time_to_first_chunk": None if report.visible_at is None else report.visible_at - report.started,
        "gen_ai.server.time_per_output_token": report.tpot_s,
    }
    return {name: value for name, value in found.items() if value is not None}
