"""Tests of what operators see of requests and tenants: which ones are kept, what is told of them and what never is, and who may see it."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any, cast

import pytest
from http_fakes import CHAT, open_http, refused
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import SECRET, Cluster, SetClock, until

from router.request.answer import AnswerReader
from router.request.job import RequestJob
from router.request.report import RequestReport
from router.status.request_book import MAX_RECENT, MAX_SLOWEST, RequestBook
from router.waiting.fair_queue import Quota
from twostep.keys.api_keys import admin_key, system_key
from twostep.metrics.registry import MetricsRegistry
from twostep.metrics.router import RouterGauges, RouterMetrics
from twostep.request_class import RequestClass
from twostep.rpc.v1.inference_pb2 import Gap
from twostep.sampling_params import SamplingParams
from twostep.settings.readers import trace_url

METRICS = RouterMetrics(MetricsRegistry(), lambda: RouterGauges(num_running=0, num_waiting=0, num_streams=0, workers={}))
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def clock() -> SetClock:
    return SetClock(1000.0)


@pytest.fixture
def book(clock: SetClock) -> RequestBook:
    return RequestBook(Quota(weights={"gold": 3.0}), clock=clock.unix, unix=lambda: 5e8)


def begun(book: RequestBook, clock: SetClock, name: str = "r", *, tenant: str = "", num_prompt: int = 10, **fields: Any) -> RequestReport:
    job = RequestJob(request_id=name, prompt=[7] * num_prompt, sampling=SamplingParams(max_tokens=8), deadline=1e9, tenant=tenant)
    answer = cast(AnswerReader, SimpleNamespace(num_tokens=0))
    report = RequestReport(started=clock.unix(), metrics=METRICS, request_id=name, job=job, answer=answer, **fields)
    book.begin(report)
    return report


def tokens(report: RequestReport, count: int) -> None:
    assert report.answer is not None
    report.answer.num_tokens = count


def served(book: RequestBook, clock: SetClock, name: str, *, first_s: float, total_s: float, gap_s: float = 0.0, **fields: Any) -> None:
    report = begun(book, clock, name, **fields)
    report.first_token_at = report.started + first_s
    report.last_token_at, report.status = report.started + total_s, "OK"
    report.gaps.keep(gap_s, Gap)
    clock.now += total_s
    book.ended(report)


def names(told: list[dict[str, Any]]) -> list[str]:
    return [each["request_id"] for each in told]


def test_slow_is_who_waited_not_who_got_much(book: RequestBook, clock: SetClock) -> None:
    served(book, clock, "long", first_s=0.1, total_s=60.0, gap_s=0.2)
    served(book, clock, "late", first_s=3.0, total_s=4.0)
    served(book, clock, "halting", first_s=0.1, total_s=9.0, gap_s=7.0)
    served(book, clock, "batch", first_s=90.0, total_s=91.0, request_class=RequestClass.BATCH)
    told = book.requests()
    assert names(told["slowest"]) == ["halting", "late", "long"]
    assert names(told["recent"]) == ["batch", "halting", "late", "long"]
    assert [each["wait_s"] for each in told["slowest"]] == [7.0, 3.0, 0.2]
    clock.now += 800.0
    assert names(book.requests()["slowest"]) == []
    assert len(book.requests()["recent"]) == 4


def test_one_that_was_given_up_waited_until_then(book: RequestBook, clock: SetClock) -> None:
    report = begun(book, clock)
    clock.now += 2.0
    report.first_token_at = report.last_token_at = clock.unix()
    clock.now += 30.0
    (live,) = book.requests()["live"]
    assert (live["status"], live["silent_s"], live["wait_s"], live["ttft_s"]) == ("", 30.0, 30.0, 2.0)
    report.status = "CANCELLED"
    book.ended(report)
    told = book.requests()
    assert (told["num_live"], told["live"]) == (0, [])
    assert (told["recent"][0]["status"], told["recent"][0]["wait_s"]) == ("CANCELLED", 30.0)
    assert told["recent"][0]["began_unix_s"] == 5e8 - 32.0


@given(st.lists(st.floats(0.0, 100.0), max_size=300))
def test_the_slowest_are_the_slowest_of_all_however_many_come(waits: list[float]) -> None:
    clock = SetClock(1000.0)
    book = RequestBook(Quota(), clock=clock.unix)
    for number, wait_s in enumerate(waits):
        served(book, clock, str(number), first_s=wait_s, total_s=0.0)
    told = book.requests()
    assert [each["wait_s"] for each in told["slowest"]] == pytest.approx(sorted(waits, reverse=True)[:MAX_SLOWEST])
    assert len(told["recent"]) == min(len(waits), MAX_RECENT)


def test_one_that_could_not_be_read_pushes_nobody_out(book: RequestBook, clock: SetClock) -> None:
    served(book, clock, "good", first_s=1.0, total_s=1.0)
    for _ in range(2 * MAX_RECENT):
        report = RequestReport(started=clock.unix(), metrics=METRICS, status="INVALID_ARGUMENT")
        book.begin(report)
        book.ended(report)
    assert names(book.requests()["recent"]) == ["good"]


def test_tenants_are_told_by_what_they_use_and_may(book: RequestBook, clock: SetClock) -> None:
    one, other = begun(book, clock, tenant="gold", placed=True), begun(book, clock, tenant="iron")
    book.tick()
    one.first_token_at = clock.unix()
    tokens(one, 5)
    clock.now += 1.0
    book.tick()
    told = {each.pop("tenant"): each for each in book.tenants()["tenants"]}
    assert told["gold"] == {"running": 1, "waiting": 0, "tokens": 15, "weight": 3.0, "share": 0.75}
    assert told["iron"] == {"running": 0, "waiting": 1, "tokens": 0, "weight": 1.0, "share": 0.25}
    # The rest is counted at the end, once; and a minute later nothing is.
    tokens(one, 8)
    for each in (one, other):
        each.status = "OK"
        book.ended(each)
    book.tick()
    assert [(each["tenant"], each["tokens"], each["share"]) for each in book.tenants()["tenants"]] == [("gold", 18, None)]
    clock.now += 61.0
    book.tick()
    assert book.tenants()["num_tenants"] == 0


@pytest.mark.parametrize(
    "text", ["jaeger.example/{trace_id}", "https://jaeger.example/", "javascript:{trace_id}", "https://{trace_id}/{trace_id}"]
)
def test_what_is_no_url_of_a_trace_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="trace_id"):
        trace_url(text)
    assert trace_url("") == ""


# ---- over HTTP ---------------------------------------------------------------------------------------------------------------


async def test_requests_are_told_with_their_trace_and_without_their_words(cluster: Cluster) -> None:
    await cluster.prefill()
    await cluster.decode()
    template = "https://jaeger.example/trace/{trace_id}"
    async with cluster.serving(trace_url=template, tenant_max_inflight=7), open_http(cluster) as http:
        asked = {"messages": [{"role": "user", "content": "zanzibar"}], "stop": ["marmalade"], "max_tokens": 5}
        headers = {"traceparent": TRACEPARENT, "x-twostep-tenant": "gold", "x-request-id": "mine"}
        async with http.post(CHAT, json=asked, headers=headers) as answer:
            text = (await answer.json())["choices"][0]["message"]["content"]
        async with http.get("/ui/api/requests") as answer:
            assert answer.headers["Cache-Control"] == "no-store"
            whole = await answer.text()
            told = await answer.json()
    (ended,) = told["recent"]
    assert told["slowest"] == [ended]
    assert ended["request_id"].startswith("mine~")
    assert (ended["status"], ended["tenant"], ended["trace_id"], ended["output_tokens"]) == ("OK", "gold", TRACE, 5)
    assert list(ended["phases"]) == ["route", "queue", "prefill", "hand_over", "decode"]
    assert (told["trace_url"], told["max_inflight"], told["num_live"]) == (template, 7, 0)
    assert not [word for word in ("zanzibar", "marmalade", text) if word in whole]


async def test_with_keys_requests_are_for_operators(cluster: Cluster) -> None:
    async with cluster.serving(api_keys="redis", admin_port=0), open_http(cluster) as http:
        admin = {"Authorization": f"Bearer {admin_key(SECRET)}"}
        made = {"name": "n", "tenant": "gold", "tokens_per_minute": 600}
        async with http.post(f"http://127.0.0.1:{cluster.router.admin_port}/admin/keys", json=made, headers=admin) as answer:
            key = {"Authorization": f"Bearer {(await answer.json())['key']}"}
        await refused(http, "/ui/api/requests", None, 401)
        await refused(http, "/ui/api/requests", None, 403, headers=key)
        await refused(http, "/v1/models", None, 401, headers=admin)
        for operator in (admin, {"Authorization": f"Bearer {system_key(SECRET)}"}):
            for path in ("/ui/api/requests", "/ui/api/status"):
                async with http.get(path, headers=operator) as answer:
                    assert answer.status == 200
        # A key's limit is told beside what its tenant uses.
        await cluster.prefill()
        await cluster.decode()
        await until(lambda: len(cluster.router.pool.records()) == 2, "they are known")
        async with http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}, headers=key) as answer:
            assert answer.status == 200, await answer.text()
            used = (await answer.json())["usage"]["total_tokens"]
        async with http.get("/ui/api/requests", headers=admin) as answer:
            (told,) = (await answer.json())["keys"].values()
        assert told["limit"] == 600
        assert 0 < told["used"] <= used, "it flows in again"
