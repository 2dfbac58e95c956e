"""A chat with a model that keeps states: each turn goes on where one was kept, on the worker that computes prompts. And states that are
handed over between workers of other numbers of ranks."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from pathlib import Path

import pytest
from forward_helpers import save_model
from right_tokens import alone, assert_right, runner_of
from tiny_models import save_tokenizer
from whole_system import BLOCK, MAX_MODEL_LEN, whole_system

from twostep import AsyncClient, SamplingOptions
from twostep.engine.batch import Runner
from twostep.engine.fake import FakeRunner, fake_next_token
from twostep.model.runner.parallel_runner import ParallelRunner
from twostep.text.model_card import ModelCard


@pytest.mark.parametrize("aggregated", [False, True])
async def test_each_turn_of_a_chat_finds_the_one_before(fake_model_dir: Path, tmp_path: Path, aggregated: bool) -> None:
    vocab_size = ModelCard.load(fake_model_dir).vocab_size

    def make_runner() -> FakeRunner:
        return FakeRunner(num_blocks=1024, block_size=BLOCK, vocab_size=vocab_size, max_model_len=MAX_MODEL_LEN, num_state_blocks=5)

    tokens, found = [3 + 7 * i % 200 for i in range(150)], []
    async with (
        whole_system(fake_model_dir, tmp_path, aggregated=aggregated, make_runner=make_runner) as system,
        AsyncClient(system.target()) as client,
    ):
        for turn in range(4):
            answer = await client.generate(token_ids=tokens, max_tokens=90, ignore_eos=True).result()
            for token in answer.token_ids:
                assert token == fake_next_token(tokens, vocab_size, stateful=True)
                tokens.append(token)
            found.append(answer.usage.cached_tokens)
            tokens += [5 + turn] * 8
        await system.settled()
    # Of 64 tokens: the last boundary of the prompt before, or, where answers are computed too, of the answer.
    assert found == ([0, 192, 320, 384] if aggregated else [0, 128, 192, 320])


@pytest.mark.system
@pytest.mark.parametrize(
    "sizes",
    [(2, 1), pytest.param((1, 2), marks=pytest.mark.exhaustive), pytest.param((2, 2), marks=pytest.mark.exhaustive)],
    ids=lambda sizes: f"{sizes[0]} to {sizes[1]}",
)
async def test_states_of_ranks_are_handed_over(sizes: tuple[int, int], tmp_path: Path) -> None:
    """Their tokens are the single process's, and the next turn of each chat finds the state that its prompt left."""
    model_dir = tmp_path / "m"
    model_dir.mkdir()
    save_model("qwen3-next", model_dir, vocab_size=save_tokenizer(model_dir), max_position_embeddings=1024)
    rng = random.Random(sum(sizes))
    prompts = [[rng.randrange(3, 400) for _ in range(length)] for length in (5, 70, 150)]
    first, second = (SamplingOptions(max_tokens=count, temperature=0.0, top_p=1.0, ignore_eos=True) for count in (200, 12))
    coming = iter(sizes)
    with ExitStack() as stack:

        def make_runner() -> Runner:
            if (size := next(coming)) == 1:
                return runner_of(model_dir)
            ranks = ParallelRunner(model_dir, size=size, dtype="float32", num_blocks=256, block_size=BLOCK, num_threads=1)
            stack.callback(ranks.close)
            return ranks

        turns = []
        async with (
            whole_system(model_dir, tmp_path, make_runner=make_runner, step_tokens=48) as system,
            AsyncClient(system.target()) as client,
        ):
            for options in (first, second):
                answers = await asyncio.gather(*(client.generate(token_ids=prompt, **options).result() for prompt in prompts))
                assert {answer.transfer.transport for answer in answers} == {"local"}
                turns.append((prompts, options, [list(answer.token_ids) for answer in answers]))
                prompts = [[*prompt, *answer.token_ids, 7, 8] for prompt, answer in zip(prompts, answers, strict=True)]
            # Boundaries are 64 tokens apart; the shortest prompt has come to none.
            assert [answer.usage.cached_tokens for answer in answers] == [0, 64, 128]
            await system.settled()
    for asked, options, got in turns:
        assert_right(got, alone(runner_of(model_dir), asked, options))
