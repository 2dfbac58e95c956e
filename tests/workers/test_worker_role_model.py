"""Right tokens in float32 while workers change their roles: what the single-process engine gives, one for one."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from role_harness import role_system
from tiny_models import save_tiny_model

from twostep import AsyncClient, SamplingOptions
from twostep.engine.batch import Runner
from twostep.engine.model_runner import ModelRunner

sys.path.append(str(Path(__file__).parent.parent / "system"))
from oracle import Oracle


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
    stop = asyncio.Event()

    async with role_system(model_dir, redis_url, tmp_path, roles=("prefill", "decode", "decode"), make_runner=runner) as system:

        async def asking(seed: int) -> None:
            mine = random.Random(seed)
            async with AsyncClient(system.target, max_retries=0) as client:
                while not stop.is_set():
                    prompt = [mine.randrange(3, oracle.vocab_size) for _ in range(mine.randrange(1, 60))]
                    prompt = shared + prompt if mine.random() < 0.5 else prompt
                    options = SamplingOptions(max_tokens=mine.randrange(2, 40), temperature=0.0, ignore_eos=True)
                    if mine.random() < 0.5:
                        options = SamplingOptions(**options | {"temperature": 0.9, "top_p": 0.9, "seed": mine.randrange(1 << 40)})
                    answer = await client.generate(token_ids=prompt, timeout=120, **options).result()
                    answers.append((prompt, options, answer.token_ids))

        await system.knows(1, 2)
        clients = [asyncio.create_task(asking(seed)) for seed in range(4)]
        moves = ("w1", "prefill"), ("w0", "decode"), ("w2", "prefill"), ("w1", "decode"), ("w0", "prefill"), ("w2", "decode")
        for number, (name, role) in enumerate(moves):
            prefills = 2 if role == "prefill" else 1
            # Every other time what runs is begun again elsewhere.
            await system.switch(name, role, 20.0 if number % 2 else 0.0)
            await system.knows(prefills, 3 - prefills)
            before = len(answers)
            while len(answers) < before + 4:
                await asyncio.sleep(0.05)
                for client in clients:
                    if client.done():
                        client.result()
        stop.set()
        await asyncio.gather(*clients)
        await system.settled()
    near_ties = sum(oracle.compare(*answer) for answer in answers)
    assert near_ties <= len(answers) // 10
