"""A decode worker whose pool is too small for what it has promised: streams pause and go on, and nobody is told to begin again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from worker_harness import Answer, HeldRunner, RouterDouble, expected, prompt_of, routed, started

NUM_TOKENS = 40


async def finish(router: RouterDouble, request_id: str, prompt: Sequence[int]) -> Answer:
    """The rest of a request's life after its reservation."""
    answer = Answer()
    async for event in router.run(request_id, prompt, NUM_TOKENS):
        if event.WhichOneof("event") == "accepted":
            await router.attach(request_id, event.accepted.ticket)
        elif event.WhichOneof("event") == "first_token":
            answer.tokens.append(event.first_token.token.token_id)
            answer.positions.append(event.first_token.token.position)
    await router.collect(request_id, answer)
    return answer


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_streams_pause_and_go_on(redis_url: str, mode: str) -> None:
    """Four sequences that end at 12 blocks each, on 16 blocks."""
    options = {"preemption_mode": mode, "max_num_batched_tokens": 8}
    runner = HeldRunner(num_blocks=16)
    async with (
        started(redis_url, decode_runner=runner, decode_options=options) as pair,
        routed(pair) as router,
    ):
        prompts = [prompt_of(8, seed=i) for i in range(4)]
        for i, prompt in enumerate(prompts):
            await router.reserve(f"r{i}", prompt, NUM_TOKENS)
        tasks = [asyncio.create_task(finish(router, f"r{i}", prompt)) for i, prompt in enumerate(prompts)]
        # So that all are there when the first one grows.
        while pair.decode_worker.engine.stats().num_reserved:  # noqa: ASYNC110  the engine sets no event
            await asyncio.sleep(0.01)
        runner.let_go()
        answers = await asyncio.gather(*tasks)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.failed is None
            assert answer.tokens == expected(prompt, NUM_TOKENS)
            assert answer.positions == list(range(NUM_TOKENS))
        _, decode = await pair.both()
        assert decode.num_preemptions
        assert bool(decode.swapped_bytes) == (mode == "swap")
        await pair.settled()
