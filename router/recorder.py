"""What one request leaves in the metrics, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from router.answer import Answer
from router.report import Report
from twostep.errors import status_of
from twostep.metrics.router import RouterMetrics
from twostep.rpc.v1 import inference_pb2

_FINISH = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


class Record:
    """`report` and `answer` as soon as there are any, `end` if the request ended well."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self.answer: Answer | None = None
        self.end: inference_pb2.End | None = None


@contextmanager
def recorded(metrics: RouterMetrics) -> Iterator[Record]:
    """Around all of a request."""
    record = Record()
    status = "INTERNAL"
    try:
        yield record
        status = "OK"
    except asyncio.CancelledError:
        status = "CANCELLED"
        raise
    except BaseException as error:
        status = status_of(error).grpc
        raise
    finally:
        _observe(metrics, record, status)


def _observe(metrics: RouterMetrics, record: Record, status: str) -> None:
    finish = "" if record.end is None else _FINISH.get(record.end.finish_reason, "other")
    metrics.requests.labels(status, finish).inc()
    if record.report is not None and record.answer is not None:
        report = record.report
        metrics.prompt_sizes.observe(report.num_prompt_tokens)
        metrics.generation_sizes.observe(record.answer.num_tokens)
        metrics.migrations.inc(report.attempts - 1)
        if report.first_token_at is not None:
            metrics.attempts.inc(report.attempts)
            metrics.prompt_tokens.inc(report.num_prompt_tokens)
            metrics.cached_tokens.inc(report.cached_tokens)
            metrics.queue.observe(report.route_s + report.queue_s)
    if record.end is not None:
        phases = record.end.phases
        metrics.e2e.observe(phases.total_s)
        for name, histogram in metrics.phases.items():
            histogram.observe(getattr(phases, f"{name}_s"))
