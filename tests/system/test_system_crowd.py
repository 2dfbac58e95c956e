"""Concurrent mixed requests, some cancelled, some cut by a deadline: each is answered with the right tokens, and afterwards nothing is held
anywhere. With a small model: what is tried here is how requests get in each other's way."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from oracle import Oracle
from running import System

from twostep import AsyncClient, DeadlineExceeded, SamplingOptions

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

NUM_REQUESTS = 60
MOST_NEAR_TIES = 3


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The n-th request."""

    n: int
    token_ids: list[int]
    options: SamplingOptions

    @property
    def is_cut(self) -> bool:
        return self.n % 10 == 7

    @property
    def is_left(self) -> bool:
        return self.n % 10 == 5


def asked(vocab_size: int) -> list[Asked]:
    shared = random.Random(1).choices(range(vocab_size), k=256)
    result = []
    for n in range(NUM_REQUESTS):
        rng = random.Random(n)
        prompt = rng.choices(range(vocab_size), k=rng.choice((3, 20, 100, 300)))
        options = SamplingOptions(max_tokens=rng.randrange(1, 40), ignore_eos=True, temperature=0.0)
        if n % 3:
            options |= SamplingOptions(temperature=0.8, top_p=0.9, top_k=40, seed=n)
        if n % 10 == 3:
            options["logprobs"] = 3
        result.append(Asked(n=n, token_ids=shared + prompt if n % 4 == 0 else prompt, options=options))
    return result


async def outcome(client: AsyncClient, it: Asked) -> str | tuple[int, ...]:
    """Its tokens, or how else it ended."""
    if it.is_cut:
        timeout_s = random.Random(it.n).uniform(0.02, 1.0)
        try:
            await client.generate(token_ids=it.token_ids, timeout=timeout_s, **it.options).result()
        except DeadlineExceeded:
            return "deadline"
        return "answered in time"
    answer = client.generate(token_ids=it.token_ids, timeout=300, **it.options)
    if it.is_left:
        async with answer:
            async for _ in answer:
                break
        return "left"
    done = await answer.result()
    assert len(done.token_ids) == it.options["max_tokens"] == done.usage.completion_tokens
    assert done.usage.prompt_tokens == len(it.token_ids)
    assert done.finish_reason == "length"
    assert len(done.logprobs) == (len(done.token_ids) if "logprobs" in it.options else 0)
    return done.token_ids


async def outcomes(system: System, requests: list[Asked]) -> list[str | tuple[int, ...]]:
    async with AsyncClient(system.target) as client:
        return await asyncio.gather(*(outcome(client, it) for it in requests))


@pytest.mark.parametrize("shared", [pytest.param("both_ways", id="as routers choose"), pytest.param("pairs", id="all handed over")])
def test_each_is_answered_and_nothing_is_left(request: pytest.FixtureRequest, oracle: Oracle, shared: str) -> None:
    system: System = request.getfixturevalue(shared)
    requests = asked(oracle.vocab_size)
    ends = asyncio.run(outcomes(system, requests))
    system.check_empty()
    # It still serves.
    again = next(n for n, end in enumerate(ends) if not isinstance(end, str) and not requests[n].options["temperature"])
    with system.client() as client:
        assert client.generate(token_ids=requests[again].token_ids, **requests[again].options).result().token_ids == ends[again]
    system.check_empty()
    system.check_store_empty()
    print(Counter(end if isinstance(end, str) else "answered" for end in ends))
    near_ties = 0
    for it, end in zip(requests, ends, strict=True):
        if isinstance(end, str):
            assert it.is_cut or it.is_left, (it, end)
        else:
            near_ties += oracle.compare(it.token_ids, it.options, end)
    assert near_ties <= MOST_NEAR_TIES, f"{near_ties} comparisons ended at a near-tie"
