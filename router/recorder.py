"""What one request leaves in the metrics, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from router.answer import Answer
from router.job import Job
from router.report import Report
from router.targets import Expired, Refused, Targets
from twostep.errors import status_of
from twostep.metrics.router import RouterMetrics
from twostep.request_class import RequestClass
from twostep.rpc.v1 import inference_pb2

_FINISH = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


class Record:
    """`job`, `report` and `answer` as soon as there are any, `end` if the request ended well."""

    def __init__(self, request_class: RequestClass) -> None:
        self.request_class = request_class.name.lower()
        self.job: Job | None = None
        self.report: Report | None = None
        self.answer: Answer | None = None
        self.end: inference_pb2.End | None = None


@contextmanager
def recorded(metrics: RouterMetrics, request_class: RequestClass) -> Iterator[Record]:
    """Around all of a request."""
    record = Record(request_class)
    status = "INTERNAL"
    try:
        yield record
        status = "OK"
    except asyncio.CancelledError:
        status = "CANCELLED"
        raise
    except BaseException as error:
        status = status_of(error).grpc
        if isinstance(error, Refused | Expired):
            metrics.refused.labels(error.reason.value, record.request_class).inc()
        raise
    finally:
        _observe(metrics, record, status)


def _observe(metrics: RouterMetrics, record: Record, status: str) -> None:
    finish = "" if record.end is None else _FINISH.get(record.end.finish_reason, "other")
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
    ttft_s = tpot_s = None
    if report is not None and record.answer is not None and report.first_token_at is not None and report.last_token_at is not None:
        ttft_s = report.first_token_at - report.started
        more = record.answer.num_tokens - 1
        tpot_s = (report.last_token_at - report.first_token_at) / more if more > 0 else None
    missed = targets.missed(ttft_s, tpot_s)
    for reason in missed:
        metrics.slo_missed.labels(reason.value, record.request_class).inc()
    if status == "OK" and not missed:
        metrics.slo_attained.labels(record.request_class).inc()
