"""Prefill.Embed on a prefill worker over a fake model: the vector, and nothing left of the prompt but a cached prefix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from worker_harness import VOCAB, WAIT_S, Held, RouterDouble, held_pair, prompt_of, read_to_end, refused, until

from twostep.engine.fake import fake_states
from twostep.pooling import Pooling, PoolingParams
from twostep.rpc.convert import pooling_to_proto
from twostep.rpc.v1 import prefill_pb2

Code = grpc.StatusCode
PROMPT = prompt_of(30)


@pytest.fixture
async def held(redis_url: str) -> AsyncIterator[Held]:
    """A step takes 8 tokens."""
    async with held_pair(redis_url) as made:
        yield made


def embed(held: Held, name: str, prompt: list[int], **params: Any) -> Any:
    request = prefill_pb2.PrefillRequest(**RouterDouble.request(name, prompt, 1))
    request.pooling.CopyFrom(pooling_to_proto(PoolingParams(**params)))
    return held.pair.prefill.Embed(request, timeout=WAIT_S)


def wanted(prompt: list[int], kind: Pooling, dimensions: int, normalize: bool) -> npt.NDArray[np.float64]:
    states = fake_states(prompt, VOCAB).astype(np.float64)
    vector = (states[-1] if kind is Pooling.LAST else states.mean(0))[: dimensions or None]
    return vector / np.linalg.norm(vector) if normalize else vector


@pytest.mark.parametrize(("kind", "cached"), [(Pooling.LAST, 28), (Pooling.MEAN, 0)])
@pytest.mark.parametrize(("dimensions", "normalize"), [(0, False), (0, True), (2, True)])
async def test_the_vector_beside_other_prompts(held: Held, kind: Pooling, cached: int, dimensions: int, normalize: bool) -> None:
    held.let_go()
    found = []
    for i in range(2):
        other = asyncio.create_task(held.router.generate(f"other {i}", prompt_of(20, i), 5))
        accepted, told = await read_to_end(embed(held, f"e{i}", PROMPT, kind=kind, dimensions=dimensions, normalize=normalize))
        assert accepted.HasField("accepted")
        vector = np.frombuffer(told.pooled.values, "<f4")
        np.testing.assert_allclose(vector, wanted(PROMPT, kind, dimensions, normalize), rtol=1e-6)
        found.append(told.pooled.cached_tokens)
        (await other).check(prompt_of(20, i), 5)
    assert found == [0, cached]


async def test_a_call_that_ends_early_leaves_nothing(held: Held) -> None:
    call, waiting = embed(held, "running", PROMPT), embed(held, "waiting", PROMPT)
    for each in (call, waiting):
        assert (await each.read()).HasField("accepted")
    held.prefill.allow(1)
    engine = held.pair.prefill_worker.engine
    await until(lambda: engine.stats().num_running, "a step is under way")
    for each in (call, waiting):
        each.cancel()
    # The step that is held keeps what is in it, and nothing else.
    await until(lambda: not engine.stats().num_waiting and not engine.stats().num_running, "both are gone")
    held.let_go()
    await held.pair.settled()


async def test_a_step_that_fails_fails_them_and_the_next_is_served(held: Held) -> None:
    held.prefill.failures = 1
    held.let_go()
    await refused(read_to_end(embed(held, "a", PROMPT)), Code.UNAVAILABLE)
    assert len(await read_to_end(embed(held, "b", PROMPT))) == 2


async def test_what_is_refused(held: Held) -> None:
    held.let_go()
    await refused(read_to_end(embed(held, "long", prompt_of(513))), Code.INVALID_ARGUMENT)
    await refused(read_to_end(embed(held, "none", [])), Code.INVALID_ARGUMENT)
    await refused(read_to_end(embed(held, "id", [VOCAB])), Code.INVALID_ARGUMENT)
    unsaid = prefill_pb2.PrefillRequest(**RouterDouble.request("unsaid", PROMPT, 1))
    await refused(read_to_end(held.pair.prefill.Embed(unsaid, timeout=WAIT_S)), Code.INVALID_ARGUMENT)
    assert len(await read_to_end(embed(held, "whole", prompt_of(512)))) == 2, "as long as the context"


async def test_a_worker_that_drains_ends_what_runs_and_takes_no_more(held: Held) -> None:
    call, worker = embed(held, "a", PROMPT), held.pair.prefill_worker
    assert (await call.read()).HasField("accepted")
    draining = asyncio.create_task(worker.stop(WAIT_S))
    await until(lambda: worker.record().draining, "it drains")
    await refused(read_to_end(embed(held, "b", PROMPT)), Code.UNAVAILABLE)
    held.let_go()
    assert [each.HasField("pooled") for each in await read_to_end(call)] == [True]
    await draining
