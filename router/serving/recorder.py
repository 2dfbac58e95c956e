"""What one request leaves behind, however it ends: metrics, its span if it is traced, and its id in every line of the log meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from router.request.answer import Answer
from router.request.job import Job, Metadata
from router.request.report import Report
from router.request.targets import Expired, Reason, Refused, Targets
from router.serving import tracing
from router.waiting.demand_meter import DemandMeter
from twostep.errors import status_of
from twostep.metrics.router import RouterMetrics
from twostep.process.log import concerning
from twostep.process.tracing import Span, Tracer, trace_id_of
from twostep.rpc.convert import class_from_proto
from twostep.rpc.v1 import inference_pb2

_FINISH = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
}

_MAX_MODEL_CHARS = 128


class Record:
    """`job`, `report` and `answer` as soon as there are any, `end` if the request ended well. `metadata` goes along with every call to a
    worker: the caller's trace context, or the one of this request's own span."""

    def __init__(self, request: inference_pb2.GenerateRequest, metadata: Metadata, span: Span | None) -> None:
        self.request_class = class_from_proto(request.request_class).name.lower()
        self.metadata = metadata if span is None else span.metadata
        self.span = span
        self.job: Job | None = None
        self.report: Report | None = None
        self.answer: Answer | None = None
        self.end: inference_pb2.End | None = None
        # Nothing but room for it was wanting: what the deployment is scaled for.
        self.offered = False

    def named(self, request_id: str) -> None:
        """What this router and the workers call it. In the task that serves it, before that starts others."""
        concerning(request_id, trace_id_of(self.metadata))
        if self.span is not None:
            self.span.set({"gen_ai.response.id": request_id, "twostep.request_id": request_id})

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first that this router gave; None: there was none."""
        report, answer = self.report, self.answer
        if report is None or answer is None or report.first_token_at is None or report.last_token_at is None:
            return None
        more = answer.num_tokens - (0 if self.job is None else len(self.job.resumed)) - 1
        return (report.last_token_at - report.first_token_at) / more if more > 0 else None


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
) -> Iterator[Record]:
    """Around all of a request, which came at `received` (time.monotonic()); `metadata` is its caller's trace context."""
    span = None
    if tracer is not None:
        operation = tracing.operation_of(request)
        span = tracer.start(f"{operation} {model}", metadata, at=received)
        span.set(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": tracing.PROVIDER,
                # The only attribute that is a client's own text.
                "gen_ai.request.model": request.model[:_MAX_MODEL_CHARS] or model,
                "gen_ai.response.model": model,
            }
        )
    record = Record(request, metadata, span)
    status, refused = "INTERNAL", None
    try:
        yield record
        status = "OK"
    except asyncio.CancelledError:
        status = "CANCELLED"
        raise
    except BaseException as error:
        status = status_of(error).grpc
        if isinstance(error, Refused | Expired):
            refused = error.reason
            metrics.refused.labels(error.reason.value, record.request_class).inc()
        raise
    finally:
        finish = "" if record.end is None else _FINISH.get(record.end.finish_reason, "other")
        _observe(metrics, record, status, finish)
        if demand is not None:
            _meter(demand, record, status, refused)
        if span is not None:
            _trace(span, record, status, finish)


def _observe(metrics: RouterMetrics, record: Record, status: str, finish: str) -> None:
    metrics.requests.labels(status, finish, record.request_class).inc()
    _observe_targets(metrics, record, status)
    if record.report is not None and record.answer is not None:
        report = record.report
        metrics.prompt_sizes.observe(report.num_prompt_tokens)
        metrics.generation_sizes.observe(record.answer.num_tokens)
        metrics.migrations.inc(report.attempts - 1)
        if report.first_token_at is not None:
            metrics.attempts.inc(report.attempts)
            metrics.prompt_tokens.inc(report.num_prompt_tokens)
            metrics.cached_tokens.inc(report.cached_tokens)
            metrics.queue.labels(record.request_class).observe(report.route_s + report.queue_s)
        if report.visible_at is not None:
            metrics.visible_ttft.observe(report.visible_at - report.started)
        if (tpot_s := record.tpot_s) is not None:
            metrics.tpot.observe(tpot_s)
    if record.end is not None:
        phases = record.end.phases
        metrics.e2e.observe(phases.total_s)
        for name, histogram in metrics.phases.items():
            histogram.observe(getattr(phases, f"{name}_s"))


def _observe_targets(metrics: RouterMetrics, record: Record, status: str) -> None:
    """What its client was promised, and got. A cancelled request was not waited for, and of one that is gone on with somebody else gave
    the beginning."""
    job, report = record.job, record.report
    if job is None or job.resumed or status == "CANCELLED":
        return
    targets = Targets(ttft_s=job.ttft_s, tpot_s=job.tpot_s)
    if not targets:
        return
    metrics.slo.labels(record.request_class).inc()
    # There from the first request on: where nobody's targets are kept, the share is 0, and not unknown.
    attained = metrics.slo_attained.labels(record.request_class)
    ttft_s = None if report is None or report.first_token_at is None else report.first_token_at - report.started
    missed = targets.missed(ttft_s, record.tpot_s)
    for reason in missed:
        metrics.slo_missed.labels(reason.value, record.request_class).inc()
    if status == "OK" and not missed:
        attained.inc()


def _meter(demand: DemandMeter, record: Record, status: str, refused: Reason | None) -> None:
    job, report = record.job, record.report
    if job is None or not record.offered:
        return
    num_output = 0 if record.answer is None else record.answer.num_tokens - len(job.resumed)
    demand.ended(job, report, num_output=num_output, tpot_s=record.tpot_s, refused=refused, cancelled=status == "CANCELLED")


def _trace(span: Span, record: Record, status: str, finish: str) -> None:
    job, report, answer = record.job, record.report, record.answer
    if span.recording and job is not None:
        span.set(tracing.asked(job))
        if report is not None and answer is not None:
            usage = record.end.usage if record.end is not None else inference_pb2.Usage()
            tracing.told(
                span,
                report,
                num_tokens=answer.num_tokens,
                num_reasoning_tokens=usage.reasoning_tokens,
                tpot_s=record.tpot_s,
                ended_at=time.monotonic(),
            )
    tracing.ended(span, status, finish)
