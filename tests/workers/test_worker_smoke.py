"""The short one of test_worker_processes.py: real processes, KV through a real Ray, and a worker that is killed."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from local_ray import LocalRay
from test_worker_processes import Pair, Process, routing, stubs_of, until_free, until_joined
from worker_harness import prompt_of

pytestmark = [pytest.mark.ray, pytest.mark.smoke]


async def test_kv_goes_through_ray_and_a_killed_worker_leaves_nothing(redis_url: str, tmp_path: Path) -> None:
    ray = LocalRay()
    ray.head.prepare()
    start = partial(Process, directory=tmp_path, redis_url=redis_url, ray=ray, flags=("--kv-transfer", "ray"))
    pair = Pair(start("prefill", name="smoke-prefill"), start("decode", name="smoke-decode"))
    try:
        await asyncio.to_thread(ray.start)
        async with stubs_of(pair.prefill, pair.decode) as stubs:
            await until_joined(pair, stubs)
            async with routing(stubs, "smoke") as router:
                answer = await router.generate("r", prompt_of(90), 12)
                answer.check(prompt_of(90), 12)
                assert answer.committed is not None
                assert answer.committed.transport == "ray"
                # Prefill dies while decode watches: a retryable failure within seconds, nothing left.
                await router.reserve("b", prompt_of(400), 20)
                ticket = (await router.run("b", prompt_of(400), 20).read()).accepted.ticket
                pair.prefill.kill()
                await router.attach("b", ticket)
                assert await router.failure("b") == ("UNAVAILABLE", True)
            await until_free(stubs, 1)
    finally:
        pair.kill()
        ray.stop()
