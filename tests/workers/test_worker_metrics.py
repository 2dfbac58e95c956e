"""A worker's /metrics, of its engine and its edge, also while either is stuck. Ages are of real time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from scraping import Scrape, scrape
from worker_harness import BLOCK, WAIT_S, HeldRunner, Pair, expected, prompt_of, routed, started, until

from twostep.engine.engine import Engine
from twostep.rpc.v1 import worker_pb2
from twostep.worker.config import WorkerConfig
from twostep.worker.telemetry import Telemetry


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


@pytest.mark.system
async def test_both_sides_of_a_hand_over_and_one_that_hangs(redis_url: str) -> None:
    async with started(redis_url) as pair, routed(pair) as router:
        answer = await router.generate("a", prompt_of(41), 4)
        assert answer.committed is not None
        # A prompt that no decode worker ever asks for.
        call = router.run("hangs", prompt_of(20, seed=2), 4)
        await call.read()

        def one_hangs() -> bool:
            # Each is asked at a moment of its own.
            oldest = [told("twostep_kv_oldest_lease_seconds") or 0 for told in both(pair)]
            return oldest[0] > 0.5 and oldest[1] == 0

        await until(one_hangs)
        prefill, decode = both(pair)
        assert prefill("twostep_kv_leases", role="prefill") == 1
        call.cancel()
        await pair.settled()
        prefill, decode = both(pair)
        moved = {"transport": "local", "direction": "fetch"}
        assert decode("twostep_kv_transfers_total", status="ok", **moved) == 1
        assert decode("twostep_kv_transfer_bytes_total", **moved) == answer.committed.bytes > 0
        assert decode("twostep_kv_transfer_chunks_total", **moved) == answer.committed.chunks
        assert decode("twostep_kv_transfer_blocks_total", **moved) == answer.committed.blocks_moved
        assert decode("twostep_kv_transfer_exposed_seconds_sum", **moved) == pytest.approx(answer.committed.fetch_s)
        for name in ("queue_seconds", "copy_seconds", "duration_seconds"):
            assert decode(f"twostep_kv_transfer_{name}_count", **moved) == 1
        assert decode("twostep_kv_transfer_bytes_per_second_count", transport="local") == 1
        assert decode("twostep_kv_transfer_scatter_seconds_count", transport="local") == 1
        assert prefill("twostep_kv_transfers_total", direction="publish", transport="local", status="ok") == 1


async def test_figures_that_cannot_be_had_once_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("twostep.worker.telemetry._SAMPLE_EVERY_S", 0.01)
    config = WorkerConfig(role="prefill", host="127.0.0.1", metrics_port=0)
    telemetry = Telemetry(config, cast("Engine", SimpleNamespace(stats=lambda: None)), "worker")
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
