"""Tests of an autoscaler that sees only a part, or nothing: nobody is scaled in for what is missing. Records of strangers count for
nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from service_harness import SECRET, SIGNER, RedisServer, Scene, ToldLoad, Writer, client, count_of, decision, eventually, keda, worker

from router.request.targets import Targets
from router.waiting.demand_meter import DemandMeter
from twostep.autoscaler.collect import ObservationCollector
from twostep.autoscaler.fleet import Fleet
from twostep.cluster.demand import DemandTotals, demand_key, signed_totals, window_of, windows_to_read
from twostep.cluster.records import WORKERS_KEY, WorkerLoad, worker_key
from twostep.cluster.scaling import DECISION_KEY
from twostep.cluster.shared_clock import SharedClock
from twostep.cluster.signed import DEMAND, RECORDS, Signer
from twostep.errors import Unavailable
from twostep.keys.secret import secret_check
from twostep.settings.autoscaler import PoolSettings

ALL = (*(worker(f"p{number}", "prefill") for number in range(4)), *(worker(f"d{number}", "decode") for number in range(4)))


def collector(redis: Any, clock: Callable[[], float] | None = None) -> ObservationCollector:
    fleet = Fleet(secret_check(SECRET), {"prefill": 60.0, "decode": 60.0})
    return ObservationCollector(redis, fleet, SECRET, span_s=30.0, look_again_s=0.0, clock=clock)


class Between:
    """A connection that does something before each look at the workers."""

    def __init__(self, redis: Any, work: list[Callable[[], Awaitable[None]]]) -> None:
        self._redis, self._work = redis, work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    async def eval(self, *args: Any) -> Any:
        if self._work:
            await self._work.pop(0)()
        return await self._redis.eval(*args)


async def test_without_a_decision_to_go_on_from_it_waits_for_those_who_register(scene: Scene) -> None:
    """Redis has come back empty, and the leader is a new one."""
    await scene.load(ToldLoad(requests=20))
    waves = [lambda some=some: scene.writer.workers(*some) for some in (ALL[:1], ALL[:5], ALL)]
    seen = collector(Between(scene.writer.redis, waves), scene.clock)
    look = await seen.look()
    assert sorted(record.worker_id for record in look.records) == sorted(record.worker_id for record in ALL)
    assert seen.observation(look, None).pods == {"prefill": 4, "decode": 4}


async def test_workers_that_were_there_a_moment_ago_are_looked_for_again(scene: Scene) -> None:
    """Redis came back empty, and their next heartbeats fill it: just before the second look."""
    work: list[Callable[[], Awaitable[None]]] = []
    seen = collector(Between(scene.writer.redis, work), scene.clock)
    await scene.pair()
    await scene.writer.redis.set(DECISION_KEY, SIGNER.sign_object(decision(1).to_json()))
    assert len((await seen.look()).records) == 2
    work += [scene.writer.workers, scene.pair]
    assert [record.worker_id for record in (await seen.look()).records] == ["d", "p"]
    assert not work, "it has looked twice"
    await scene.writer.workers(worker("d", "decode"))
    assert [record.worker_id for record in (await seen.look()).records] == ["d"], "one that is gone for good"


async def test_workers_that_are_all_another_deployments_are_not_none(scene: Scene) -> None:
    strangers = [replace(record, secret_check="another") for record in ALL]
    await scene.writer.workers(*strangers)
    await scene.load(ToldLoad(requests=20))
    async with scene.running(interval=0.1) as autoscaler:
        await eventually(lambda: count_of(autoscaler.metrics.skipped, "workers") > 2, "looks without a decision")
        assert autoscaler.board.record is None
        await scene.writer.workers(*strangers[:2], *ALL[2:])
        await eventually(lambda: autoscaler.board.record is not None, "a decision by those that count")


async def test_what_was_wanted_counts_where_redis_has_forgotten_it(scene: Scene) -> None:
    """The same leader: workers that are back late are pods that are to come."""
    await scene.writer.workers(*ALL)
    await scene.load()
    async with scene.deciding() as autoscaler:
        await scene.writer.redis.flushall()
        await scene.writer.workers(*ALL[3:6])
        await autoscaler.leadership.renew()
        record = await scene.next(autoscaler)
        assert record.pods == record.replicas == {"prefill": 4, "decode": 4}


async def test_a_cluster_that_comes_up_again_with_an_empty_redis_loses_no_pod_that_loads(scene: Scene) -> None:
    """Four of each there were. They come one after the other, and only then is anybody told how many there should be."""
    await scene.load()
    pools = PoolSettings(max_workers=8, cold_start=60.0)
    records = [
        replace(record, epoch=round((scene.clock.now_s - 20.0) * 1e6)) for pair in zip(ALL[:4], ALL[4:], strict=True) for record in pair
    ]
    async with scene.running(interval=0.1, prefill=pools, decode=pools) as autoscaler, keda(autoscaler.port) as asked:
        for num in (0, 1, 4, 8):
            await scene.writer.workers(*records[:num])
            before = count_of(autoscaler.metrics.skipped, "workers")
            await eventually(lambda before=before: count_of(autoscaler.metrics.skipped, "workers") > before + 1, "looks without a decision")
            assert await asked.refusal("prefill") is grpc.StatusCode.UNAVAILABLE
        scene.clock.now_s += 40.0
        await scene.load()
        await eventually(lambda: autoscaler.board.record is not None, "the first decision")
        assert autoscaler.board.answer().pods == autoscaler.board.answer().replicas == {"prefill": 4, "decode": 4}


async def test_of_two_routers_one_is_cut_off(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Its windows end, nobody goes; it says that it leaves, and they go as ever."""
    busy = WorkerLoad(tokens_per_s=5000.0)
    fleet = [*(worker(f"p{number}", "prefill", load=busy) for number in range(4)), worker("d", "decode")]
    await scene.writer.workers(*fleet)
    await scene.load(routers=2)
    pools = {"prefill": PoolSettings(max_workers=4), "decode": PoolSettings(max_workers=1)}
    async with scene.deciding(cool_down=60.0, switch_roles=False, **pools) as autoscaler:
        assert [(await scene.next(autoscaler)).replicas["prefill"] for _ in range(6)] == [4] * 6
        assert "router-1 is silent" in caplog.text
        window = window_of(scene.clock.now_s) - 1
        last = signed_totals(Signer(SECRET, DEMAND), window, "router-1", DemandTotals(left=1))
        await scene.writer.redis.hset(demand_key(window), mapping={"router-1": last})
        await scene.writer.workers(*(replace(record, load=WorkerLoad()) for record in fleet))
        assert min([(await scene.next(autoscaler)).replicas["prefill"] for _ in range(6)]) < 4


# ---- what others write --------------------------------------------------------------------------------------------------


async def test_damaged_and_strange_records_cost_nobody_anything(scene: Scene) -> None:
    await scene.pair()
    await scene.writer.redis.sadd(WORKERS_KEY, "broken", "liar", "gone", b"\xff\xfe")
    await scene.writer.redis.set(worker_key("broken"), "{")
    await scene.writer.redis.set(worker_key("liar"), Signer(SECRET, RECORDS).sign_object(worker("p", "prefill").to_json()))
    for name, was, now in (("layout", '"head_dim":4', '"head_dim":4,"more":1'), ("lax", '"beat":0', '"beat":"1"')):
        await scene.writer.redis.sadd(WORKERS_KEY, name)
        text = worker(name, "decode").to_json()
        assert was in text
        await scene.writer.redis.set(worker_key(name), Signer(SECRET, RECORDS).sign_object(text.replace(was, now)))
    await scene.writer.redis.set(DECISION_KEY, "nonsense")
    async with scene.deciding() as autoscaler:
        seen = autoscaler.controller.observation
        assert seen is not None
        assert [view.worker_id for view in seen.workers] == ["d", "p"]


async def test_only_what_the_deployment_has_signed_is_acted_upon(writer: Writer) -> None:
    mine, seen = decision(3), collector(writer.redis)
    now_s = float((await writer.redis.time())[0])
    await writer.workers(worker("p", "prefill"))
    await writer.load(now_s, ToldLoad(requests=1))
    await writer.redis.set(DECISION_KEY, SIGNER.sign_object(mine.to_json()))
    before = await seen.look()
    assert ([record.worker_id for record in before.records], before.decision) == (["p"], mine)
    for forged in (replace(mine, token=1 << 60), replace(mine, victims=("p",))):
        await writer.redis.set(DECISION_KEY, forged.to_json())
        assert (await seen.look()).decision is None
        mac = json.loads(SIGNER.sign_object(mine.to_json()))["mac"]
        await writer.redis.set(DECISION_KEY, f'{forged.to_json()[:-1]},"mac":"{mac}"}}')
        assert (await seen.look()).decision is None
    await writer.redis.set(worker_key("p"), replace(worker("p", "prefill"), pod_owner="decode").to_json())
    look = await seen.look()
    assert (look.records, look.num_refused) == ((), 1)
    with pytest.raises(Unavailable, match="none of them counts"):
        seen.observation(look, None)
    # Demand that nobody metered, and a router's own in another window or name.
    windows = windows_to_read(now_s)
    told = (await writer.redis.hgetall(demand_key(windows[-1])))[b"router-0"]
    for window in windows:
        fields = {"made up": "[1000000]", "router-1": told, **({"router-0": told} if window != windows[-1] else {})}
        await writer.redis.hset(demand_key(window), mapping=fields)
    await writer.redis.hset(demand_key(windows[-2]), mapping={f"junk{number}": "x" * 5000 for number in range(3000)})
    assert (await seen.look()).demand.kept.requests < before.demand.kept.requests + ToldLoad(requests=1).totals().requests


async def test_a_router_whose_clock_is_an_hour_off_is_heard_all_the_same(redis_server: RedisServer) -> None:
    """Its demand came in windows that nobody read, and nothing was decided."""
    async with client(redis_server.url) as redis:
        for hours in (1, -1, 24 * 365):
            wrong = SharedClock(wall=lambda: time.time() + 3600 * hours)  # noqa: B023
            meter = DemandMeter(redis, f"router{hours}", Signer(SECRET, DEMAND), Targets(), lambda: 5, clock=wrong)
            await meter.exchange()  # in which it hears what time it is
            await meter.exchange()
        look = await collector(redis).look()
        assert (look.demand.num_routers, look.demand.queued, look.demand.silent) == (3, 15, ())
