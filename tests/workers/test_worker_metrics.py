"""Tests of what a worker tells of its work: /metrics of its engine and its edge, and rates in its heartbeats. Ages are of real time."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scraping import Scrape, scrape
from worker_harness import BLOCK, WAIT_S, HeldRunner, Pair, expected, make_runner, prompt_of, routed, started, until

from twostep.cluster.records import LayoutRecord, WorkerLoad, WorkerRecord
from twostep.engine.types import EngineStats
from twostep.errors import InvalidRequest
from twostep.rpc.v1 import worker_pb2
from twostep.step_curve import StepCurve
from twostep.worker.config import WorkerConfig
from twostep.worker.engine_port import EnginePort
from twostep.worker.telemetry import Counts, RateMeter, Telemetry


def both(pair: Pair) -> tuple[Scrape, Scrape]:
    return scrape(pair.prefill_worker.telemetry.port), scrape(pair.decode_worker.telemetry.port)


async def decode_until(pair: Pair, condition: Callable[[Scrape], bool]) -> Scrape:
    """The decode worker's metrics once they say so; each scrape blocks the event loop."""
    told: list[Scrape] = []

    def there() -> bool:
        told[:] = [scrape(pair.decode_worker.telemetry.port)]
        return condition(told[0])

    await until(there, "the metrics never came to say so")
    return told[0]


async def test_engine_figures_of_both_roles(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        for name in ("a", "b"):
            assert (await router.generate(name, prompt_of(41), 20)).tokens == expected(prompt_of(41), 20)
        await pair.settled()
        prefill, decode = both(pair)
        # The second prompt's first 40 tokens were cached.
        assert prefill("twostep_engine_tokens_total", role="prefill", kind="prefill") == 41 + 1
        assert prefill("twostep_engine_tokens_total", role="prefill", kind="decode") == 0
        assert prefill("twostep_prefix_cache_queries_total", role="prefill") == 82
        assert prefill("twostep_prefix_cache_hits_total", role="prefill") == 40
        # The first of 20 tokens is the prefill worker's. Each other one is computed here, from the first one on.
        tokens = decode("twostep_engine_tokens_total", role="decode")
        assert tokens == 2 * 19
        assert decode("twostep_prefix_cache_hits_total", role="decode") == 40
        steps = decode("twostep_engine_steps_total", role="decode")
        assert steps is not None
        assert steps >= 19
        durations = decode("twostep_engine_step_duration_seconds_count", role="decode")
        assert durations is not None
        assert 19 <= durations <= steps
        for told, role in ((prefill, "prefill"), (decode, "decode")):
            assert told("twostep_process_info", role=role) == 1
            for family in ("num_requests_running", "num_requests_waiting", "num_requests_reserved", "num_requests_held"):
                assert told(f"twostep_{family}", role=role) == 0
            assert told("twostep_kv_cache_usage_ratio", role=role) == 0
            assert told("twostep_kv_cache_blocks", role=role) == 256
            assert told("twostep_kv_cache_blocks", role=role, state="used") == 0
            assert told("twostep_engine_stalled_seconds", role=role) == 0
            assert told("twostep_num_preemptions_total", role=role) == 0


@pytest.mark.system
async def test_what_is_under_way_shows(redis_url: str) -> None:
    runner = HeldRunner()
    async with started(redis_url, decode_runner=runner, decode_options={"lease_ttl": 10 * WAIT_S}) as pair, routed(pair) as router:
        prompt = prompt_of(40)
        # Reserved and never attached: a hand-over that does not come about.
        await router.reserve("hangs", prompt, 4)
        running = asyncio.create_task(router.generate("runs", prompt_of(40, seed=2), 400))
        # The edge's figures are asked for once a second: some are of the moment before this one runs.
        decode = await decode_until(
            pair,
            lambda told: (
                told("twostep_num_requests_running") == 1
                and (told("twostep_kv_oldest_lease_seconds") or 0) > 0.5
                and (told("twostep_kv_leases", role="decode"), told("twostep_worker_sequences", role="decode")) == (1, 2)
            ),
        )
        assert decode("twostep_num_requests_reserved", role="decode") == 1
        assert decode("twostep_worker_streams", role="decode") == 1
        assert decode("twostep_worker_ready", role="decode") == 1
        assert decode("twostep_kv_transport_ready", role="decode", transport="local") == 1
        used = decode("twostep_kv_cache_blocks", role="decode", state="used")
        assert used is not None
        assert used >= 2 * 40 // BLOCK
        assert decode("twostep_kv_cache_usage_ratio", role="decode") == pytest.approx(used / 256, abs=0.05)
        running.cancel()
        await asyncio.wait([running])
        await router.cancel("runs")
        await router.cancel("hangs")


async def test_figures_that_cannot_be_had_once_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twostep.worker.telemetry._SAMPLE_EVERY_S", 0.01)
    config = WorkerConfig(role="prefill", host="127.0.0.1", metrics_port=0)
    telemetry = Telemetry(config, cast("EnginePort", SimpleNamespace(stats=lambda: None, pid=0)), "worker")
    calls, filled = 0, asyncio.Event()

    def describe() -> worker_pb2.WorkerStats:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise RuntimeError("the table changed while it was read")
        return worker_pb2.WorkerStats()

    async def fill(stats: worker_pb2.WorkerStats) -> None:
        filled.set()

    telemetry.start(describe, fill)
    try:
        async with asyncio.timeout(WAIT_S):
            await filled.wait()
    finally:
        await telemetry.close()
    assert [record.levelname for record in caplog.records if "the table changed" in record.getMessage()].count("WARNING") == 1


@pytest.mark.parametrize("own_process", [False, True])
async def test_the_memory_of_the_engines_process_is_told_where_it_has_one(own_process: bool) -> None:
    config = WorkerConfig(role="decode", host="127.0.0.1", metrics_port=0)
    stats = EngineStats(
        num_running=0, num_waiting=0, num_reserved=0, num_held=0, num_blocks=1, num_free_blocks=1, num_cached_blocks=0, steps=0
    )
    engine = SimpleNamespace(stats=lambda: stats, pid=os.getpid() if own_process else 0)
    telemetry = Telemetry(config, cast("EnginePort", engine), "worker")

    async def fill(stats: worker_pb2.WorkerStats) -> None:
        """There is no edge."""

    telemetry.start(worker_pb2.WorkerStats, fill)
    try:
        told: list[Scrape] = []

        def sampled() -> bool:
            told[:] = [scrape(telemetry.port)]
            return told[0]("twostep_worker_ready") is not None

        await until(sampled, "nothing was told")
        memory = told[0]("twostep_engine_process_resident_memory_bytes", role="decode")
        assert (memory is not None and memory > 10 << 20) if own_process else memory is None
    finally:
        await telemetry.close()


# ---- heartbeats ---------------------------------------------------------------------------------------------------------------

_LAYOUT = LayoutRecord(model_fingerprint="m", dtype="float32", block_size=16, num_layers=2, num_kv_heads=2, head_dim=8)
_RECORD = WorkerRecord(
    worker_id="d0",
    role="decode",
    address="127.0.0.1:1",
    epoch=7,
    model="m",
    layout=_LAYOUT,
    hash_unit=64,
    secret_check="x",
    num_blocks=16,
    max_num_seqs=4,
    max_model_len=256,
    load=WorkerLoad(num_running=3, tokens_per_s=12.5, fetched_bytes_per_s=1e9, queried_tokens_per_s=100.0, hit_tokens_per_s=75.0),
    curve=StepCurve(fixed_s=0.01, per_row_s=1e-5),
)


def test_what_was_longer_ago_than_the_window_is_forgotten() -> None:
    meter = RateMeter(window_s=10.0)
    meter.observe(Counts(), 0.0)
    assert meter.observe(Counts(tokens=1000), 1.0).tokens == 1000
    assert meter.observe(Counts(tokens=1000), 5.0).tokens == 200
    rates = [meter.observe(Counts(tokens=1000), float(second)).tokens for second in range(6, 12)]
    assert rates == pytest.approx([1000 / 6, 1000 / 7, 125, 1000 / 9, 100, 0])


def test_a_new_edge_that_counts_from_zero_takes_nothing_away() -> None:
    """A change of roles makes a new edge; the engine goes on counting."""
    meter = RateMeter(window_s=10.0)
    meter.observe(Counts(fetched_bytes=10_000, tokens=5), 0.0)
    meter.observe(Counts(fetched_bytes=10_400, tokens=6), 1.0)
    rates = meter.observe(Counts(fetched_bytes=100, tokens=7), 2.0)
    assert (rates.fetched_bytes, rates.tokens) == (250, 1)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 10**6)), min_size=2, max_size=200))
def test_rates_are_what_was_counted_since_some_heartbeat(steps: list[tuple[float, int]]) -> None:
    """Against the definition, from all that was ever observed; and what is kept is bounded."""
    meter, now, total = RateMeter(window_s=10.0), 0.0, 0
    seen: list[tuple[float, int]] = []
    for gap, more in steps:
        now, total = now + gap, total + more
        rate = meter.observe(Counts(tokens=total), now).tokens
        possible = [(total - before) / (now - then) for then, before in seen if now > then]
        seen.append((now, total))
        assert rate == 0 or any(rate == pytest.approx(p) for p in possible)
        # The history is bounded: there is no other way to see it.
        assert len(meter._seen) <= 10.0 / 0.25 + 3


def test_a_record_goes_there_and_back() -> None:
    assert WorkerRecord.from_json(_RECORD.to_json()) == _RECORD


def test_a_layout_that_says_more_is_refused() -> None:
    """It may change what the bytes of the KV mean."""
    raw = json.loads(_RECORD.to_json())
    raw["layout"]["interleaved"] = True
    with pytest.raises(InvalidRequest, match="interleaved"):
        WorkerRecord.from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["3", "[]", "null", '"d0"', "{}"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        WorkerRecord.from_json(text)
    for part in ("load", "curve"):
        with pytest.raises(InvalidRequest):
            WorkerRecord.from_json(json.dumps(json.loads(_RECORD.to_json()) | {part: json.loads(text) or 3}))


# ---- of real workers -------------------------------------------------------------------------------------------------------


async def test_heartbeats_tell_what_was_computed_found_and_fetched(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever all this takes, it is in the window.
    monkeypatch.setattr("twostep.worker.telemetry.RateMeter", partial(RateMeter, window_s=10 * WAIT_S))
    async with started(redis_url) as pair, routed(pair) as router:
        for name in ("a", "b"):
            await router.generate(name, prompt_of(41), 20)
        await pair.settled()
        prefill, decode = pair.prefill_worker.record().load, pair.decode_worker.record().load
        assert prefill.tokens_per_s > 0
        # The second prompt's first 40 of 41 tokens were cached, and those of both were looked up.
        assert prefill.hit_tokens_per_s == pytest.approx(prefill.queried_tokens_per_s * 40 / 82)
        assert prefill.fetched_bytes_per_s == 0
        # Two sequences in the same time as 38 tokens were decoded.
        assert decode.taken_over_per_s == pytest.approx(decode.tokens_per_s * 2 / 38)
        assert prefill.handed_over_per_s > 0
        assert decode.kept_per_s == decode.handed_over_per_s == prefill.kept_per_s == prefill.taken_over_per_s == 0
        assert decode.tokens_per_s > 0
        block_bytes = make_runner().kv_shape.block_bytes
        # All 11 blocks of the first prompt, and the last one of the second, in the same time as 38 tokens were decoded.
        assert decode.fetched_bytes_per_s == pytest.approx(decode.tokens_per_s * 12 * block_bytes / 38)
