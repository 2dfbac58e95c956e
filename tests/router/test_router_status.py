"""Tests of a router's status: percentiles, rates, the balance of prefill and decode, over gRPC and for the page."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import json
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st
from placement_simulation import worker_record
from router_fakes import Cluster, Script, until

from router.placing.load_ratio import RoleLoad, WaitingRequests, role_load
from router.status import board as status_board
from router.status.status import (
    Buckets,
    CounterSample,
    columns,
    point,
    router_load,
    sample_before,
    take_sample,
    waiting_requests,
    worker_status,
)
from twostep.cluster.prediction import Candidate, MeanLoad, Snapshot
from twostep.cluster.records import GpuLoad, WorkerLoad
from twostep.errors import STATUS, ResourceExhausted
from twostep.metrics.registry import MetricsRegistry
from twostep.metrics.router import RouterGauges, RouterMetrics
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import status_pb2, status_pb2_grpc
from twostep.step_curve import StepCurve

_IDLE = RouterGauges(num_running=0, num_waiting=0, num_streams=0, workers={})
_CURVE = StepCurve(fixed_s=0.010, per_row_s=1e-4, per_sequence_s=1e-4, per_context_s=1e-7)
_RECORD = worker_record("w0", epoch=7, curve=_CURVE)

# ---- percentiles -----------------------------------------------------------------------------------------------------------

_BOUNDS = (0.1, 0.2, 0.5, 1.0, 2.5)


def buckets_of(values: list[float]) -> Buckets:
    counts = [0] * (len(_BOUNDS) + 1)
    for value in values:
        counts[bisect.bisect_left(_BOUNDS, value)] += 1
    return Buckets(_BOUNDS, tuple(counts))


@given(st.lists(st.floats(0.001, 4.0), min_size=1, max_size=100), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_observation_of_its_rank(values: list[float], share: float) -> None:
    found = buckets_of(values).quantile(share)
    observed = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    index = bisect.bisect_left(_BOUNDS, observed)
    low, high = (_BOUNDS[index - 1] if index else 0.0), (_BOUNDS[index] if index < len(_BOUNDS) else _BOUNDS[-1])
    assert low - 1e-9 <= found <= high + 1e-9 or (index == len(_BOUNDS) and found == _BOUNDS[-1])


@given(st.lists(st.floats(0.001, 4.0), max_size=50), st.lists(st.floats(0.001, 4.0), max_size=50))
def test_what_came_since_is_what_was_observed_since(before: list[float], after: list[float]) -> None:
    assert buckets_of(before + after).since(buckets_of(before)) == buckets_of(after)


def test_no_observations_no_quantile() -> None:
    assert (Buckets().quantile(0.5), buckets_of([]).quantile(0.99)) == (0.0, 0.0)


# ---- samples ---------------------------------------------------------------------------------------------------------------


def counted() -> RouterMetrics:
    metrics = RouterMetrics(MetricsRegistry(), lambda: _IDLE)
    metrics.requests.labels("OK", "stop", "standard").inc(5)
    metrics.requests.labels("CANCELLED", "", "standard").inc(2)
    metrics.requests.labels("UNAVAILABLE", "", "batch").inc(3)
    metrics.prompt_tokens.inc(700)
    metrics.cached_tokens.inc(300)
    metrics.slo.labels("interactive").inc(4)
    metrics.slo_attained.labels("interactive").inc(3)
    metrics.placements.labels("local", "decode", "near").inc(1)
    metrics.placements.labels("local", "prefill", "cheaper").inc(2)
    metrics.placements.labels("handed_over", "prefill", "cheaper").inc(6)
    metrics.num_generation_tokens = 90
    for seconds in (0.12, 0.12, 0.12, 0.8, 1000.0):
        metrics.ttft.observe(seconds)
    metrics.itl.observe(0.012)
    metrics.tpot.observe(0.018)
    metrics.queue.labels("standard").observe(0.04)
    metrics.queue.labels("batch").observe(2.0)
    return metrics


def test_a_sample_is_what_the_metrics_have_counted() -> None:
    sample = take_sample(counted(), at=3.0)
    assert (sample.requests, sample.failures, sample.started) == (10, 3, 5)
    assert (sample.handed_over, sample.local, sample.local_on_prefill) == (6, 3, 2)
    assert (sample.prompt_tokens, sample.cached_tokens, sample.generation_tokens) == (700, 300, 90)
    assert (sample.slo, sample.slo_attained) == (4, 3)
    assert (sample.times["ttft"].total, sample.times["itl"].total, sample.times["queue"].total) == (5, 1, 2)
    assert 0.1 < sample.times["ttft"].quantile(0.5) <= 0.15
    assert sample.times["ttft"].quantile(0.99) == 600.0, "above all bounds"
    assert 0.01 < sample.times["itl"].quantile(0.5) <= 0.015
    assert 0.015 < sample.times["tpot"].quantile(0.5) <= 0.02
    assert 1.5 < sample.times["queue"].quantile(0.99) <= 2.5


@given(st.sampled_from(sorted({status.grpc for status in STATUS.values()})))
def test_a_request_that_no_system_would_serve_is_no_failure(status: str) -> None:
    metrics = counted()
    before = take_sample(metrics, at=0.0)
    metrics.requests.labels(status, "", "standard").inc()
    after = take_sample(metrics, at=1.0)
    refused = status in ("CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED")
    assert (after.requests - before.requests, after.failures - before.failures) == (1, 0 if refused else 1)


def test_load_is_what_came_between_two_samples() -> None:
    metrics = counted()
    before = take_sample(metrics, at=10.0)
    metrics.requests.labels("OK", "length", "standard").inc(8)
    metrics.requests.labels("INTERNAL", "", "standard").inc(2)
    metrics.num_generation_tokens += 400
    metrics.prompt_tokens.inc(1000)
    metrics.cached_tokens.inc(250)
    metrics.slo.labels("interactive").inc(4)
    metrics.slo_attained.labels("interactive").inc(1)
    metrics.ttft.observe(0.06)
    metrics.ttft.observe(0.06)
    after = take_sample(metrics, at=14.0)
    state = RouterGauges(num_running=3, num_waiting=2, num_streams=1, workers={})
    load = router_load(before, after, state, RoleLoad(prefill_s=1.5, decode_s=1.0, num_prefill=2, num_decode=4))
    assert (load.window_s, load.num_running, load.num_waiting, load.num_streams) == (4.0, 3, 2, 1)
    assert (load.requests_per_s, load.failures_per_s) == (2.5, 0.5)
    assert (load.prompt_tokens_per_s, load.cached_tokens_per_s, load.generation_tokens_per_s) == (250, 62.5, 100)
    assert load.slo_attainment == 0.25
    assert (load.prefill_decode_load_ratio, load.prompt_work_s, load.answer_work_s) == (1.5, 3.0, 4.0)
    assert 0.05 < load.ttft_s.p50 < load.ttft_s.p99 <= 0.075
    assert load.itl_s == status_pb2.Percentiles(), "none came"
    waiting = waiting_requests(before, after, 2)
    assert waiting == WaitingRequests(num_requests=2, prompt_tokens=500, answer_tokens=200)


def test_nothing_is_said_of_what_was_not_there() -> None:
    load = router_load(CounterSample(at=1.0), CounterSample(at=1.0), _IDLE, RoleLoad())
    assert not load.HasField("slo_attainment")
    assert not load.HasField("prefill_decode_load_ratio")
    assert (load.window_s, load.requests_per_s) == (0, 0)
    assert waiting_requests(CounterSample(at=1.0), CounterSample(at=2.0), 7) == WaitingRequests(num_requests=7)


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=40), st.floats(0.5, 60.0))
def test_the_sample_before_is_the_latest_that_is_old_enough(gaps: list[float], seconds: float) -> None:
    at, samples = 0.0, []
    for gap in gaps:
        at += gap
        samples.append(CounterSample(at=at))
    found = sample_before(samples, seconds)
    old_enough = [s for s in samples if at - s.at >= seconds]
    assert found == (old_enough[-1] if old_enough else samples[0])


# ---- workers ---------------------------------------------------------------------------------------------------------------


def test_a_workers_status_is_its_record() -> None:
    gpus = (GpuLoad(memory_used=3, memory_total=8, utilization=0.5), GpuLoad(memory_used=-1, memory_total=8))
    load = WorkerLoad(num_running=3, num_free_blocks=10, num_context_tokens=2**40, tokens_per_s=7.5, fetched_bytes_per_s=3e9, gpus=gpus)
    told = worker_status(dataclasses.replace(_RECORD, draining=True, transports=("ray", "local"), load=load))
    assert (told.worker_id, told.role, told.epoch, told.draining, list(told.transports)) == ("w0", "decode", 7, True, ["ray", "local"])
    assert (told.num_running, told.num_blocks, told.num_free_blocks, told.num_context_tokens) == (3, 1000, 10, 2**40)
    assert (told.tokens_per_s, told.fetched_bytes_per_s) == (7.5, 3e9)
    known, part = told.gpus
    assert (known.utilization, known.memory_used, known.memory_total) == (0.5, 3, 8)
    assert (part.HasField("utilization"), part.memory_used) == (False, 0)


def test_prompts_that_a_worker_computes_for_others_do_not_decode_there() -> None:
    load = WorkerLoad(
        num_running=5, num_handing_over=2, kept_per_s=1.5, handed_over_per_s=2.5, taken_over_per_s=0.5, prompt_tokens_per_s=9.0
    )
    both = worker_status(dataclasses.replace(_RECORD, role="prefill", both_roles=True, load=load, engine_pid=4711))
    assert (both.role, both.both_roles, both.num_decoding, both.engine_pid) == ("prefill", True, 3, 4711)
    assert (both.kept_per_s, both.handed_over_per_s, both.taken_over_per_s, both.prompt_tokens_per_s) == (1.5, 2.5, 0.5, 9.0)
    fixed = worker_status(dataclasses.replace(_RECORD, role="prefill", load=load))
    assert (fixed.both_roles, fixed.num_decoding) == (False, 0)


@given(st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70))
def test_one_worker_that_says_nonsense_does_not_hide_the_others(small: int, large: int) -> None:
    told = worker_status(dataclasses.replace(_RECORD, epoch=large, load=WorkerLoad(num_running=small, num_context_tokens=large)))
    assert told.num_running == min(max(small, 0), 2**32 - 1)
    assert told.num_context_tokens == min(max(large, 0), 2**64 - 1)


def test_a_point_of_the_history() -> None:
    busy = dataclasses.replace(
        _RECORD,
        load=WorkerLoad(num_free_blocks=250, num_running=4, queried_tokens_per_s=300.0, hit_tokens_per_s=60.0, fetched_bytes_per_s=5.0),
    )
    prefill = dataclasses.replace(busy, role="prefill", worker_id="p0", load=WorkerLoad(num_free_blocks=1000, queried_tokens_per_s=100.0))
    metrics = counted()
    samples = [CounterSample(at=0.0), take_sample(metrics, at=4.0)]
    told = point(samples, _IDLE, RoleLoad(), [busy, prefill], 1e9)
    assert told["hit_rate"] == 0.15
    assert (told["decode_kv_usage"], told["prefill_kv_usage"]) == (0.75, 0.0)
    assert (told["decode_running"], told["decode_workers"], told["prefill_workers"]) == (4, 1, 1)
    assert told["fetched_bytes_per_s"] == 5.0
    assert told["slo_attainment"] == 0.75
    assert told["prefill_decode_load_ratio"] is None
    assert told["requests_per_s"] == 2.5
    quiet = point([CounterSample(at=0.0), CounterSample(at=1.0)], _IDLE, RoleLoad(), [], 1e9)
    assert quiet["ttft_s_p50"] is quiet["hit_rate"] is quiet["decode_kv_usage"] is quiet["slo_attainment"] is None
    assert set(quiet) == set(told)
    table = columns([told, quiet])
    assert table["requests_per_s"] == [2.5, 0]
    assert {len(values) for values in table.values()} == {2}
    assert columns([]) == {}


# ---- prefill against decode ------------------------------------------------------------------------------------------------


def prefill(queued: float = 0.0, **record: Any) -> Candidate:
    made = dataclasses.replace(_RECORD, **({"role": "prefill", "worker_id": "p"} | record))
    return Candidate(record=made, mean=MeanLoad(queued_tokens=queued))


def decode(seqs: float = 0.0, queued: float = 0.0, **record: Any) -> Candidate:
    load = WorkerLoad(num_running=int(seqs), num_context_tokens=int(seqs) * 100, num_free_blocks=500)
    return Candidate(record=dataclasses.replace(_RECORD, **({"load": load} | record)), mean=MeanLoad(queued_tokens=queued, num_seqs=seqs))


def test_without_work_there_is_no_ratio() -> None:
    assert role_load(Snapshot(prefill=[], decode=[])).ratio is None
    assert role_load(Snapshot(prefill=[prefill()], decode=[decode()])).ratio is None
    assert role_load(Snapshot(prefill=[prefill(1e-2)], decode=[decode(1e-6)])) == RoleLoad(), "means never quite end"


def test_prefill_work_is_the_time_of_its_steps() -> None:
    for queued, fixed in ((1024.0, 2 * _CURVE.fixed_s), (64.0, _CURVE.fixed_s / 4)):
        found = role_load(Snapshot(prefill=[prefill(queued)], decode=[decode()]), WaitingRequests(prompt_tokens=256.0))
        assert found.prefill_s == pytest.approx(fixed + queued * _CURVE.per_row_s)
        assert found.decode_s == 0


def test_prompts_that_no_heartbeat_tells_of_are_known_to_the_router() -> None:
    told = prefill(512.0)
    own = dataclasses.replace(told, mean=MeanLoad(own_queued_tokens=512.0))
    assert role_load(Snapshot(prefill=[own], decode=[])) == role_load(Snapshot(prefill=[told], decode=[]))


def test_decode_work_is_the_rest_of_the_answers_at_the_rate_of_a_full_batch() -> None:
    found = role_load(Snapshot(prefill=[prefill()], decode=[decode(10.0)]), WaitingRequests(answer_tokens=200.0))
    # 64 sequences of 100 tokens fit.
    assert found.decode_s == pytest.approx(10 * 100 * _CURVE.decode_step_s(64, 6400) / 64)
    # A pool of 2000 tokens holds 20 of them.
    small = decode(10.0, num_blocks=125)
    assert role_load(Snapshot(prefill=[], decode=[small]), WaitingRequests(answer_tokens=200.0)).decode_s == pytest.approx(
        10 * 100 * _CURVE.decode_step_s(20, 2000) / 20
    )


def test_work_is_shared_by_those_who_take_new_work() -> None:
    one = role_load(Snapshot(prefill=[prefill(1000.0)], decode=[decode(8.0)]))
    two = role_load(Snapshot(prefill=[prefill(1000.0), prefill()], decode=[decode(8.0), decode(), decode(draining=True)]))
    assert two.prefill_s == pytest.approx(one.prefill_s / 2)
    assert two.decode_s == pytest.approx(one.decode_s / 2)


def test_an_overload_has_the_ratio_of_the_workload() -> None:
    """It does not matter whether work is waiting, queued or decoding, or which worker is full."""
    waiting = WaitingRequests(num_requests=10_000, prompt_tokens=512.0, answer_tokens=100.0)
    for snapshot in (
        Snapshot(prefill=[prefill(2048.0)], decode=[decode()]),
        Snapshot(prefill=[prefill()], decode=[decode(64.0)]),
    ):
        load = role_load(snapshot, waiting)
        intrinsic = role_load(Snapshot(prefill=[prefill()], decode=[decode()]), waiting)
        assert load.ratio == pytest.approx(intrinsic.ratio, rel=0.05)
    longer = role_load(Snapshot(prefill=[prefill()], decode=[decode()]), dataclasses.replace(waiting, answer_tokens=400.0))
    assert intrinsic.ratio is not None
    assert longer.ratio == pytest.approx(intrinsic.ratio / 4, rel=0.2)


def test_prompts_of_a_deployment_without_prefill_workers_are_decodes_work() -> None:
    load = role_load(Snapshot(prefill=[], decode=[decode()]), WaitingRequests(num_requests=5, prompt_tokens=512.0, answer_tokens=10.0))
    assert (load.prefill_s, load.ratio) == (0, 0)
    assert load.decode_s > 5 * 512 * 1e-4


def test_of_workers_that_do_both_work_is_counted_by_its_kind_and_once() -> None:
    """Whichever worker it is on: the roles only say among how many it is shared."""
    waiting = WaitingRequests(prompt_tokens=256.0, answer_tokens=200.0)
    apart = role_load(Snapshot(prefill=[prefill(1024.0)], decode=[decode(10.0)]), waiting)
    for queued in (0.0, 512.0, 1024.0):
        workers = [prefill(1024.0 - queued, both_roles=True), decode(10.0, queued, both_roles=True)]
        both = role_load(Snapshot(prefill=workers, decode=workers), waiting)
        assert (both.prefill_s, both.decode_s) == pytest.approx((apart.prefill_s, apart.decode_s))
    more = [*workers, decode(both_roles=True, worker_id="d1")]
    found = role_load(Snapshot(prefill=more, decode=more), waiting)
    assert (found.num_prefill, found.num_decode) == (1, 2)
    assert (found.prefill_s, found.decode_s) == pytest.approx((apart.prefill_s, apart.decode_s / 2))


_loads = st.floats(0.0, 1e5)


@given(_loads, st.floats(0.0, 200.0), st.integers(0, 100), _loads)
def test_ratios_are_finite_and_grow_with_what_waits_for_prefill(queued: float, seqs: float, num_waiting: int, more: float) -> None:
    waiting = WaitingRequests(num_requests=num_waiting)
    ratio = role_load(Snapshot(prefill=[prefill(queued)], decode=[decode(seqs)]), waiting).ratio
    higher = role_load(Snapshot(prefill=[prefill(queued + more)], decode=[decode(seqs)]), waiting).ratio
    assert ratio is None or 0.0 <= ratio <= 1000.0
    assert ratio is None or (higher is not None and higher >= ratio * (1 - 1e-9))


# ---- the whole of it ---------------------------------------------------------------------------------------------------------


async def test_grpc_and_http_tell_the_same(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_board, "_EVERY_S", 0.05)
    await cluster.prefill()
    await cluster.decode("d0")
    await cluster.decode("d1")
    async with cluster.serving(), aiohttp.ClientSession(f"http://127.0.0.1:{cluster.router.http_port}") as http:
        for _ in range(3):
            await cluster.ask(max_tokens=8)
        board = cluster.router.board
        await until(lambda: board.status().load.requests_per_s > 0, "the requests are counted")
        async with open_channel(f"127.0.0.1:{cluster.router.grpc_port}") as channel:
            told = await status_pb2_grpc.StatusStub(channel).GetStatus(status_pb2.StatusRequest(), timeout=30)
        assert [(w.worker_id, w.role) for w in told.workers] == [("d0", "decode"), ("d1", "decode"), ("p0", "prefill")]
        assert (told.model, told.draining, told.registry_connected) == ("m", False, True)
        assert told.router_id == cluster.router.router_id
        assert told.load.generation_tokens_per_s > 0
        assert told.load.handed_over_per_s > 0
        assert told.load.num_streams == 2
        assert 0 < told.load.ttft_s.p50 <= told.load.ttft_s.p95 <= told.load.ttft_s.p99
        async with http.get("/ui/api/status") as answer:
            assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
            same = ParseDict(await answer.json(), status_pb2.ClusterStatus())
        assert list(same.workers) == list(told.workers)
        async with http.get("/ui/api/history") as answer:
            table = (await answer.json())["columns"]
        assert sum(table["generation_tokens_per_s"]) > 0
        assert max(v for v in table["ttft_s_p50"] if v is not None) > 0
        assert table["prefill_workers"][-1] == 1


async def read_event(stream: aiohttp.StreamReader) -> dict[str, Any] | None:
    line = await asyncio.wait_for(stream.readline(), 60)
    if not line:
        return None
    assert line.startswith(b"data: ")
    assert await stream.readline() == b"\n"
    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return event


async def test_events_follow_what_happens_and_end_with_the_router(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_board, "_EVERY_S", 0.05)
    await cluster.prefill()
    slow = await cluster.decode()
    slow.script = Script(hold_at=50)
    go_on = slow.script.go_on
    async with (
        cluster.serving(),
        aiohttp.ClientSession(f"http://127.0.0.1:{cluster.router.http_port}") as http,
        http.get("/ui/api/events") as answer,
    ):
        assert answer.content_type == "text/event-stream"
        asked = asyncio.create_task(cluster.ask(max_tokens=200))
        async with asyncio.timeout(60):
            while (event := await read_event(answer.content)) is not None and event["status"]["load"]["num_running"] == 0:
                pass
        go_on.set()
        assert event is not None
        assert set(event) == {"status", "point"}
        await asked
        draining = asyncio.create_task(cluster.router.drain(1000.0))
        last = None
        while (event := await read_event(answer.content)) is not None:
            last = event
        assert last is not None
        assert last["status"]["draining"]
        # An open page does not hold up a drain.
        await asyncio.wait_for(draining, 60)


async def test_listeners_are_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_board, "MAX_LISTENERS", 2)
    async with cluster.serving():
        board = cluster.router.board
        async with aclosing(board.events()) as first:
            await anext(first)
            for _ in range(3):
                async with aclosing(board.events()) as second:
                    await anext(second)
                    with pytest.raises(ResourceExhausted) as refused:
                        await anext(board.events())
                    assert refused.value.retry_after_s == 5.0


async def test_the_history_is_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_board, "_EVERY_S", 0.002)
    monkeypatch.setattr(status_board, "HISTORY_POINTS", 20)
    async with cluster.serving():
        board = cluster.router.board
        await until(lambda: len(board.history_json()["columns"].get("unix_s", ())) == 20, "it is full")
        oldest = board.history_json()["columns"]["unix_s"][0]
        await until(lambda: board.history_json()["columns"]["unix_s"][0] > oldest, "the oldest goes")
        assert len(board.history_json()["columns"]["unix_s"]) == 20
