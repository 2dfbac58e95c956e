"""Tests of what a router meters for the autoscaler: what is asked of it, and how well it is answered."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import SECRET, Cluster, SetClock, until

from router.request.answer import AnswerReader
from router.request.job import RequestJob
from router.request.report import RequestReport
from router.request.targets import Reason, Targets
from router.waiting.demand_meter import DemandMeter
from twostep.cluster.connection import connect
from twostep.cluster.demand import KEPT_WINDOWS, WINDOW_S, DemandTotals, demand_key, demand_of, said_in, window_of, windows_to_read
from twostep.cluster.signed import DEMAND, Signer
from twostep.metrics.registry import MetricsRegistry
from twostep.metrics.router import RouterGauges, RouterMetrics
from twostep.request_class import RequestClass
from twostep.sampling_params import SamplingParams

DEFAULT = Targets(ttft_s=1.0, tpot_s=0.05)
METRICS = RouterMetrics(MetricsRegistry(), lambda: RouterGauges(num_running=0, num_waiting=0, num_streams=0, workers={}))


def job(num_prompt: int = 100, **options: Any) -> RequestJob:
    values: dict[str, Any] = {"request_id": "r", "prompt": [7] * num_prompt, "sampling": SamplingParams(max_tokens=8), "deadline": 1e9}
    return RequestJob(**(values | options))


def report(one: RequestJob, ttft_s: float | None = 0.5, tpot_s: float | None = 0.02, cached: int = 0) -> RequestReport:
    """Eight tokens, or one where there is no `tpot_s`."""
    num_tokens = 8 if tpot_s is not None else 1
    answer = cast(AnswerReader, SimpleNamespace(num_tokens=num_tokens + len(one.resumed)))
    made = RequestReport(started=50.0, metrics=METRICS, job=one, answer=answer, offered=True, cached_tokens=cached)
    if ttft_s is not None:
        made.first_token_at = 50.0 + ttft_s
        made.last_token_at = made.first_token_at + 7 * (tpot_s or 0.0)
    return made


@pytest.fixture
def clock() -> SetClock:
    return SetClock(10 * WINDOW_S)


@pytest.fixture
def meter(clock: SetClock) -> DemandMeter:
    """The meter of a router in which three requests wait; nothing is written."""
    return DemandMeter(connect("redis://127.0.0.1:1"), "r", Signer(SECRET, DEMAND), DEFAULT, lambda: 3, clock)


# ---- a router's own ----------------------------------------------------------------------------------------------------------


def test_what_comes_and_what_ends_is_counted_where_it_happens(meter: DemandMeter, clock: SetClock) -> None:
    clock.now -= 1.0
    meter.arrived(job(100))
    clock.now += 1.0
    meter.arrived(job(50, resumed=[1, 2]))
    meter.ended(report(job(100), cached=64), None, False)
    assert meter.totals() == {
        9: DemandTotals(requests=1, prompt_tokens=100, queued=3),
        10: DemandTotals(
            requests=1,
            prompt_tokens=52,
            started=1,
            started_prompt_tokens=100,
            cached_tokens=64,
            uncached_squares=36**2,
            ended=1,
            output_tokens=8,
            ttft_total=1,
            ttft_met=1,
            tpot_total=1,
            tpot_met=1,
            queued=3,
        ),
    }
    clock.now *= 2
    nothing = DemandTotals(queued=3)
    assert meter.totals() == {19: nothing, 20: nothing}, "nothing is something to say, and the old is forgotten"


def test_requests_that_name_their_time_to_the_first_token_are_counted(meter: DemandMeter) -> None:
    for each in (job(), job(targets=Targets(tpot_s=0.03)), job(targets=Targets(ttft_s=2.0))):
        meter.arrived(each)
    meter.arrived(job(targets=Targets(ttft_s=2.0), request_class=RequestClass.BATCH))
    found = meter.totals()[10]
    assert (found.requests, found.promised) == (4, 1), "batch requests wait, whatever they name"


@pytest.mark.parametrize(
    ("options", "ttft_s", "tpot_s", "counted"),
    [
        ({}, 0.99, 0.0499, (1, 1, 1, 1)),
        ({}, 1.01, 0.0501, (1, 0, 1, 0)),
        ({}, 0.9, None, (1, 1, 0, 0)),  # one token
        ({}, None, None, (1, 0, 0, 0)),  # none: lost, or refused
        ({"targets": Targets(ttft_s=2.0)}, 1.5, 0.9, (1, 1, 0, 0)),  # a request's own targets, and no others
        ({"targets": Targets(tpot_s=0.03)}, 1.5, 0.04, (0, 0, 1, 0)),
        ({"request_class": RequestClass.BATCH}, 30.0, 1.0, (0, 0, 0, 0)),
        ({"request_class": RequestClass.BATCH, "targets": Targets(ttft_s=9.0)}, 30.0, 1.0, (1, 0, 0, 0)),
        ({"resumed": [1]}, 0.9, 0.04, (0, 0, 0, 0)),  # somebody else gave the beginning
    ],
)
def test_answers_are_held_to_their_own_targets_or_to_the_deployments(
    meter: DemandMeter, options: dict[str, Any], ttft_s: float | None, tpot_s: float | None, counted: tuple[int, int, int, int]
) -> None:
    meter.ended(report(job(**options), ttft_s, tpot_s), None, False)
    found = meter.totals()[10]
    assert (found.ttft_total, found.ttft_met, found.tpot_total, found.tpot_met) == counted


def test_a_refusal_is_a_miss_and_a_cancelled_request_is_none(meter: DemandMeter) -> None:
    refused = RequestReport(started=50.0, metrics=METRICS, job=job(), offered=True)
    meter.ended(refused, Reason.TARGET_TTFT, False)
    meter.ended(report(job(), 5.0), None, True)
    found = meter.totals()[10]
    assert (found.refused, found.ttft_total, found.ttft_met) == (1, 1, 0)
    assert (found.started, found.ended, found.output_tokens) == (1, 1, 8), "but it was work"


# ---- all routers' together -----------------------------------------------------------------------------------------------

NOW = 1_000_000.0


def written(*said: tuple[int, str, DemandTotals]) -> dict[int, dict[bytes, bytes]]:
    """Returns fields of windows. `said`: windows back from now, router and totals."""
    fields: dict[int, dict[bytes, bytes]] = {window: {} for window in windows_to_read(NOW)}
    for back, router, counted in said:
        fields[window_of(NOW) - back][router.encode()] = counted.to_json().encode()
    return fields


def test_rates_are_of_whole_windows_and_of_all_routers() -> None:
    one = DemandTotals(requests=10, queued=1)
    now_s = NOW + WINDOW_S - 1.0
    fields = written(*((back, router, one) for back in range(8) for router in ("a", "b")))
    demand = demand_of(fields, now_s=now_s, span_s=3 * WINDOW_S)
    assert (demand.recent.requests, demand.seconds, demand.num_routers, demand.queued) == (60, 3.0 * WINDOW_S, 2, 2)
    assert demand.kept.requests == 160
    # A window that has only just ended may still change.
    early = demand_of(fields, now_s=NOW + 0.5, span_s=WINDOW_S)
    late = demand_of(written((1, "a", DemandTotals(requests=99)), (2, "a", one)), now_s=NOW + 0.5, span_s=WINDOW_S)
    assert (early.recent.requests, late.recent.requests) == (20, 10)


def test_windows_in_which_nobody_wrote_are_not_taken_for_quiet_ones() -> None:
    one = DemandTotals(requests=10)
    demand = demand_of(written((2, "a", one)), now_s=NOW + 2.0, span_s=6 * WINDOW_S)
    assert (demand.recent.requests, demand.seconds) == (10, float(WINDOW_S)), "Redis has lost the others"
    nothing = demand_of(written(), now_s=NOW + 2.0, span_s=6 * WINDOW_S)
    assert (nothing.seconds, nothing.num_routers) == (0.0, 0)
    quiet = demand_of(written((1, "a", DemandTotals())), now_s=NOW + 2.0, span_s=6 * WINDOW_S)
    assert (quiet.seconds, quiet.recent.requests) == (float(WINDOW_S), 0), "that is one"


def test_a_router_that_is_gone_has_nothing_waiting() -> None:
    fields = written((6, "gone", DemandTotals(requests=5, queued=40)), (1, "here", DemandTotals(requests=5, queued=2)))
    demand = demand_of(fields, now_s=NOW + 2.0, span_s=10 * WINDOW_S)
    assert (demand.queued, demand.recent.requests) == (2, 10)


def test_a_router_that_falls_silent_without_a_word_is_missed_and_one_that_leaves_is_not() -> None:
    one, last = DemandTotals(requests=5), DemandTotals(requests=5, left=1)
    said = [(back, "here", one) for back in range(8)]
    said += [
        (7, "left", last),
        (6, "left", last),
        (7, "again", last),
        (1, "again", one),
        (7, "cut", one),
        (2, "cut", one),
        (3, "dead", one),
    ]
    demand = demand_of(written(*said), now_s=NOW + 2.0, span_s=10 * WINDOW_S)
    assert (demand.silent, demand.num_routers) == (("cut", "dead"), 2)
    # Its last window may not be over yet, or only just.
    assert demand_of(written((1, "late", one)), now_s=NOW + 2.0, span_s=WINDOW_S).silent == ()
    assert demand_of(written((2, "late", one)), now_s=NOW + 0.5, span_s=WINDOW_S).silent == ()


@given(st.binary(max_size=60) | st.sampled_from([b"[-1]", b"[1.5]", b"[true]", b"{}", b'["1"]', b"[1e400]", b"[9223372036854775808]"]))
def test_a_damaged_field_costs_nobody_anything(damaged: bytes) -> None:
    fields = written((1, "a", DemandTotals(requests=7)))
    fields[window_of(NOW) - 1][b"damaged"] = damaged
    demand = demand_of(fields, now_s=NOW + 2.0, span_s=WINDOW_S)
    assert demand.recent.requests >= 7
    assert demand.recent.requests == 7 or DemandTotals.from_json(damaged) is not None


@given(st.lists(st.integers(0, 1 << 40), min_size=16, max_size=16))
def test_totals_are_read_as_they_were_written(values: list[int]) -> None:
    counted = DemandTotals(**dict(zip(DemandTotals.__dataclass_fields__, values, strict=True)))
    assert DemandTotals.from_json(counted.to_json()) == counted
    longer = counted.to_json()[:-1] + ",3]"
    assert DemandTotals.from_json(longer) == counted, "of a newer router"


# ---- a router ---------------------------------------------------------------------------------------------------------------


async def kept(client: Any) -> DemandTotals:
    now_s = time.time()
    windows = range(window_of(now_s) - KEPT_WINDOWS, window_of(now_s) + 2)
    signer = Signer(SECRET, DEMAND)
    fields = {window: said_in(signer, window, await client.hgetall(demand_key(window))) for window in windows}
    return demand_of(fields, now_s=now_s, span_s=WINDOW_S).kept


async def test_a_router_tells_what_is_asked_of_it_and_serves_on_without_redis(cluster: Cluster, redis_client: redis.asyncio.Redis) -> None:
    prefill = await cluster.prefill()
    await cluster.decode()
    prefill.cached_tokens = 3
    num_prompt = len(cluster.tokenizer.encode("the capital of France").ids)
    async with cluster.serving(target_ttft_ms=60_000.0, target_tpot_ms=1e-3):
        for _ in range(3):
            await cluster.ask(max_tokens=5)
        bad = cluster.request(max_tokens=-1)
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.ask(bad)
        meter = cluster.router.demand
        await meter.exchange()
        await meter.exchange()  # totals: once more is the same
        found = await kept(redis_client)
        assert (found.requests, found.prompt_tokens) == (3, 3 * num_prompt), "what makes no sense is not asked for"
        assert (found.started, found.cached_tokens, found.ended, found.output_tokens) == (3, 9, 3, 15)
        assert (found.ttft_total, found.ttft_met, found.tpot_total, found.tpot_met) == (3, 3, 3, 0)
        ttl = [await redis_client.ttl(demand_key(window_of(time.time()) - back)) for back in range(2)]
        assert any(0 < seconds <= 200 for seconds in ttl)
        cluster.redis_server.kill()
        await meter.exchange()
        assert not meter.connected
        assert (await cluster.ask(max_tokens=5)).token_ids == cluster.expected(5)
        cluster.redis_server.start()
        await until(lambda: meter.connected, "Redis is back")


async def test_what_has_no_room_was_asked_for_all_the_same(cluster: Cluster, redis_client: redis.asyncio.Redis) -> None:
    async with cluster.paired(max_inflight=1, max_waiting=0) as (_, decode):
        decode.script.hold_at = 5
        first = asyncio.create_task(cluster.ask(max_tokens=200))
        await until(lambda: cluster.router.admission.num_inflight == 1, "the first one is served")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.ask(max_tokens=5)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        await asyncio.wait([first])
        await cluster.router.demand.exchange()
        found = await kept(redis_client)
        assert (found.requests, found.refused) == (2, 1)
        assert found.ttft_met == found.ttft_total - 1


async def test_a_router_that_drains_says_that_it_leaves(cluster: Cluster, redis_client: redis.asyncio.Redis) -> None:
    async with cluster.paired():
        await cluster.ask(max_tokens=5)
        assert (await kept(redis_client)).left == 0
    found = await kept(redis_client)
    assert found.left
    assert (found.requests, found.ended) == (1, 1), "its last word has all that it counted"
