"""One trace over client, router, prefill worker, hand-over and decode worker, as a collector gets it over OTLP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from otlp_receiver import Collector, Received, collecting
from test_stream_logs import lose_first
from whole_system import WholeSystem, whole_system

from kv_transfer.telemetry import TransferSpans
from twostep.client import AsyncClient
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import inference_pb2, inference_pb2_grpc
from twostep.worker.worker import Worker

CLIENT_TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
ROUTER, PREFILL, DECODE = "twostep-router", "twostep-prefill", "twostep-decode"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


PROMPT = "rivers run to the sea " * 20


async def generate(system: WholeSystem, traceparent: str | None = TRACEPARENT, **fields: Any) -> inference_pb2.End:
    """An answer of twelve tokens."""
    sampling = inference_pb2.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, seed=7)
    request = inference_pb2.GenerateRequest(text=PROMPT, request_id="asked", sampling=sampling, **fields)
    metadata = () if traceparent is None else (("traceparent", traceparent), ("tracestate", "vendor=1"))
    end = None
    async with open_channel(system.target()) as channel:
        async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120, metadata=metadata):
            end = response.end if response.HasField("end") else end
    assert end is not None
    return end


def check_times(parent: Received, children: dict[str, Received], order: list[str]) -> None:
    """Each begins where the one before ends, or later, and all are within their parent."""
    slack = 1_000_000  # instants of one request are told by several reads of two clocks
    at = parent.start
    for name in order:
        child = children[name]
        assert at - slack <= child.start <= child.end <= parent.end + slack, name
        at = child.end


def open_spans(worker: Worker) -> TransferSpans:
    service: Any = next(iter(worker.edge.services.values()))
    found: TransferSpans = service._spans.transfers
    return found


@pytest.mark.smoke
async def test_one_trace_over_all_processes(fake_model_dir: Path, tmp_path: Path, collector: Collector) -> None:
    async with whole_system(fake_model_dir, tmp_path, otlp_endpoint=collector.endpoint) as system:
        end = await generate(system)
        await system.settled()
        assert system.prefill is not None
        for worker in (system.prefill, *system.decodes):
            assert len(open_spans(worker)) == 0, "nothing of a request is kept"
    assert {span.trace_id for span in collector.spans} == {CLIENT_TRACE}
    assert {(span.service, span.instance) for span in collector.spans} >= {(PREFILL, "prefill-0"), (DECODE, "decode-0")}

    request = collector.one("text_completion m")
    assert (request.service, request.parent_id) == (ROUTER, CLIENT_SPAN)
    assert request.proto.trace_state == "vendor=1"
    assert request.proto.kind == request.proto.SPAN_KIND_SERVER
    told = request.attributes
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "m"
    assert told["gen_ai.request.max_tokens"] == 12
    assert told["gen_ai.request.seed"] == 7
    assert told["gen_ai.usage.input_tokens"] == end.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == 12
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.server.time_to_first_token"] == pytest.approx(end.phases.ttft_s)
    assert told["gen_ai.server.time_per_output_token"] > 0
    assert told["gen_ai.response.id"].startswith("asked~")
    assert told["rpc.response.status_code"] == "OK"
    assert not request.failed
    assert [event.name for event in request.proto.events] == ["attempt"]

    parts = collector.children(request)
    assert set(parts) == {"route", "queue", "prefill", "hand_over", "decode", "prefill_worker", "decode_worker"}
    check_times(request, parts, ["route", "queue", "prefill", "hand_over", "decode"])
    assert parts["hand_over"].attributes["twostep.transport"] == "local"
    assert parts["hand_over"].attributes["twostep.bytes"] == end.transfer.bytes > 0

    prefill = parts["prefill_worker"]
    assert prefill.service == PREFILL
    assert prefill.attributes["twostep.request_id"] == told["gen_ai.response.id"]
    assert prefill.attributes["twostep.lease"] == "released"
    computed = collector.children(prefill)
    assert set(computed) == {"queue", "compute", "publish"}
    check_times(prefill, computed, ["queue", "compute"])
    assert computed["publish"].attributes["twostep.bytes"] == end.transfer.bytes

    decode = parts["decode_worker"]
    assert decode.service == DECODE
    assert decode.attributes["twostep.request_id"] == told["gen_ai.response.id"]
    decoded = collector.children(decode)
    assert set(decoded) == {"reserved", "fetch", "decode"}
    check_times(decode, decoded, ["reserved", "fetch", "decode"])
    assert decoded["fetch"].attributes["twostep.peer"] == "prefill-0"
    assert decoded["decode"].attributes["gen_ai.usage.output_tokens"] == 11
    # Nothing that a client sent or got.
    everything = b"".join(span.proto.SerializeToString() for span in collector.spans)
    assert b"rivers" not in everything


async def test_a_prompt_that_the_decode_worker_computes(fake_model_dir: Path, tmp_path: Path, collector: Collector) -> None:
    async with whole_system(fake_model_dir, tmp_path, aggregated=True, otlp_endpoint=collector.endpoint) as system:
        await generate(system, traceparent=None)
        await system.settled()
    request = collector.one("text_completion m")
    assert request.parent_id == "", "without a client's trace it is the root of one"
    assert {span.trace_id for span in collector.spans} == {request.trace_id}
    parts = collector.children(request)
    assert set(parts) == {"route", "queue", "prefill", "decode", "decode_worker"}
    decoded = collector.children(parts["decode_worker"])
    assert set(decoded) == {"queue", "prefill", "decode"}
    check_times(parts["decode_worker"], decoded, ["queue", "prefill", "decode"])
    assert decoded["decode"].attributes["gen_ai.usage.output_tokens"] == 12


async def test_an_attempt_that_was_lost_is_in_the_trace(fake_model_dir: Path, tmp_path: Path, collector: Collector) -> None:
    async with whole_system(fake_model_dir, tmp_path, num_decode=2, otlp_endpoint=collector.endpoint) as system:
        asking = asyncio.create_task(generate(system))
        await lose_first(system, asking)
        end = await asking
        await system.settled()
    assert end.attempts == 2
    request = collector.one("text_completion m")
    assert request.attributes["twostep.attempts"] == 2
    assert [event.name for event in request.proto.events] == ["attempt", "attempt"]
    workers = [span for span in collector.spans if span.name == "decode_worker"]
    assert {span.parent_id for span in workers} == {request.span_id}
    assert sorted(span.attributes["twostep.attempt"] for span in workers) == [1, 2]
    assert [span.failed for span in sorted(workers, key=lambda span: span.start)] == [True, False]


async def test_an_applications_span_is_the_root_of_what_its_sdk_asks(fake_model_dir: Path, tmp_path: Path, collector: Collector) -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("application")
    async with whole_system(fake_model_dir, tmp_path, aggregated=True, otlp_endpoint=collector.endpoint) as system:
        async with AsyncClient(system.target()) as client:
            with tracer.start_as_current_span("work") as span:
                await client.generate(PROMPT, max_tokens=4, timeout=120).result()
            await client.generate(PROMPT, max_tokens=4, timeout=120).result()
        await system.settled()
    first, second = sorted((each for each in collector.spans if each.name == "text_completion m"), key=lambda each: each.start)
    context = span.get_span_context()
    assert (first.trace_id, first.parent_id) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    assert second.parent_id == ""
    assert second.trace_id != first.trace_id
