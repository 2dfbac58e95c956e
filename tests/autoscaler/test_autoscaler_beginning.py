"""The first decision: it waits for workers that come up, whom nobody knows of, and not for ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from policy_fleet import config as policy_config
from policy_fleet import pool, traffic, workers
from service_harness import Clock, Load, RedisServer, Writer, config, eventually, keda, running, worker

from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import Observation
from twostep.autoscaler.policy import decide, why_wait
from twostep.cluster.records import WorkerRecord
from twostep.settings.autoscaler import PoolSettings

NOW = 10_000.0


def waits(prefill: int, decode: int, *, rate: float = 1.0, age_s: float = 1e4, looked_s: float = 0.0, ready: bool = True) -> str:
    """With a cold start of 60 s for prefill and 90 s for decode workers."""
    policy = policy_config(prefill=pool(cold_start_s=60.0), decode=pool(cold_start_s=90.0))
    there = tuple(replace(view, ready=ready) for view in workers(prefill, decode))
    seen = Observation(now_s=NOW, traffic=traffic(rate), workers=there, pods={"prefill": prefill, "decode": decode})
    decision = decide(policy, Memory(), seen).decision
    return why_wait(policy, seen, decision, oldest_s=NOW - age_s if there else None, since_s=NOW - looked_s)


def test_whoever_decides_first_knows_workers_of_both_roles() -> None:
    assert waits(0, 0).startswith("no prefill and no decode worker serves yet")
    assert waits(2, 0).startswith("no decode worker serves yet")
    assert waits(2, 2, ready=False).startswith("no prefill and no decode worker serves yet")
    assert waits(2, 2) == ""


def test_those_that_began_with_the_first_are_waited_for_unless_the_load_needs_more() -> None:
    assert "less than a cold start ago" in waits(2, 2, age_s=89.0)
    assert waits(2, 2, age_s=90.0) == ""
    assert waits(2, 2, age_s=1.0, rate=300.0) == ""
    assert waits(0, 2, age_s=1.0, rate=300.0), "what one of them can do is not known"


@pytest.mark.parametrize(("prefill", "decode"), [(0, 0), (2, 0), (2, 2)])
def test_nobody_is_waited_for_beyond_what_pods_take_to_come(prefill: int, decode: int) -> None:
    assert waits(prefill, decode, age_s=10.0, looked_s=209.0)
    assert waits(prefill, decode, age_s=10.0, looked_s=210.0) == ""


def young(clock: Clock, *names: str) -> list[WorkerRecord]:
    return [worker(name, "prefill" if name[0] == "p" else "decode", epoch=round((clock.now_s - 20.0) * 1e6)) for name in names]


async def test_a_cluster_that_comes_up_again_with_an_empty_redis_loses_no_pod_that_loads(
    redis_server: RedisServer, writer: Writer, tmp_path: Path
) -> None:
    """Four of each there were. They come one after the other, and only then is anybody told how many there should be."""
    clock = Clock()
    await writer.load(clock.now_s, Load(requests=1))
    pools = PoolSettings(max_workers=8, cold_start=60.0)
    settings = config(redis_server.url, tmp_path, interval=0.1, leader_lease=3600.0, stale_after=10_000, prefill=pools, decode=pools)
    async with running(settings, clock, look_again_s=0.001) as autoscaler, keda(autoscaler.port) as asked:

        async def looked() -> None:
            before = autoscaler.metrics.skipped.labels("workers")._value.get()
            await eventually(lambda: autoscaler.metrics.skipped.labels("workers")._value.get() > before + 1, "a look without a decision")
            assert await asked.refusal("prefill") is grpc.StatusCode.UNAVAILABLE

        await looked()
        names = ["p0", "d0", "p1", "p2", "d1", "p3", "d2", "d3"]
        records = young(clock, *names)
        for num in (1, 4, 8):
            await writer.workers(*records[:num])
            await looked()
        clock.now_s += 40.0
        await writer.load(clock.now_s, Load(requests=1))
        await eventually(lambda: autoscaler.board.record is not None, "the first decision")
        assert autoscaler.board.answer().pods == {"prefill": 4, "decode": 4}
        assert autoscaler.board.answer().replicas == {"prefill": 4, "decode": 4}, "a leader without a memory takes nothing away"
        # From here on it goes on from that: workers that are missed are pods to come.
        await writer.workers(*records[:1])
        number = autoscaler.board.answer().number
        clock.now_s += 1.0
        await writer.load(clock.now_s, Load(requests=1))
        await eventually(lambda: autoscaler.board.answer().number > number, "another decision")
        assert autoscaler.board.answer().replicas == {"prefill": 4, "decode": 4}


async def test_a_deployment_whose_workers_never_come_gets_its_decision(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    """Scaled to zero, say, with a request that waits."""
    clock = Clock()
    await writer.load(clock.now_s, Load(requests=1, queued=1))
    settings = config(
        redis_server.url,
        tmp_path,
        interval=0.1,
        leader_lease=3600.0,
        prefill=PoolSettings(cold_start=5.0),
        decode=PoolSettings(cold_start=5.0),
    )
    async with running(settings, clock, look_again_s=0.001) as autoscaler:
        await eventually(lambda: autoscaler.metrics.skipped.labels("workers")._value.get() > 0, "a look without a decision")
        clock.now_s += 40.0
        await writer.load(clock.now_s, Load(requests=1, queued=1))
        await eventually(lambda: autoscaler.board.record is not None, "a decision all the same")
        assert min(autoscaler.board.answer().replicas.values()) >= 1
