"""Concurrent mixed requests, some cancelled, some cut by a deadline: each is answered, and afterwards nothing is held anywhere."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
from running import System, running

from twostep import AsyncClient, DeadlineExceeded, SamplingOptions

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


async def one(client: AsyncClient, n: int, shared: list[int]) -> str:
    """How the n-th request ended."""
    rng = random.Random(n)
    prompt = [rng.randrange(1000, 40000) for _ in range(rng.choice((3, 20, 100, 300)))]
    if n % 4 == 0:
        prompt = shared + prompt
    max_tokens = rng.randrange(1, 40)
    options = SamplingOptions(max_tokens=max_tokens, ignore_eos=True, seed=n)
    if n % 3 == 0:
        options["temperature"] = 0.0
    if n % 10 == 3:
        options["logprobs"] = 3
    if n % 10 == 7:
        try:
            await client.generate(token_ids=prompt, timeout=rng.uniform(0.05, 2.0), **options).result()
        except DeadlineExceeded:
            return "deadline"
        return "answered in time"
    answer = client.generate(token_ids=prompt, timeout=600, **options)
    if n % 10 == 5:
        async with answer:
            async for _ in answer:
                break
        return "left"
    done = await answer.result()
    assert len(done.token_ids) == max_tokens == done.usage.completion_tokens
    assert done.usage.prompt_tokens == len(prompt)
    assert done.finish_reason == "length"
    assert len(done.logprobs) == (max_tokens if n % 10 == 3 else 0)
    return "answered"


async def soak(system: System, num_requests: int) -> Counter[str]:
    rng = random.Random(1)
    shared = [rng.randrange(1000, 40000) for _ in range(256)]
    async with AsyncClient(system.target) as client:
        return Counter(await asyncio.gather(*(one(client, n, shared) for n in range(num_requests))))


@pytest.mark.parametrize(("local_prefill", "num_requests"), [(False, 100), (True, 60)], ids=["all handed over", "as routers choose"])
def test_soak(smollm2_dir: Path, tmp_path: Path, local_prefill: bool, num_requests: int) -> None:
    with running(smollm2_dir, tmp_path, local_prefill=local_prefill) as system:
        ends = asyncio.run(soak(system, num_requests))
        assert ends["answered"] == num_requests * 8 // 10, ends
        assert sum(ends.values()) == num_requests
        system.check_empty()
        # It still serves.
        with system.client() as client:
            assert "Paris" in client.chat([{"role": "user", "content": "What is the capital of France?"}], temperature=0.0).result().text
        system.check_empty()
        system.check_store_empty()
