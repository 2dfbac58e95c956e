"""Two workers that take work of both roles at once: KV goes both ways, and what ends one way leaves the other alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from one_sided import OneSidedHub
from worker_harness import (
    WAIT_S,
    HeldRunner,
    MakeTransports,
    RouterDouble,
    local_transports,
    make_runner,
    one_sided_transports,
    prompt_of,
    refused,
    routed,
    started,
    turned,
    until,
)

from kv_transfer.local.transport import LocalHub

BOTH = {"fixed_roles": False}
TRANSPORTS = [
    pytest.param(lambda: local_transports(LocalHub()), id="copied-out"),
    pytest.param(lambda: one_sided_transports(OneSidedHub()), id="one-sided"),
]


@asynccontextmanager
async def both_ways(redis_url: str, **options: object) -> AsyncIterator[tuple[RouterDouble, RouterDouble]]:
    """A router of each direction; nothing is held once they end."""
    async with (
        started(redis_url, prefill_options=BOTH, decode_options=BOTH, **options) as pair,  # type: ignore[arg-type]
        turned(pair) as back,
        routed(pair, "there") as there,
        routed(back, "back") as here,
    ):
        yield there, here


@pytest.mark.parametrize("transports", TRANSPORTS)
async def test_kv_goes_both_ways_at_once_beside_prompts_that_stay(redis_url: str, transports: Callable[[], MakeTransports]) -> None:
    async with both_ways(redis_url, make_transports=transports()) as routers:
        cases = [(router, n, prompt_of(40 + 9 * n, seed=n % 5)) for n, router in enumerate(itertools.islice(itertools.cycle(routers), 12))]

        async def answer(router: RouterDouble, n: int, prompt: list[int]) -> None:
            generate = router.generate_here if n % 3 == 2 else router.generate
            (await generate(f"r{n}", prompt, 30)).check(prompt, 30)

        await asyncio.gather(*(answer(*case) for case in cases))
        there = routers[0].pair
        for worker in (there.prefill_worker, there.decode_worker):
            await until(lambda worker=worker: worker.edge.counts[1:] == (2, 4, 4), "kept, handed over and taken over are counted")


async def test_what_is_cancelled_one_way_leaves_the_other_alone(redis_url: str) -> None:
    runners = [HeldRunner(), HeldRunner()]
    async with both_ways(redis_url, prefill_runner=runners[0], decode_runner=runners[1]) as (there, back):
        prompt = prompt_of(60)
        (call, _), rest = await there.begin("r", prompt, 20), asyncio.create_task(back.generate("s", prompt, 20))
        await until(lambda: there.pair.prefill_worker.engine.stats().num_running > 0, "one computes")
        await until(lambda: back.pair.prefill_worker.engine.stats().num_running > 0, "and so does the other")
        call.cancel()
        await there.cancel("r")
        for runner in runners:
            runner.let_go()
        (await rest).check(prompt, 20)


@pytest.mark.parametrize("drains", [0, 1])
async def test_a_worker_drains_of_both_kinds_of_work(redis_url: str, drains: int) -> None:
    runners = [HeldRunner(), HeldRunner()]
    async with both_ways(redis_url, prefill_runner=runners[0], decode_runner=runners[1]) as (there, back):
        prompt = prompt_of(60)
        running = [asyncio.create_task(router.generate(f"r{n}", prompt, 60)) for n, router in enumerate((there, back))]
        workers = there.pair.prefill_worker, there.pair.decode_worker
        # A prompt of each is computed by the other.
        await until(lambda: all(w.engine.stats().num_running and w.engine.stats().num_reserved for w in workers), "both work")
        worker = workers[drains]
        stopping = asyncio.create_task(worker.stop(WAIT_S))
        await until(lambda: worker.record().draining, "it drains")
        await refused((there, back)[drains].run("late", prompt, 4).read(), grpc.StatusCode.UNAVAILABLE)
        await refused((back, there)[drains].reserve("late", prompt, 4), grpc.StatusCode.UNAVAILABLE)
        for runner in runners:
            runner.let_go()
        for answer in await asyncio.gather(*running):
            answer.check(prompt, 60)
        await stopping


async def test_workers_that_wait_for_each_others_blocks_give_way(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pool is full of what is reserved for prompts of the other, which therefore cannot compute them."""
    monkeypatch.setattr("prefill_worker.hand_over._STUCK_S", 0.05)
    small = {"num_blocks": 16}
    async with both_ways(redis_url, prefill_runner=make_runner(**small), decode_runner=make_runner(**small)) as (there, back):
        prompt = prompt_of(40)
        for n, router in enumerate((there, back)):
            await router.reserve(f"r{n}", prompt, 8)
        calls = [router.run(f"r{n}", prompt, 8) for n, router in enumerate((there, back))]
        tickets = [(await call.read()).accepted.ticket for call in calls]
        for n, (router, ticket) in enumerate(zip((there, back), tickets, strict=True)):
            await router.attach(f"r{n}", ticket)
        answers = await asyncio.gather(*(router.rest(f"r{n}") for n, router in enumerate((there, back))))
        failed = [answer.failed for answer in answers if answer.failed is not None]
        assert failed, "one has given way"
        assert all(failure.retryable for failure in failed)
        for answer in answers:
            if answer.failed is None:
                answer.check(prompt, 8, first=1)
