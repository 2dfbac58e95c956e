"""The router's span of a request: its parts by what was recorded, and how it ends where the request does not end well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import aiohttp
import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from otlp_receiver import Collector, collecting
from router_fakes import Cluster, Script, refuse

from router.request.report import RequestReport, span_parts
from twostep.metrics.router import RouterMetrics
from twostep.rpc.v1 import inference_pb2

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
METADATA = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


TIMES = st.floats(0, 100)


@given(TIMES, TIMES, TIMES, TIMES, st.none() | TIMES, st.none() | TIMES, st.none() | TIMES, st.sampled_from(["", "none", "ray"]))
def test_parts_follow_one_another_within_the_request(
    started: float,
    route_s: float,
    queue_s: float,
    last: float,
    first: float | None,
    committed: float | None,
    decoded: float | None,
    transport: str,
) -> None:
    def at(seconds: float | None) -> float | None:
        return None if seconds is None else started + seconds

    report = RequestReport(started=started, metrics=cast(RouterMetrics, None))
    report.route_s, report.queue_s = route_s, queue_s
    report.first_token_at, report.committed_at, report.last_decode_at = at(first), at(committed), at(decoded)
    report.transfer.transport = transport
    # An end after all that is known of it.
    ended_at = started + max(last, first or 0.0, committed or 0.0, decoded or 0.0)
    parts = list(span_parts(report, ended_at))
    names = [part.name for part in parts]
    assert names == [name for name in ("route", "queue", "prefill", "hand_over", "decode") if name in names]
    assert names[0] == "route"
    assert ("hand_over" in names) == (first is not None and committed is not None and transport == "ray")
    now = started
    for part in parts:
        assert now <= part.start <= part.end <= ended_at, part
        now = part.end
    if first is not None:
        assert parts[2].end == report.first_token_at


async def ask(cluster: Cluster, **fields: Any) -> inference_pb2.End | None:
    request = cluster.request(max_tokens=4)
    for name, value in fields.items():
        setattr(request, name, value)
    end = None
    async for response in cluster.stub.Generate(request, timeout=60, metadata=METADATA):
        end = response.end if response.HasField("end") else end
    return end


async def test_workers_are_told_the_routers_span_not_the_clients(cluster: Cluster, collector: Collector) -> None:
    seen: dict[str, tuple[str, str]] = {}

    def look(name: str) -> Any:
        async def hook(_request: Any, context: Any) -> None:
            seen[name] = next(value for key, value in context.invocation_metadata() if key == "traceparent").split("-")[1:3]

        return hook

    async with cluster.paired(otlp_endpoint=collector.endpoint) as (prefill, decode):
        prefill.hooks.append(look("Run"))
        decode.hooks.append(look("Reserve"))
        decode.attach_hooks.append(look("Attach"))
        await ask(cluster)
    request = collector.one("text_completion m")
    assert seen == {name: [TRACE, request.span_id] for name in ("Reserve", "Run", "Attach")}


async def test_how_requests_that_fail_end_in_the_trace(cluster: Cluster, collector: Collector) -> None:
    async with cluster.paired(otlp_endpoint=collector.endpoint, max_attempts=1) as (_, decode):
        for fields, code in (
            ({"model": "another"}, grpc.StatusCode.NOT_FOUND),
            ({"tenant": "\n"}, grpc.StatusCode.INVALID_ARGUMENT),
            ({}, grpc.StatusCode.UNAVAILABLE),
        ):
            decode.script = Script(fail_at=2)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await ask(cluster, **fields)
            assert failed.value.code() is code
    spans = [span for span in collector.spans if span.name == "text_completion m"]
    assert [span.attributes["error.type"] for span in spans] == ["NOT_FOUND", "INVALID_ARGUMENT", "UNAVAILABLE"]
    assert [span.failed for span in spans] == [False, False, True], "what a client does wrong is no failure of the server"
    assert spans[0].attributes["gen_ai.request.model"] == "another"
    assert spans[2].attributes["gen_ai.usage.output_tokens"] == 2
    # A status, never a message, which quotes what the client sent.
    assert all(span.proto.status.message in ("", "UNAVAILABLE") for span in spans)
    assert set(collector.children(spans[2])) == {"route", "queue", "prefill", "hand_over", "decode"}


async def test_attempts_that_were_refused_are_events(cluster: Cluster, collector: Collector) -> None:
    await cluster.prefill()
    for name in ("d0", "d1"):
        worker = await cluster.decode(name)
        worker.hooks.append(refuse(grpc.StatusCode.UNAVAILABLE, "draining"))
    async with cluster.serving(otlp_endpoint=collector.endpoint):
        await ask(cluster)
    request = collector.one("text_completion m")
    assert len(request.proto.events) == 3
    assert request.attributes["twostep.attempts"] == 1


async def test_a_chat_is_a_chat(cluster: Cluster, collector: Collector) -> None:
    async with cluster.paired(otlp_endpoint=collector.endpoint):
        request = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(max_tokens=3))
        request.chat.messages.add(role="user", content="a question of mine")
        async for _ in cluster.stub.Generate(request, timeout=30):
            pass
    span = collector.one("chat m")
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert b"question of mine" not in span.proto.SerializeToString()


async def test_an_http_request_is_one_span_around_its_answers(cluster: Cluster, collector: Collector) -> None:
    await cluster.prefill()
    await cluster.decode()
    body = {"model": "m", "messages": [{"role": "user", "content": "a question of mine"}], "max_tokens": 3, "n": 2}
    headers = {"traceparent": METADATA[0][1]}
    async with (
        cluster.serving(otlp_endpoint=collector.endpoint),
        aiohttp.ClientSession(f"http://127.0.0.1:{cluster.router.http_port}", headers=headers) as http,
    ):
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()
        async with http.get("/v1/models/another") as answer:
            assert answer.status == 404
        for path in ("/health", "/metrics"):
            async with http.get(path) as answer:
                await answer.read()
    assert {span.trace_id for span in collector.spans} == {TRACE}
    asked = collector.one("POST /v1/chat/completions")
    assert asked.parent_id == METADATA[0][1].split("-")[2]
    assert asked.attributes["http.response.status_code"] == 200
    answers = [span for span in collector.spans if span.name == "chat m"]
    assert [span.parent_id for span in answers] == [asked.span_id] * 2
    missing = collector.one("GET /v1/models/{model}")
    assert (missing.attributes["error.type"], missing.failed) == ("404", False)
    assert not [span for span in collector.spans if "/health" in span.name or "/metrics" in span.name]
    assert b"question of mine" not in b"".join(span.proto.SerializeToString() for span in collector.spans)
