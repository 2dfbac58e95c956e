"""Right tokens in float32 while workers change their roles: what the single-process engine gives, one for one."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from role_harness import WAIT_S, Load, role_system
from tiny_models import save_tiny_model

from twostep import AsyncClient, SamplingOptions
from twostep.engine.batch import Runner
from twostep.model.runner.model_runner import ModelRunner

sys.path.append(str(Path(__file__).parent.parent / "system"))
from oracle import Oracle


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.system
async def test_a_real_model_s_answers_are_the_oracle_s_through_every_switch(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str, tmp_path: Path
) -> None:
    model_dir = save_tiny_model(tmp_path_factory.mktemp("role-model") / "tiny")
    oracle = Oracle(model_dir)

    def runner() -> Runner:
        return ModelRunner(model_dir, dtype="float32", num_blocks=48, block_size=16, num_threads=1)

    rng = random.Random(5)
    shared = [rng.randrange(3, oracle.vocab_size) for _ in range(64)]
    answers: list[tuple[list[int], SamplingOptions, Sequence[int]]] = []

    async def ask_anything(client: AsyncClient, mine: random.Random) -> None:
        prompt = [mine.randrange(3, oracle.vocab_size) for _ in range(mine.randrange(1, 60))]
        prompt = shared + prompt if mine.random() < 0.5 else prompt
        options = SamplingOptions(max_tokens=mine.randrange(2, 24), temperature=0.0, ignore_eos=True)
        if mine.random() < 0.5:
            options = SamplingOptions(**options | {"temperature": 0.9, "top_p": 0.9, "seed": mine.randrange(1 << 40)})
        answer = await client.generate(token_ids=prompt, timeout=2 * WAIT_S, **options).result()
        answers.append((prompt, options, answer.token_ids))

    async with role_system(model_dir, redis_url, tmp_path, roles=("prefill", "decode", "decode"), make_runner=runner) as system:
        await system.knows(1, 2)
        async with Load(system, ask_anything, num_clients=3) as load:
            await load.rounds(1)
            # Each way, what runs is begun again elsewhere, or may end before.
            for name, role, drain_timeout_s in (
                ("w1", "prefill", 0.0),
                ("w0", "decode", WAIT_S),
                ("w2", "prefill", WAIT_S),
                ("w1", "decode", 0.0),
            ):
                prefills = 2 if role == "prefill" else 1
                await system.switch(name, role, drain_timeout_s)
                await system.knows(prefills, 3 - prefills)
                await load.rounds(1)
        await system.settled()
    near_ties = sum(oracle.compare(*answer) for answer in answers)
    assert near_ties <= len(answers) // 10
