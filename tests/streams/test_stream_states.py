"""A chat with a model that keeps states: each turn goes on where one was kept, on the worker that computes prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from whole_system import BLOCK, MAX_MODEL_LEN, whole_system

from twostep import AsyncClient
from twostep.engine.fake import FakeRunner, fake_next_token
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
