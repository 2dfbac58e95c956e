"""Against servers whose timing is known: what is measured is what they did."""

from __future__ import annotations

import random
import warnings
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from timed_servers import Schedule, TimedInference, serving, serving_http

from twostep.errors import InvalidRequest, PermissionDenied, SetupError, Unauthenticated
from twostep.lab.bench.serve import lengths
from twostep.lab.bench.serve.arrivals import Arrivals
from twostep.lab.bench.serve.content import PromptContent
from twostep.lab.bench.serve.grpc_target import GrpcOptions, GrpcTarget
from twostep.lab.bench.serve.load import ServeLoad, Users
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.serve.record import REFUSED, RequestRecord
from twostep.lab.bench.serve.runner import Extent, RunProgress, RunResult
from twostep.lab.bench.serve.summary import Windows, summarize
from twostep.lab.bench.serve.target import LoadTarget
from twostep.lab.bench.serve.workloads import MultiTurn, RandomPrompts, Workload
from twostep.rpc.v1 import inference_pb2 as pb

pytest.importorskip("aiohttp", reason="the extra [bench]")
from aiohttp import web
from aiohttp.test_utils import TestServer

from twostep.lab.bench.serve.openai_target import OpenAIOptions, OpenAITarget

# First token after 80 ms, second after 60 more, then one every 10 ms.
WAITS = (0.08, 0.06, 0.01)
SHORT = RandomPrompts(prompt=lengths.Fixed(20), output=lengths.Fixed(6))
# What a busy machine may add to any time: it may stand still for some seconds.
SLACK_S = 20.0


async def driven(target: LoadTarget, workload: Workload, extent: Extent, rate: float = 50.0) -> tuple[RunResult, Windows]:
    served = await target.open()
    try:
        load = ServeLoad(workload=workload, arrivals=Arrivals(kind="poisson", rate=rate), extent=extent, seed="0")
        return await load.put_on(target, served, "0", RunProgress())
    finally:
        await target.close()


def check_times(records: Sequence[RequestRecord], schedule: Schedule, started: float) -> None:
    """Nothing is seen before it was sent; nothing long after; TTFT, gaps and TPOT are those of the schedule, or the machine's fault."""
    assert len(schedule.sent) == len(records)
    by_first = sorted(records, key=lambda r: r.sent_s)
    for r, sent in zip(by_first, sorted(schedule.sent, key=lambda times: times[0]), strict=True):
        assert len(r.times_s) == len(sent)
    every_sent = sorted(t for times in schedule.sent for t in times)
    every_seen = sorted(t + started for r in records for t in r.times_s)
    for was_sent, was_seen in zip(every_sent, every_seen, strict=True):
        # Clocks are one and the same; the i-th seen cannot come before the i-th sent.
        assert -1e-3 <= was_seen - was_sent < SLACK_S
    summary = summarize(records, Windows.of_requests(records, open_loop=True))
    # Sleeps are never shorter than a timer's tick.
    assert 0.078 <= summary.ttft_s.min <= summary.ttft_s.max < 0.08 + SLACK_S
    assert summary.tpot_s.min > 0.0
    assert summary.tpot_s.p50 == pytest.approx((0.06 + 4 * 0.01) / 5, abs=SLACK_S / 5)
    assert summary.e2e_s.min >= 0.078 + 0.058 + 4 * 0.009
    # Some message may have been held up by the machine and come with the next: the sum stays, single gaps do not.
    assert summary.longest_gap_s.p50 == pytest.approx(0.06, abs=SLACK_S)


@pytest.mark.smoke
@pytest.mark.system  # real time
async def test_a_router_of_known_timing() -> None:
    schedule = Schedule(WAITS)
    servicer = TimedInference(schedule)
    async with serving(servicer) as address:
        target = GrpcTarget(GrpcOptions(targets=(address,), request_class="interactive", ttft_ms=500, tpot_ms=10, tenant="t"))
        result, windows = await driven(target, SHORT, Extent(num_requests=12))
    records = result.records
    assert [r.error for r in records] == [""] * 12
    check_times(records, schedule, result.start)
    assert all((r.prompt_tokens, r.cached_tokens, r.output_tokens, r.finish_reason) == (20, 10, 6, "length") for r in records)
    summary = summarize(records, windows)
    assert summary.cached_share == 0.5
    assert summary.phases_s["prefill_s"].p50 == 0.25
    assert summary.phases_s["fetch_s"].p50 == 0.0
    for request in servicer.requests:
        assert (request.request_class, request.ttft_ms, request.tpot_ms, request.tenant) == (pb.REQUEST_CLASS_INTERACTIVE, 500, 10, "t")
        assert request.sampling.ignore_eos
        assert request.sampling.temperature == 0
        assert request.sampling.HasField("temperature")
    assert len({request.cache_salt for request in servicer.requests}) == 1
    assert servicer.requests[0].cache_salt


async def test_targets_and_class_are_left_out_unless_asked_for() -> None:
    servicer = TimedInference(Schedule((0.0,)))
    async with serving(servicer) as address:
        await driven(GrpcTarget(GrpcOptions(targets=(address,), cold=False, vocab_size=600)), SHORT, Extent(num_requests=2), rate=1000)
    request = servicer.requests[0]
    assert not request.HasField("ttft_ms")
    assert not request.HasField("tpot_ms")
    assert request.cache_salt == ""
    assert all(256 <= i < 600 for i in request.token_ids.ids)


async def test_refusals_and_broken_answers_of_a_router_are_told_apart() -> None:
    async with serving(TimedInference(Schedule((0.0,)), refuse_every=3)) as address:
        result, windows = await driven(GrpcTarget(GrpcOptions(targets=(address,))), SHORT, Extent(num_requests=9), rate=1000)
    refused = [r for r in result.records if r.error]
    assert [(r.error, r.retry_after_s) for r in refused] == [(REFUSED, 1.5)] * 3
    assert summarize(result.records, windows, targets=LatencyTargets(ttft_ms=60_000)).num_refused == 3
    async with serving(TimedInference(Schedule((0.0,)), break_after=2)) as address:
        result, _ = await driven(GrpcTarget(GrpcOptions(targets=(address,))), SHORT, Extent(num_requests=1), rate=1000)
    assert [(r.error, r.message, len(r.times_s)) for r in result.records] == [("unavailable", "the decode worker was lost", 2)]


@pytest.mark.system  # real time
async def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    async with serving(TimedInference(Schedule((600.0,)))) as address:
        target = GrpcTarget(GrpcOptions(targets=(address,), timeout_s=0.1))
        result, _ = await driven(target, SHORT, Extent(num_requests=2), rate=1000)
    assert [r.error for r in result.records] == ["timeout"] * 2
    async with serving_http(Schedule((600.0,)), []) as url:
        result, _ = await driven(OpenAITarget(OpenAIOptions(url=url, timeout_s=0.1)), SHORT, Extent(num_requests=2), rate=1000)
    assert [r.error for r in result.records] == ["timeout"] * 2


async def test_conversations_send_back_the_answers_ids() -> None:
    servicer = TimedInference(Schedule((0.0,)))
    workload = MultiTurn(turns=lengths.Fixed(3), message=lengths.Fixed(4), output=lengths.Fixed(2))
    async with serving(servicer) as address:
        target = GrpcTarget(GrpcOptions(targets=(address,)))
        served = await target.open()
        load = ServeLoad(workload=workload, arrivals=Users(1), extent=Extent(num_requests=1), seed="0")
        await load.put_on(target, served, "0", RunProgress())
        await target.close()
    prompts = [list(r.token_ids.ids) for r in servicer.requests]
    assert [len(p) for p in prompts] == [4, 10, 16]
    assert prompts[1][:6] == [*prompts[0], 1000, 1001]
    assert prompts[2][:10] == prompts[1]


@pytest.mark.system  # real time
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_an_openai_server_of_known_timing(api: Any) -> None:
    schedule, bodies = Schedule(WAITS), list[dict[str, Any]]()
    async with serving_http(schedule, bodies) as url:
        target = OpenAITarget(OpenAIOptions(url=url, api=api, extra_body={"top_p": 0.5}))
        result, _ = await driven(target, SHORT, Extent(num_requests=8))
    assert [r.error for r in result.records] == [""] * 8
    check_times(result.records, schedule, result.start)
    assert all((r.output_tokens, r.cached_tokens, r.finish_reason) == (6, 3, "length") for r in result.records)
    for body in bodies:
        assert (body["model"], body["max_tokens"], body["top_p"], body["ignore_eos"]) == ("timed", 6, 0.5, True)
        text = body["messages"][0]["content"] if api == "chat" else body["prompt"]
        assert len(text.split()) == 20


async def test_refusals_and_errors_over_http() -> None:
    async with serving_http(Schedule((0.0,)), [], refuse_every=2) as url:
        result, _ = await driven(OpenAITarget(OpenAIOptions(url=f"{url}/v1")), SHORT, Extent(num_requests=4), rate=1000)
        assert sorted((r.error, r.retry_after_s) for r in result.records if r.error) == [(REFUSED, 2.0)] * 2
        unlucky = RandomPrompts(prompt=lengths.Fixed(5), output=lengths.Fixed(13))
        result, _ = await driven(OpenAITarget(OpenAIOptions(url=url, ignore_eos=False)), unlucky, Extent(num_requests=1))
    assert [(r.error, r.message) for r in result.records] == [("http 500", "thirteen")]


async def test_a_chat_over_http_has_its_history() -> None:
    bodies: list[dict[str, Any]] = []
    workload = MultiTurn(turns=lengths.Fixed(2), message=lengths.Fixed(4), output=lengths.Fixed(2))
    for api in ("chat", "completions"):
        bodies.clear()
        async with serving_http(Schedule((0.0,)), bodies) as url:
            target = OpenAITarget(OpenAIOptions(url=url, api=api))  # type: ignore[arg-type]
            await driven(target, workload, Extent(num_requests=1))
        if api == "chat":
            assert [m["role"] for m in bodies[1]["messages"]] == ["user", "assistant", "user"]
            assert bodies[1]["messages"][:1] == bodies[0]["messages"]
            assert bodies[1]["messages"][1]["content"] == " x x"
        else:
            assert bodies[1]["prompt"].startswith(bodies[0]["prompt"] + " x x")


async def test_who_does_not_answer_is_named() -> None:
    with pytest.raises(InvalidRequest, match="interactive, standard, batch"):
        GrpcTarget(GrpcOptions(targets=("a:1",), request_class="urgent"))
    target = OpenAITarget(OpenAIOptions(url="http://127.0.0.1:9"))
    with pytest.raises(SetupError, match="--target"):
        await target.open()
    await target.close()
    async with serving(TimedInference(Schedule((0.0,)))) as address:
        other = GrpcTarget(GrpcOptions(targets=(address,), model="missing"))
        with pytest.raises(SetupError, match="timed"):
            await other.open()
        await other.close()


class Keyed(TimedInference):
    """Answers those alone who show KEY; others in the router's way."""

    KEY = "twostep-0123"

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        await self._let_in(context)
        async for response in super().Generate(request, context):
            yield response

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        await self._let_in(context)
        return await super().Tokenize(request, context)

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        await self._let_in(context)
        return await super().ListModels(request, context)

    async def _let_in(self, context: Any) -> None:
        shown = dict(context.invocation_metadata()).get("authorization")
        if shown is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no API key was given")
        if shown != f"Bearer {self.KEY}":
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this API key may not")


async def test_a_router_that_asks_for_a_key_is_shown_it_with_every_call() -> None:
    async with serving(Keyed(Schedule((0.0,)))) as address:
        options = GrpcOptions(targets=(address,), api_key=Keyed.KEY)
        assert Keyed.KEY not in repr(options)
        result, _ = await driven(GrpcTarget(options), SHORT, Extent(num_requests=3), rate=1000)
        assert [r.error for r in result.records] == [""] * 3
        for key, kind in (("", Unauthenticated), ("another", PermissionDenied)):
            target = GrpcTarget(GrpcOptions(targets=(address,), api_key=key))
            with pytest.raises(kind, match=address):
                await target.open()
            await target.close()


async def test_what_is_no_router_is_said_to_be_none() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = GrpcTarget(GrpcOptions(targets=(f"127.0.0.1:{port}",)))
    try:
        with pytest.raises(SetupError, match="--target"):
            await target.open()
    finally:
        await target.close()
        await server.stop(0)


async def test_an_http_server_that_asks_for_a_key_is_shown_it_with_every_request() -> None:
    def let_in(request: web.Request) -> web.Response | None:
        shown = request.headers.get("Authorization")
        if shown == f"Bearer {Keyed.KEY}":
            return None
        if shown is None:
            return web.json_response({"error": {"message": "no API key was given"}}, status=401)
        return web.Response(status=403, text="this API key may not")

    async def models(request: web.Request) -> web.Response:
        return let_in(request) or web.json_response({"data": [{"id": "timed", "max_model_len": 8192}]})

    async def answer(request: web.Request) -> web.Response:
        event = b'data: {"choices": [{"text": " x", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
        return let_in(request) or web.Response(body=event, content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", answer)])
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        options = OpenAIOptions(url=url, api_key=Keyed.KEY)
        result, _ = await driven(OpenAITarget(options), SHORT, Extent(num_requests=3), rate=1000)
        assert [r.error for r in result.records] == [""] * 3
        for key, kind, said in (
            ("", Unauthenticated, "answers 401: no API key was given"),
            ("another", PermissionDenied, "answers 403: this API key may not"),
        ):
            target = OpenAITarget(OpenAIOptions(url=url, api_key=key))
            with pytest.raises(kind, match=said):
                await target.open()
            await target.close()


@pytest.mark.parametrize(
    ("address", "warned"),
    [
        ("router.example:50051", True),
        ("localhost:50051", False),
        ("http://router.example/v1", True),
        ("http://localhost.example:8000", True),
        ("https://router.example/v1", False),
        ("http://localhost/v1", False),
        ("http://127.0.0.1:8000/v1", False),
        ("http://user@[::1]:8000/v1", False),
    ],
)
def test_a_key_that_others_may_read_on_the_way_is_warned_of(address: str, warned: bool) -> None:
    def make(key: str) -> LoadTarget:
        if "://" in address:
            return OpenAITarget(OpenAIOptions(url=address, api_key=key))
        return GrpcTarget(GrpcOptions(targets=(address,), api_key=key))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make("")
        assert not caught
        make("key")
    assert ["unencrypted" in str(w.message) for w in caught] == [True] * warned
    with pytest.raises(InvalidRequest):
        make("key\n")


async def test_a_texts_tokens_are_asked_of_the_router() -> None:
    async with serving(TimedInference(Schedule((0.0,)))) as address:
        target = GrpcTarget(GrpcOptions(targets=(address,)))
        await target.open()
        assert await target.tokenize("ab") == array("I", [97, 98])
        await target.close()


def test_a_prepared_prompt_is_what_the_turn_says() -> None:
    target = GrpcTarget(GrpcOptions(targets=("a:1",)))
    session = next(SHORT.sessions(PromptContent("a", range(1000)), random.Random(0)))
    first, again = (target.prepare((), session.turns[0], run) for run in ("0", "1"))
    assert list(first.token_ids.ids) == list(session.turns[0].prompt)  # type: ignore[arg-type]
    assert first.cache_salt != again.cache_salt, "other runs find nothing of this one in a cache"
    assert target.prepare((), session.turns[0], "0").cache_salt == first.cache_salt
