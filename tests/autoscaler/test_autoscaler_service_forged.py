"""What others write in Redis for the autoscaler to read, and routers whose clocks are wrong."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from service_harness import SECRET, SIGNER, Load, RedisServer, Writer, client, worker

from router.request.targets import Targets
from router.waiting.demand_meter import DemandMeter
from twostep.autoscaler.collect import ObservationCollector
from twostep.autoscaler.fleet import Fleet
from twostep.autoscaler.leadership import Leadership
from twostep.cluster.demand import demand_key, windows_to_read
from twostep.cluster.records import worker_key
from twostep.cluster.scaling import DECISION_KEY, LEASE_KEY, TOKEN_KEY, ScalingRecord
from twostep.cluster.shared_clock import SharedClock
from twostep.cluster.signed import DEMAND, Signer


def collector(redis: Any) -> ObservationCollector:
    return ObservationCollector(redis, Fleet("", {"prefill": 1.0, "decode": 1.0}), SECRET, span_s=60.0, look_again_s=0.0)


def decision(token: int) -> ScalingRecord:
    counts = {"prefill": 1, "decode": 1}
    return ScalingRecord(
        token=token, number=1, leader="a", at_s=time.time(), interval_s=1.0, replicas=counts, pods=counts, wanted=counts, victims=("d",)
    )


async def test_only_what_the_deployment_has_signed_is_acted_upon(writer: Writer) -> None:
    mine, seen = decision(3), collector(writer.redis)
    now_s = float((await writer.redis.time())[0])
    await writer.workers(worker("p", "prefill"))
    await writer.load(now_s, Load(requests=1))
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
    assert ((await seen.look()).records, (await seen.look()).num_refused) == ((), 1)
    # Demand that nobody metered, and a router's own in another window or name.
    windows = windows_to_read(now_s)
    told = (await writer.redis.hgetall(demand_key(windows[-1])))[b"router-0"]
    for window in windows:
        fields = {"made up": "[1000000]", "router-1": told, **({"router-0": told} if window != windows[-1] else {})}
        await writer.redis.hset(demand_key(window), mapping=fields)
    await writer.redis.hset(demand_key(windows[-2]), mapping={f"junk{number}": "x" * 5000 for number in range(3000)})
    assert (await seen.look()).demand.kept.requests < before.demand.kept.requests + Load(requests=1).totals().requests


async def test_a_token_that_is_put_beyond_all_others_bars_nobody(writer: Writer) -> None:
    one, two = (Leadership(writer.redis, name, SIGNER, ttl_s=3600.0) for name in "ab")
    assert await one.renew()
    before = one.token
    for nonsense in (1 << 62, "many", -1, "nan"):
        await writer.redis.set(TOKEN_KEY, nonsense)
        await writer.redis.delete(LEASE_KEY)
        assert not await two.renew() or two.token < 1 << 48
        two.saw(before)
        await two.release()
        assert await one.renew()
        assert await one.commit(replace(decision(one.token), leader="a"))
        assert one.token > before
        before = one.token


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
