"""Right tokens: router → prefill → Ray → decode gives what the single-process engine gives, token for token, in float32."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from oracle import Oracle
from running import running

from twostep import SamplingOptions

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first five prime numbers.",
    "Explain photosynthesis to a child.",
    "Translate 'good morning' to Spanish.",
    "Why is the sky blue?",
    "Tell me a joke about computers.",
    "Name three rivers in Europe and say where they end.",
    "def fibonacci(n):",
    "The quick brown fox",
]


@dataclass(frozen=True)
class Case:
    token_ids: Sequence[int]
    options: SamplingOptions


def cases(vocab_size: int, prompts: Sequence[Sequence[int]], seed: int) -> list[Case]:
    """20 prompts: real ones, greedy and seeded with all the sampler's parts; long ones of several chunks, some with a shared prefix."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(160)]
    ids = [list(p) for p in prompts]
    ids += [shared + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 60))] for _ in range(4)]
    ids += [[rng.randrange(vocab_size) for _ in range(rng.randrange(1, 300))] for _ in range(20 - len(ids))]
    sampled = SamplingOptions(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.3)
    result = []
    for n, tokens in enumerate(ids):
        max_tokens = rng.randrange(1, 25)
        options = SamplingOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        if n % 2:
            options = SamplingOptions(**sampled, max_tokens=max_tokens, seed=rng.randrange(1 << 40), frequency_penalty=0.2)
        result.append(Case(tokens, options))
    return result


def test_equals_the_oracle(smollm2_dir: Path, tmp_path: Path) -> None:
    """In many chunks, on two decode workers, in blocks of another size than the oracle's; test_system_soak.py has the other way."""
    oracle = Oracle(smollm2_dir)
    todo = cases(oracle.vocab_size, [oracle.chat_ids(p) for p in PROMPTS], seed=48)
    extra = ("--dtype", "float32", "--block-size", "32", "--max-num-batched-tokens", "48")
    with running(smollm2_dir, tmp_path, decode=2, extra=extra) as system, system.client() as client:

        def ask(case: Case) -> tuple[Case, tuple[int, ...], str]:
            answer = client.generate(token_ids=case.token_ids, timeout=300, **case.options).result()
            return case, answer.token_ids, answer.transfer.transport

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, todo))
        system.check_empty()
    assert {transport for case, ids, transport in answers if len(ids) > 1} == {"ray"}
    near_ties = sum(oracle.compare(case.token_ids, case.options, ids) for case, ids, _ in answers)
    assert near_ties <= 2, f"{near_ties} of {len(answers)} comparisons ended at a near-tie"
