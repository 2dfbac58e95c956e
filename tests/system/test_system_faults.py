"""Processes die at night: requests are answered all the same or fail clearly within seconds, nothing leaks, and serving resumes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import System, running, wait_until

from twostep import AsyncClient, AsyncGeneration, TwostepError, Unavailable

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT = list(range(2, 202))


@pytest.fixture(scope="module")
def system(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Two workers of each role, so that one can die and the other takes over; the fault tests share it, each leaves it whole."""
    with running(tiny_llama_dir, tmp_path_factory.mktemp("faults"), prefill=2, decode=2, extra=("--dtype", "float32")) as system:
        yield system


async def ask(client: AsyncClient, n: int, max_tokens: int = 200) -> tuple[int, ...]:
    prompt = [(t + n) % 200 + 2 for t in PROMPT]
    answer = await client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout=60).result()
    return answer.token_ids


async def under_fire(system: System, module: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...] | BaseException]]:
    """The same 12 requests twice: undisturbed, and with one worker of the role killed while they run."""
    async with AsyncClient(system.target) as client:
        calm = [await ask(client, n) for n in range(12)]
        tasks = [asyncio.create_task(ask(client, n)) for n in range(12)]
        await asyncio.sleep(0.3)
        system.workers(module)[0].kill()
        fired: list[tuple[int, ...] | BaseException] = list(await asyncio.gather(*tasks, return_exceptions=True))
    return calm, fired


@pytest.mark.parametrize("module", ["prefill_worker", "decode_worker"])
def test_a_killed_worker_is_replaced_by_another_attempt(system: System, module: str) -> None:
    calm, fired = asyncio.run(under_fire(system, module))
    assert calm == fired
    wait_until(lambda: system.serves(2, 2), timeout_s=60, what=f"the killed {module} is back")
    system.check_empty(timeout_s=60)
    system.check_store_empty()


def test_without_ray_unavailable_and_serving_resumes(system: System) -> None:
    wait_until(lambda: len(system.all_workers()) == 4 and system.serves(2, 2), timeout_s=60, what="all workers are there")
    system.check_empty(timeout_s=60)
    before = {worker.pid for worker in system.all_workers()}
    raylets = system.pids_of_program("raylet")
    assert raylets
    for pid in raylets:
        os.kill(pid, signal.SIGKILL)
    reasons: list[str] = []
    waits: list[float] = []

    def refused() -> bool:
        begin = time.monotonic()
        try:
            with system.client(max_retries=0) as client:
                client.generate(token_ids=PROMPT, max_tokens=4, timeout=30).result()
        except Unavailable as error:
            reasons.append(error.message)
            waits.append(time.monotonic() - begin)
        return bool(reasons)

    wait_until(refused, timeout_s=30, what="a request is refused while Ray is away")
    assert "ray" in reasons[0].lower()
    assert waits[0] < 15

    def answered() -> bool:
        try:
            with system.client(max_retries=0) as client:
                return len(client.generate(token_ids=PROMPT, max_tokens=4, ignore_eos=True, timeout=30).result().token_ids) == 4
        except Unavailable:
            return False

    wait_until(answered, timeout_s=120, what="serving resumes with Ray")
    assert {worker.pid for worker in system.all_workers()} == before, "a worker was lost with Ray"
    system.check_empty(timeout_s=60)


def test_losing_redis_does_not_stop_serving(system: System) -> None:
    redis = system.pids_of_program("redis-server") + system.pids_of_program("valkey-server")
    assert redis
    for pid in redis:
        os.kill(pid, signal.SIGSTOP)
    try:
        with system.client(max_retries=0) as client:
            end = time.monotonic() + 8  # longer than a record lives in Redis
            while time.monotonic() < end:
                begin = time.monotonic()
                client.generate(token_ids=PROMPT, max_tokens=4, ignore_eos=True, timeout=30).result()
                assert time.monotonic() - begin < 5
    finally:
        for pid in redis:
            os.kill(pid, signal.SIGCONT)
    for pid in redis:
        os.kill(pid, signal.SIGKILL)
    with system.client(max_retries=0) as client:
        client.generate(token_ids=PROMPT, max_tokens=4, ignore_eos=True, timeout=30).result()
    wait_until(lambda: system.serves(2, 2), timeout_s=60, what="the workers are registered again")
    system.check_empty(timeout_s=60)


async def first_piece(answer: AsyncGeneration) -> None:
    async for _ in answer:
        return


def test_cancel_frees_both_sides(system: System) -> None:
    async def cancel_at_all_moments() -> None:
        async with AsyncClient(system.target) as client:
            for n in range(20):
                answer = client.generate(token_ids=PROMPT, max_tokens=500, ignore_eos=True, timeout=60)
                task = asyncio.create_task(first_piece(answer))
                await asyncio.sleep(0.004 * n)
                if n % 2:
                    await task
                answer.cancel()
                try:
                    await task
                except (TwostepError, asyncio.CancelledError):
                    pass

    asyncio.run(cancel_at_all_moments())
    system.check_empty()
