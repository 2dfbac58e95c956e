"""Processes die at night: requests are answered all the same or fail clearly within seconds, nothing leaks, and serving resumes."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time

import pytest
from loads import cancel_at_all_moments, kill_under_load
from oracle import Oracle
from running import System, wait_until

from twostep import Unavailable
from twostep.cluster.records import HEARTBEAT_TTL_S

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT = list(range(2, 202))


# One of either role dies in test_system_both_ways.py too, where there are two ways to go on.
@pytest.mark.parametrize("module", ["prefill_worker", "decode_worker"])
def test_a_killed_worker_is_replaced_by_another_attempt(pairs: System, oracle: Oracle, module: str) -> None:
    is_whole = functools.partial(pairs.is_whole, 2, 2)
    asyncio.run(kill_under_load(pairs, oracle, module, is_whole=is_whole, seed=len(module)))
    wait_until(is_whole, timeout_s=180, what=f"the killed {module} is back")
    pairs.check_empty()
    pairs.check_store_empty()


def test_without_ray_unavailable_and_serving_resumes(pairs: System) -> None:
    before = {worker.pid for worker in pairs.all_workers()}
    raylets = pairs.pids_of_program("raylet")
    assert raylets
    reasons: list[str] = []
    waits: list[float] = []

    def refused() -> bool:
        begin = time.monotonic()
        try:
            with pairs.client(max_retries=0) as client:
                client.generate(token_ids=PROMPT, max_tokens=4, timeout=300).result()
        except Unavailable as error:
            reasons.append(error.message)
            waits.append(time.monotonic() - begin)
        return bool(reasons)

    with pairs.left_alone():
        for pid in raylets:
            os.kill(pid, signal.SIGKILL)
        wait_until(refused, timeout_s=60, what="a request is refused while Ray is away")
    assert "ray" in reasons[0].lower()
    assert waits[0] < 60, "long before its deadline"

    def answered() -> bool:
        try:
            with pairs.client(max_retries=0) as client:
                return len(client.generate(token_ids=PROMPT, max_tokens=4, ignore_eos=True, timeout=60).result().token_ids) == 4
        except Unavailable:
            return False

    wait_until(answered, timeout_s=180, what="serving resumes with Ray")
    assert {worker.pid for worker in pairs.all_workers()} == before, "a worker was lost with Ray"
    pairs.check_empty()


def test_losing_redis_does_not_stop_serving(pairs: System) -> None:
    redis = pairs.pids_of_program("redis-server") + pairs.pids_of_program("valkey-server")
    assert redis
    took: list[float] = []
    with pairs.client(max_retries=0) as client:

        def ask() -> None:
            begin = time.monotonic()
            client.generate(token_ids=PROMPT, max_tokens=4, ignore_eos=True, timeout=120).result()
            took.append(time.monotonic() - begin)

        for pid in redis:
            os.kill(pid, signal.SIGSTOP)
        try:
            # Longer than a record lives in Redis.
            end = time.monotonic() + HEARTBEAT_TTL_S + 1
            while time.monotonic() < end or len(took) < 3:
                ask()
            # A lookup of the prompt's prefix may take five seconds of it here; the machine may stand still in some, hardly in all.
            assert min(took) < 15, "they wait for Redis"
        finally:
            for pid in redis:
                os.kill(pid, signal.SIGCONT)
        for pid in redis:
            os.kill(pid, signal.SIGKILL)
        ask()
    wait_until(lambda: pairs.is_whole(2, 2), timeout_s=120, what="the workers are registered again")
    pairs.check_empty()


def test_cancel_frees_both_sides(pairs: System) -> None:
    asyncio.run(cancel_at_all_moments(pairs))
    pairs.check_empty()
