"""Drafts of a real model: answers drawn and greedy, penalized, held to what logprobs say, are those without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from twostep.engine.draft_model import DraftModel
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.proposer import Proposer
from twostep.engine.types import EngineRequest, TokenOutput
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.settings.speculative import SpeculativeConfig

NUM_REQUESTS = 40


class Remembering(Proposer):
    """Drafts the answers that it knows, and now and then another token."""

    def __init__(self, answers: dict[str, list[int]], rng: random.Random) -> None:
        self._answers = answers
        self._rng = rng

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        answer = self._answers[seq_id]
        drafts = answer[len(tokens) : len(tokens) + self._rng.randrange(most + 1)]
        return [token if self._rng.random() < 0.8 else self._rng.randrange(100) for token in drafts]

    def forget(self, seq_id: str) -> None:
        pass


def requests(vocab_size: int) -> list[EngineRequest]:
    rng = random.Random(5)
    made = []
    for i in range(NUM_REQUESTS):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 40))]
        max_tokens = rng.randrange(1, 40)
        options: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.0, 0.7, 1.5]),
            "top_k": rng.choice([0, 20]),
            "top_p": rng.choice([1.0, 0.9]),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
            "frequency_penalty": rng.choice([0.0, 0.0, 0.5]),
            "presence_penalty": rng.choice([0.0, 0.5]),
            "logprobs": rng.choice([None, 0, 3]),
            "min_tokens": rng.choice([0, max_tokens // 2]),
            "stop_token_ids": (rng.randrange(vocab_size),),
            "logit_bias": ((7, 2.0),) if rng.random() < 0.2 else (),
        }
        params = SamplingParams(max_tokens=max_tokens, seed=i, **options)
        made.append(
            EngineRequest(
                seq_id=f"r{i}",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                sampling=params,
                eos_token_ids=frozenset({2}),
                prefix_key=b"k",
            )
        )
    return made


def shown(outputs: Sequence[Sequence[TokenOutput]]) -> list[list[tuple[Any, ...]]]:
    return [[(token.token_id, token.position, token.finish_reason, len(token.top_logprobs)) for token in answer] for answer in outputs]


def test_answers_are_those_without_drafts(tiny_llama_dir: Path) -> None:
    runner = ModelRunner(tiny_llama_dir, dtype="float32", num_blocks=120, block_size=8, num_threads=1)
    bounds: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 40, "hash_unit": 8}
    asked = requests(runner.vocab_size)
    want = generate(Engine(runner, EngineConfig(**bounds)), asked)
    answers = {
        request.seq_id: [*request.token_ids, *(token.token_id for token in answer)] for request, answer in zip(asked, want, strict=True)
    }
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    engine = Engine(runner, EngineConfig(**bounds, speculative=config), proposer=Remembering(answers, random.Random(6)))
    got = generate(engine, asked)
    assert shown(got) == shown(want)
    for with_drafts, without in zip(got, want, strict=True):
        for one, other in zip(with_drafts, without, strict=True):
            assert (one.logprob is None) == (other.logprob is None)
            assert abs((one.logprob or 0.0) - (other.logprob or 0.0)) < 1e-3
    stats = engine.stats()
    assert 100 < sum(stats.num_accepted) < sum(stats.num_drafted)


def test_what_was_looked_up_is_verified_too(tiny_llama_dir: Path) -> None:
    runner = ModelRunner(tiny_llama_dir, dtype="float32", num_blocks=120, block_size=8, num_threads=1)
    prompt = [5, 6, 7, 8] * 6
    request = EngineRequest(
        seq_id="a",
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
    )
    want = generate(Engine(runner, EngineConfig()), [request])
    engine = Engine(runner, EngineConfig(speculative=SpeculativeConfig(method="ngram", prompt_lookup_min=1)))
    assert shown(generate(engine, [request])) == shown(want)
    assert sum(engine.stats().num_drafted)


def drafted(runner: ModelRunner, draft_dir: Path, asked: Sequence[EngineRequest], **bounds: Any) -> tuple[list[Any], Engine]:
    draft = ModelRunner(draft_dir, dtype="float32", num_blocks=120, block_size=8, num_threads=1)
    config = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=4)
    engine = Engine(runner, EngineConfig(**bounds, speculative=config), proposer=DraftModel(draft, max_num_seqs=40))
    return shown(generate(engine, asked)), engine


def test_the_model_itself_drafts_right_whatever_is_asked(tiny_llama_dir: Path) -> None:
    runner = ModelRunner(tiny_llama_dir, dtype="float32", num_blocks=120, block_size=8, num_threads=1)
    bounds: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 40, "hash_unit": 8}
    asked = requests(runner.vocab_size)
    want = shown(generate(Engine(runner, EngineConfig(**bounds)), asked))
    got, engine = drafted(runner, tiny_llama_dir, asked, **bounds)
    assert got == want
    stats = engine.stats()
    assert sum(stats.num_drafted) > 50
    # What is drawn with the same noise from logits that differ in their last bits is another token once in thousands.
    assert sum(stats.num_accepted) > 0.98 * sum(stats.num_drafted)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.2}])
def test_the_model_itself_drafts_what_is_drawn(tiny_llama_dir: Path, options: dict[str, Any]) -> None:
    """With the noise of the same seed and position, drawn tokens are drafted as well as the best ones: a step gives five."""
    runner = ModelRunner(tiny_llama_dir, dtype="float32", num_blocks=120, block_size=8, num_threads=1)
    params = SamplingParams(max_tokens=101, seed=5, ignore_eos=True, **({"temperature": 0.0} | options))
    request = EngineRequest(seq_id="a", token_ids=[5, 6, 7], num_prompt_tokens=3, sampling=params)
    _, engine = drafted(runner, tiny_llama_dir, [request])
    assert engine.steps <= 1 + 20 + 1
