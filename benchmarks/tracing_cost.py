"""What tracing costs a router and a decode worker, on and off: `python benchmarks/tracing_cost.py`.

CPU time of the thread that serves; spans go to an exporter that drops them, in its own thread, as they would to a collector.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from decode_worker.history import History
from decode_worker.sequence import ComputedHere, DecodeSequence, State
from decode_worker.tracing import SequenceSpans
from router.request.answer import AnswerReader
from router.request.job import RequestJob
from router.serving.recorder import name_request, recorded
from twostep.engine.types import TokenOutput
from twostep.metrics.registry import MetricsRegistry
from twostep.metrics.router import RouterMetrics, RouterState
from twostep.process.tracing import Tracer, metadata_of, trace_id_of
from twostep.process.tracing_otel import OtelTracer
from twostep.rpc.v1 import decode_pb2, inference_pb2
from twostep.sampling_params import SamplingParams

METADATA = (("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),)
REQUESTS, TOKENS, ROUNDS = 2_000, 200_000, 7


class Dropping(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def best_us(work: Callable[[int], None], count: int) -> float:
    """Microseconds for each, of the best round."""
    times = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        contextvars.copy_context().run(work, count)
        times.append(time.thread_time() - begun)
    return 1e6 * min(times) / count


def requests(tracer: Tracer | None) -> Callable[[int], None]:
    state = RouterState(num_running=0, num_waiting=0, num_streams=0, workers={})
    metrics = RouterMetrics(MetricsRegistry(), lambda: state)
    request = inference_pb2.GenerateRequest(text="x")
    job = RequestJob(request_id="r", prompt=[1] * 100, sampling=SamplingParams(max_tokens=10), deadline=0.0)

    def serve(count: int) -> None:
        for _ in range(count):
            with recorded(metrics, request, METADATA, tracer, received=time.monotonic() - 1.0, model="m") as report:
                name_request(report, "r")
                now = time.monotonic()
                answer = report.answer = cast(AnswerReader, SimpleNamespace(num_tokens=10, num_reasoning_tokens=0))
                report.job = job
                report.begin_attempt("p", "d")
                report.first_token_at, report.committed_at, report.last_token_at, report.last_decode_at = now - 0.9, now - 0.8, now, now
                report.transfer.transport = "ray"
                report.end(answer, inference_pb2.FINISH_REASON_STOP, "")

    return serve


@functools.cache
def sampled(count: int) -> Sequence[TokenOutput]:
    return [TokenOutput(seq_id="r/1", token_id=5, position=position) for position in range(count)]


def tokens(tracer: Tracer | None) -> Callable[[int], None]:
    def serve(count: int) -> None:
        history = History(("r", 1), max_tokens=2048)
        sequence = DecodeSequence(seq_id="r/1", history=history, router_id="router", tenant="", state=State.DECODING, source=ComputedHere())
        if tracer is not None:
            sequence.span = SequenceSpans(tracer).begin("r", 1, METADATA, at=time.monotonic())
        for token in sampled(count):
            sequence.tell(token, decode_pb2.DecodeEvent())

    return serve


def bare_tokens(count: int) -> None:
    """What a token cost before there was tracing."""
    history = History(("r", 1), max_tokens=2048)
    for token in sampled(count):
        history.add(token, decode_pb2.DecodeEvent())


def contexts(count: int) -> None:
    context = SimpleNamespace(invocation_metadata=lambda: (("user-agent", "grpc"), *METADATA))
    for _ in range(count):
        trace_id_of(metadata_of(context))


async def main() -> None:
    tracer = OtelTracer("http://127.0.0.1:1", role="router", instance="r", version="0", exporter=Dropping())
    print("microseconds each, best of", ROUNDS)
    print(f"a request on a router, untraced     {best_us(requests(None), REQUESTS):8.2f}")
    print(f"a request on a router, six spans    {best_us(requests(tracer), REQUESTS):8.2f}")
    print(f"a call's trace context, read        {best_us(contexts, TOKENS):8.3f}")
    print(f"a token on a decode worker, bare    {best_us(bare_tokens, TOKENS):8.3f}")
    print(f"a token on a decode worker, untraced{best_us(tokens(None), TOKENS):8.3f}")
    print(f"a token on a decode worker, traced  {best_us(tokens(tracer), TOKENS):8.3f}")
    tracer.close(1.0)


if __name__ == "__main__":
    asyncio.run(main())
