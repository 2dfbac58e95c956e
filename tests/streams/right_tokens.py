"""Right tokens of real models without processes: what a router and two workers give is what one process gives that answers one request at a
time. As tests/system/test_system_tokens.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from whole_system import BLOCK, whole_system

from twostep import AsyncClient, SamplingOptions
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest, TokenOutput
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams

# Of the logits of the two best. Products of one row and of many differ in their last bits, which may make a step of 8 bits in what is
# rounded behind them. The best is ahead by 0.4 in the mean.
NEAR_TIE, NEAR_TIE_OF_ROUNDED = 1e-4, 0.05
NUM_NEAR_TIES = 1


def runner_of(model_dir: Path, quantization: str = "none") -> ModelRunner:
    return ModelRunner(model_dir, dtype="float32", num_blocks=256, block_size=BLOCK, quantization=quantization)


def alone(runner: ModelRunner, prompts: Sequence[Sequence[int]], options: SamplingOptions) -> list[list[TokenOutput]]:
    """The single process's answers, one after the other, each prompt in one step, with the two likeliest at each token's place."""
    engine = Engine(runner, EngineConfig(max_num_batched_tokens=512, enable_prefix_caching=False))
    params = SamplingParams(**options, logprobs=2)  # type: ignore[arg-type]
    answers = []
    for n, prompt in enumerate(prompts):
        request = EngineRequest(seq_id=f"alone-{n}", token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params)
        answers.append(generate(engine, [request])[0])
    return answers


async def through_a_system(
    model_dir: Path,
    tmp_path: Path,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    quantization: str = "none",
    step_tokens: int = 48,
) -> list[list[int]]:
    """The answers of a router and a worker of each role, all asked at once; fails unless KV was handed over for each."""
    async with (
        whole_system(model_dir, tmp_path, make_runner=lambda: runner_of(model_dir, quantization), step_tokens=step_tokens) as system,
        AsyncClient(system.target()) as client,
    ):
        answers = await asyncio.gather(*(client.generate(token_ids=prompt, **options).result() for prompt in prompts))
        assert {answer.transfer.transport for answer in answers} == {"local"}
        await system.settled()
    return [list(answer.token_ids) for answer in answers]


async def compare(
    model_dir: Path,
    tmp_path: Path,
    *,
    rounds: bool,
    quantization: str = "none",
    step_tokens: int = 48,
    max_tokens: int = 24,
    behind: Sequence[int] = (),
) -> None:
    """Fails unless the system gives the single process's tokens, in most answers all of them, in others up to a near-tie. `rounds`: its
    numbers are rounded to 8 bits on the way; `behind`: what a router adds to prompts."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 400) for _ in range(length)] for length in (3, 16, 50, 97, 160, 211)]
    options = SamplingOptions(max_tokens=max_tokens, temperature=0.0, top_p=1.0, ignore_eos=True)
    got = await through_a_system(model_dir, tmp_path, prompts, options, quantization, step_tokens)
    want = alone(runner_of(model_dir, quantization), [[*prompt, *behind] for prompt in prompts], options)
    assert_right(got, want, near_tie=NEAR_TIE_OF_ROUNDED if rounds else NEAR_TIE)


def assert_right(got: Sequence[Sequence[int]], want: Sequence[Sequence[TokenOutput]], *, near_tie: float = NEAR_TIE) -> None:
    """Fails unless most answers are equal, and the others up to a near-tie; `want` is of `alone`."""
    near_ties = 0
    for have, answer in zip(got, want, strict=True):
        if list(have) != [token.token_id for token in answer]:
            at = next(i for i, token in enumerate(answer) if token.token_id != have[i])
            best, second = answer[at].top_logprobs
            assert best.logprob - second.logprob < near_tie, f"token {at} of {have} is not {answer[at]}"
            near_ties += 1
    assert near_ties <= NUM_NEAR_TIES
