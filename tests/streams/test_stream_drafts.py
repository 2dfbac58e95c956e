"""Right tokens with drafts: handed over, several a step, answers are those of one process without."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from right_tokens import alone, assert_right, runner_of
from scraping import scrape
from whole_system import whole_system

from twostep import AsyncClient, SamplingOptions

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}


@pytest.mark.smoke
async def test_drafts_change_no_answer(tiny_llama_dir: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 400) for _ in range(length)] for length in (2, 5, 17, 120)]
    # Of three tokens alone, the model's best: runs of them come again.
    bias = dict.fromkeys((5, 6, 7), 60.0)
    options = SamplingOptions(max_tokens=60, temperature=0.0, top_p=1.0, ignore_eos=True)
    async with (
        whole_system(
            tiny_llama_dir, tmp_path, make_runner=lambda: runner_of(tiny_llama_dir), step_tokens=48, speculative_config=json.dumps(NGRAM)
        ) as system,
        AsyncClient(system.target()) as client,
    ):
        got = [await client.generate(token_ids=prompt, **options, logit_bias=bias).result() for prompt in prompts]
        assert {answer.transfer.transport for answer in got} == {"local"}
        await system.settled()
        (decode,) = system.decodes
        stats = decode.engine.stats()
        assert sum(stats.num_accepted) > 10
        # A gap is between steps, and drafts that were right came without one.
        num_gaps = scrape(system.routers[0].metrics_port)("twostep_inter_token_latency_seconds_count")
        assert 0 < num_gaps < sum(len(answer.token_ids) - 1 for answer in got)
        again = await client.generate(token_ids=prompts[0], **options, logit_bias=bias, speculate=False).result()
        assert again.token_ids == got[0].token_ids
        assert decode.engine.stats().num_drafted == stats.num_drafted
    same = SamplingOptions(**options, logit_bias=tuple(bias.items()))  # type: ignore[typeddict-item]
    assert_right([answer.token_ids for answer in got], alone(runner_of(tiny_llama_dir), prompts, same))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_draft_model_goes_on_behind_a_hand_over(tiny_llama_dir: Path, tmp_path: Path, temperature: float) -> None:
    """The decode worker computes its KV of the prompt from the tokens. It is the served model itself, so that all it says is right."""
    rng = random.Random(8)
    prompts = [[rng.randrange(3, 400) for _ in range(length)] for length in (2, 17, 120)]
    options = SamplingOptions(max_tokens=40, temperature=temperature, seed=3, top_p=1.0, ignore_eos=True)
    config = json.dumps({"model": str(tiny_llama_dir), "num_speculative_tokens": 3})
    async with (
        whole_system(
            tiny_llama_dir,
            tmp_path,
            make_runner=lambda: runner_of(tiny_llama_dir),
            make_draft=lambda: runner_of(tiny_llama_dir),
            step_tokens=48,
            speculative_config=config,
        ) as system,
        AsyncClient(system.target()) as client,
    ):
        got = [await client.generate(token_ids=prompt, **options).result() for prompt in prompts]
        assert {answer.transfer.transport for answer in got} == {"local"}
        await system.settled()
        (decode,) = system.decodes
        stats = decode.engine.stats()
        assert 60 < sum(stats.num_drafted) <= 1.05 * sum(stats.num_accepted)
        assert not stats.drafting_failed
    assert_right([answer.token_ids for answer in got], alone(runner_of(tiny_llama_dir), prompts, options))
