"""Requests whose right tokens the oracle knows: asked of a system eight at a time, and compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from oracle import Oracle
from running import System

from twostep import Completion, SamplingOptions

_TIMEOUT_S = 300.0

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first five prime numbers.",
    "Name three rivers in Europe and say where they end.",
]


@dataclass(frozen=True)
class Case:
    token_ids: Sequence[int]
    options: SamplingOptions


def cases(vocab_size: int, prompts: Sequence[Sequence[int]], seed: int, *, count: int, longest: int) -> list[Case]:
    """Real prompts, greedy and seeded with all the sampler's parts; two long ones with a shared prefix; others of any length.
    `longest`: of a prompt, in tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(longest * 3 // 4)]
    ids = [list(p) for p in prompts]
    ids += [shared + [rng.randrange(vocab_size) for _ in range(rng.randrange(1, longest // 4))] for _ in range(2)]
    ids += [[rng.randrange(vocab_size) for _ in range(rng.randrange(1, longest))] for _ in range(count - len(ids))]
    sampled = SamplingOptions(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1, presence_penalty=0.3)
    result = []
    for n, tokens in enumerate(ids):
        max_tokens = rng.randrange(1, 25)
        options = SamplingOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        if n % 2:
            options = SamplingOptions(**sampled, max_tokens=max_tokens, seed=rng.randrange(1 << 40), frequency_penalty=0.2)
        result.append(Case(tokens, options))
    return result


def answered(system: System, oracle: Oracle, *, seed: int, count: int = 20, longest: int = 300) -> list[str]:
    """Fails for an answer that is not the oracle's. Returns how their KV travelled."""
    todo = cases(oracle.vocab_size, [oracle.chat_ids(p) for p in PROMPTS], seed, count=count, longest=longest)
    with system.client() as client:

        def one(case: Case) -> Completion:
            return client.generate(token_ids=case.token_ids, timeout=_TIMEOUT_S, **case.options).result()

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(one, todo))
    near_ties = sum(oracle.compare(case.token_ids, case.options, a.token_ids) for case, a in zip(todo, answers, strict=True))
    assert near_ties <= max(1, count // 10), f"{near_ties} of {len(answers)} comparisons ended at a near-tie"
    return [answer.transfer.transport for answer in answers if len(answer.token_ids) > 1]
