"""A real model's answers in grammars: the same from one engine alone as from two that chunk, preempt and hand over, and all valid."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_helpers import assert_idle, move_blocks
from grammar_cases import Case, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.grammar import GrammarCompiler
from twostep.engine.types import EngineRequest, FinishReason, TokenOutput
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.text.tokenizer import Tokenizer

EOS_IDS = frozenset({2, 0})
WAIT_S = 60.0


@functools.cache
def runner(directory: Path, number: int, num_blocks: int) -> ModelRunner:
    return ModelRunner(directory, num_blocks=num_blocks, block_size=4, dtype="float32", num_threads=1)


@functools.cache
def compiler(directory: Path) -> GrammarCompiler:
    return GrammarCompiler(directory, vocab_size=runner(directory, 0, 400).vocab_size, eos_token_ids=EOS_IDS)


def params() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 40),
            "temperature": st.sampled_from([0.0, 0.8, 1.5]),
            "top_k": st.sampled_from([0, 5]),
            "top_p": st.sampled_from([1.0, 0.8]),
            "seed": st.integers(0, 1000),
            "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
            "presence_penalty": st.sampled_from([0.0, 0.5]),
            "logprobs": st.sampled_from([None, 2]),
        }
    )


def tokens_of(tokens: Sequence[TokenOutput]) -> list[tuple[int, object]]:
    return [(token.token_id, token.finish_reason) for token in tokens]


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    work=st.lists(st.tuples(st.none() | cases(), st.lists(st.integers(3, 300), min_size=1, max_size=24), params()), min_size=1, max_size=4),
    budget=st.integers(2, 24),
    ahead=st.booleans(),
)
def test_chunks_preemption_and_hand_over_change_nothing(
    tiny_llama_dir: Path, work: list[tuple[Case | None, list[int], dict[str, Any]]], budget: int, ahead: bool
) -> None:
    requests = []
    for i, (case, prompt, options) in enumerate(work):
        grammar = None if case is None else case.grammar
        request = EngineRequest(
            seq_id=f"r{i}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(**options, grammar=grammar),
            eos_token_ids=EOS_IDS,
            prefix_key=b"k",
            grammar=None if grammar is None else compiler(tiny_llama_dir).compile(grammar),
        )
        requests.append(request)
    alone = [generate(Engine(runner(tiny_llama_dir, 0, 400), EngineConfig(hash_unit=4)), [request])[0] for request in requests]
    # Room for one and a half: who came later gives way.
    tight = EngineConfig(hash_unit=4, max_num_batched_tokens=budget, max_num_seqs=2, look_ahead=ahead, swap_bytes=1 << 20)
    together = generate(Engine(runner(tiny_llama_dir, 1, 24), tight), requests)
    assert [tokens_of(tokens) for tokens in together] == [tokens_of(tokens) for tokens in alone]
    assert [tokens_of(tokens) for tokens in handed_over(tiny_llama_dir, requests)] == [tokens_of(tokens) for tokens in alone]
    text = Tokenizer.load(tiny_llama_dir)
    for (case, _, _), tokens in zip(work, alone, strict=True):
        if case is not None and tokens[-1].finish_reason is FinishReason.STOP:
            case.judge(text.decode([token.token_id for token in tokens[:-1]]))
        for token in tokens:
            assert token.logprob is None or token.logprob <= 0.0


def handed_over(directory: Path, requests: Sequence[EngineRequest]) -> list[list[TokenOutput]]:
    """The first token of each from one engine, the others from another, all at once."""
    prefill = Engine(runner(directory, 2, 400), EngineConfig(hash_unit=4))
    decode = Engine(runner(directory, 3, 400), EngineConfig(hash_unit=4, look_ahead=True))
    answers: dict[str, list[TokenOutput]] = {request.seq_id: [] for request in requests}
    for request in requests:
        prefill.submit(replace(request), hold=True)
    while any(not answer for answer in answers.values()):
        assert prefill.wait_for_work(WAIT_S)
        for token in prefill.step().tokens:
            answers[token.seq_id].append(token)
    for request in requests:
        first = answers[request.seq_id][0]
        if first.finish_reason is None:
            reserved = decode.reserve(request)
            move_blocks(prefill, prefill.block_ids(request.seq_id), decode, reserved.block_ids)
            decode.commit(request.seq_id, [first.token_id])
        prefill.release(request.seq_id)
    while any(answer[-1].finish_reason is None for answer in answers.values()):
        assert decode.wait_for_work(WAIT_S)
        for token in decode.step().tokens:
            answers[token.seq_id].append(token)
    decode.settle_launched()
    assert_idle(prefill)
    assert_idle(decode)
    return [answers[request.seq_id] for request in requests]
