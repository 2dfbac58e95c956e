"""A rolling update under load: no request fails, and every token is right. This is the short form, with the fake runner; `make rolling`
does all of it, with a model."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fleet import Fleet
from loads import SteadyLoad, fake_cases
from redis.asyncio import Redis
from rolling import LONG_S, SHORT_S, Stage, Update, differing

from router.access.sources import RedisKeys
from twostep import AsyncClient
from twostep.errors import Unauthenticated
from twostep.keys.api_keys import make_key, system_key
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.worker_role import who_is
from twostep.text.model_card import ModelCard

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

FLAGS = ("--runner", "fake", "--fake-step-ms", "15", "--num-blocks", "512")


# A pause of this process, clients and all, may let all answers end just before somebody leaves.
_MOST_TRIES = 4


async def until_moved(update: Update, name: str, work: Callable[[], Awaitable[object]]) -> Stage:
    """Does it until somebody else had to go on with an answer."""
    for _ in range(_MOST_TRIES):
        stage = await update.stage(name, work())
        if stage.num_moved:
            return stage
    raise AssertionError(f"{name}: in {_MOST_TRIES} times no answer was under way there")


@pytest.mark.usefixtures("alone")
async def test_each_role_and_redis_roll_under_load(tiny_llama_dir: Path) -> None:
    cases = fake_cases(ModelCard.load(tiny_llama_dir).vocab_size, 12, max_tokens=(60, 120))
    async with Fleet(tiny_llama_dir, flags=FLAGS) as fleet:
        drains_s = {
            "prefill-0": LONG_S,
            "prefill-1": LONG_S,
            "decode-0": LONG_S,
            "decode-1": SHORT_S,
            "router-0": SHORT_S,
            "router-1": LONG_S,
        }
        await fleet.start(drains_s)
        async with SteadyLoad(fleet.targets, cases, num_clients=6) as load:
            update = Update(fleet, load, print)
            patient = await update.stage("a prefill worker leaves, with time to drain", update.drain("prefill-0"))
            await until_moved(update, "a decode worker is restarted in place, without time", lambda: update.restart("decode-1"))

            async def leave() -> None:
                if "router-0" not in fleet.members:
                    await fleet.start({"router-0": SHORT_S})
                await update.drain("router-0")

            await until_moved(update, "a router leaves, without time", leave)
            await update.stage("Redis is restarted", update.restart_redis(down_s=0.5))
        await fleet.until_empty()
    assert differing(update.stages) == []
    assert patient.num_moved == 0


@pytest.mark.usefixtures("alone")
async def test_the_deployments_secret_changes_under_load(tiny_llama_dir: Path) -> None:
    """The procedure of docs/access.md: half of the processes at a time, and twice. No request fails, keys stay, and the former secret opens
    nothing in the end."""
    cases = fake_cases(ModelCard.load(tiny_llama_dir).vocab_size, 12, max_tokens=(30, 60))
    halves = [[f"{role}-{number}" for role in ("router", "prefill", "decode")] for number in (0, 1)]
    async with Fleet(tiny_llama_dir, flags=FLAGS, router_flags=("--api-keys", "redis")) as fleet:
        former = fleet.secret
        fleet.api_key, key = make_key()
        async with Redis.from_url(fleet.redis_url) as store:
            await RedisKeys(store, former).put(key)
            await fleet.start(dict.fromkeys(halves[0] + halves[1], LONG_S))
            async with SteadyLoad(fleet.targets, cases, num_clients=6, api_key=fleet.api_key) as load:
                update = Update(fleet, load, print)
                fleet.change_secret()
                for half in halves:
                    await update.stage(f"{', '.join(half)} accept both", fleet.restart(*half))
                fleet.forget_former_secret()
                for half in halves:
                    await update.stage(f"{', '.join(half)} accept the new one", fleet.restart(*half))
            # Somebody who has the former secret writes a key. Routers that know the next one have seen it.
            (forged, its_record), (later, its_own) = make_key(), make_key()
            await RedisKeys(store, former).put(its_record)
            await RedisKeys(store, fleet.secret).put(its_own)
        fleet.api_key = later
        await fleet.until_whole()
        for router, told in itertools.product(fleet.targets, (forged, system_key(former))):
            async with AsyncClient(router, api_key=told, max_retries=0) as client:
                with pytest.raises(Unauthenticated):
                    await client.models()
        with pytest.raises(Unauthenticated):
            async with channel_to_worker(fleet.members["decode-0"].address, former, caller="test") as channel:
                await who_is(channel)
        await fleet.until_empty()
    assert differing(update.stages) == []
