"""Prompts handed over layer by layer while their step runs: right tokens, every block freed, whatever ends the request on the way.

The fake runner writes each layer at the end of its share of the step: what is published before its mark is reached holds old bytes, and
gives wrong tokens.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from worker_harness import BLOCK, expected, make_runner, prompt_of, routed, started

from twostep.engine.batch import Batch, InFlight
from twostep.engine.fake import FakeRunner

NUM_LAYERS = 8


# The runner takes as long as a device does.
pytestmark = pytest.mark.system


def layered(redis_url: str, runner: FakeRunner, **options: Any) -> Any:
    decode = make_runner(num_layers=NUM_LAYERS)
    return started(redis_url, prefill_runner=runner, decode_runner=decode, prefill_options=options)


class Watched(FakeRunner):
    """Counts the marks that were asked for, and says when a step is half done."""

    def __init__(self, **options: Any) -> None:
        super().__init__(num_blocks=256, block_size=BLOCK, max_model_len=512, num_layers=NUM_LAYERS, marks_layers=True, **options)
        self.marked: list[int] = []
        self.fail = False

    def launch(self, batch: Batch) -> InFlight:
        self.marked.append(len(batch.mark_layers))
        return super().launch(batch)

    def _write(self, batch: Batch, layers: slice) -> None:
        if self.fail and layers.start == NUM_LAYERS - 1:
            raise RuntimeError("the device is lost in its last layer")
        super()._write(batch, layers)


@pytest.mark.parametrize("budget", [pytest.param(512, marks=pytest.mark.smoke), 48])
async def test_chunks_leave_while_the_step_runs(redis_url: str, budget: int) -> None:
    runner = Watched(step_s=0.4)
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 8}
    prompt = prompt_of(101)
    async with layered(redis_url, runner, **options) as pair, routed(pair) as router:
        answer = await router.generate("r", prompt, 9)
        answer.check(prompt, 9)
        assert answer.done is not None
        assert answer.done.chunks > 2 * (-(-101 // budget))
        # The exposed part is the share of the last of eight layers, on a machine with others on it.
        assert max(runner.marked) >= 4
        stats = await pair.both()
        assert [s.blocks_moved for s in stats] == [26, 26]


async def test_many_prompts_with_cached_prefixes_share_steps(redis_url: str) -> None:
    """Twins in one step compute the same blocks, which the pool would exchange for one another's while they are being published."""
    runner = Watched(step_s=0.1)
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 16}
    prompts = [prompt_of(80, seed=i % 3) + prompt_of(3 * i, seed=i) for i in range(9)]
    async with layered(redis_url, runner, **options) as pair, routed(pair) as router:
        for n in range(2):
            answers = await asyncio.gather(*(router.generate(f"r{n}-{i}", prompt, 5) for i, prompt in enumerate(prompts)))
            assert [a.tokens for a in answers] == [expected(prompt, 5) for prompt in prompts]
        assert sum(map(bool, runner.marked)) >= 2


async def test_cancelled_between_layers(redis_url: str) -> None:
    runner = Watched(step_s=0.4)
    prompt = prompt_of(100)
    async with layered(redis_url, runner) as pair, routed(pair) as router:
        for n in range(4):
            call, _ = await router.begin(f"r{n}", prompt, 5)
            await asyncio.sleep(0.1 * n)
            call.cancel()
            await router.cancel(f"r{n}")
            await pair.settled()
        (await router.generate("after", prompt, 5)).check(prompt, 5)


async def test_a_step_that_fails_in_its_last_layer_commits_nothing(redis_url: str) -> None:
    runner = Watched(step_s=0.3)
    runner.fail = True
    prompt = prompt_of(100)
    async with layered(redis_url, runner) as pair, routed(pair) as router:
        await router.begin("r", prompt, 5)
        await router.event("failed")
        assert runner.marked[0] >= 4
        await pair.settled()
        runner.fail = False
        (await router.generate("after", prompt, 5)).check(prompt, 5)
