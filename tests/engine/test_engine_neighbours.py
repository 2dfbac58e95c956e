"""Whatever one request asks for, its neighbours in the batch get the tokens that they get alone: a real model on the CPU, and requests with
everything at its extremes. Every failure is the failing request's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import assert_idle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import IM_END, save_poisoned_model

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.grammar import GrammarCompiler
from twostep.engine.types import EngineRequest, FailureKind, FinishReason
from twostep.errors import InvalidRequest, ResourceExhausted
from twostep.model.runner.model_runner import ModelRunner
from twostep.request_class import RequestClass
from twostep.sampling_params import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, Grammar, GrammarKind, SamplingParams
from twostep.step_curve import StepCurve

BROKEN, CONTEXT, BLOCK, NUM_BLOCKS = 300, 96, 4, 72
WAIT_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_poisoned_model(tmp_path_factory.mktemp("poisoned") / "model", BROKEN, value=math.inf, dtype=torch.float32)


@functools.cache
def runner_of(directory: Path) -> ModelRunner:
    return ModelRunner(directory, num_blocks=NUM_BLOCKS, block_size=BLOCK, max_model_len=CONTEXT, num_threads=1)


@functools.cache
def compiler_of(directory: Path) -> GrammarCompiler:
    eos = frozenset({IM_END})
    return GrammarCompiler(directory, vocab_size=runner_of(directory).vocab_size, eos_token_ids=eos)


def request_of(directory: Path, seq_id: str, prompt: Sequence[int], **options: Any) -> EngineRequest:
    """Raises InvalidRequest."""
    outside = {name: options.pop(name) for name in ("request_class", "tpot_s", "prefix_key") if name in options}
    params = SamplingParams(**options)
    return EngineRequest(
        seq_id=seq_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=params,
        eos_token_ids=frozenset({IM_END}),
        grammar=None if params.grammar is None else compiler_of(directory).compile(params.grammar),
        **outside,
    )


def neighbours(directory: Path) -> list[EngineRequest]:
    seven = Grammar(GrammarKind.REGEX, "[0-9]{7}")
    return [
        request_of(directory, "greedy", [5, 6, 7], max_tokens=12, temperature=0.0, ignore_eos=True, prefix_key=b"k"),
        request_of(directory, "drawn", [7, 8, 9, 9, 10], max_tokens=12, temperature=0.9, top_k=40, seed=4, logprobs=2, ignore_eos=True),
        request_of(directory, "penalized", [11] * 9, max_tokens=12, temperature=0.7, repetition_penalty=1.3, min_tokens=12, seed=9),
        request_of(directory, "constrained", [12, 13], max_tokens=12, temperature=0.0, grammar=seven),
    ]


@functools.cache
def alone(directory: Path) -> dict[str, list[int]]:
    answers = {}
    for request in neighbours(directory):
        engine = Engine(runner_of(directory), EngineConfig(max_num_batched_tokens=16, max_num_seqs=8, hash_unit=BLOCK))
        (tokens,) = generate(engine, [request])
        answers[request.seq_id] = [token.token_id for token in tokens]
    return answers


def attackers() -> st.SearchStrategy[tuple[list[int], dict[str, Any]]]:
    vocab = 512
    edges = st.sampled_from([0, 1, IM_END, 5, 6, 7, BROKEN, vocab - 1, vocab, -1, 1 << 32])
    well = st.sampled_from([0, 1, 3, 5, 6, 7, vocab - 1])
    prompts = st.lists(well, min_size=1, max_size=CONTEXT) | st.lists(edges, max_size=9) | st.just([5, 6, 7] + [9] * (CONTEXT - 4))
    options = st.fixed_dictionaries(
        {
            "max_tokens": st.sampled_from([1, 2, 9, CONTEXT, (1 << 31) - 1]),
            "temperature": st.sampled_from([0.0, 5e-324, 1e-38, 1e-6, 0.7, 100.0]),
            "top_k": st.sampled_from([0, 1, 2, vocab - 1, vocab, vocab + 1, 1 << 31]),
            "top_p": st.sampled_from([5e-324, 1e-10, 0.5, 1.0 - 1e-16, 1.0]),
            "min_p": st.sampled_from([0.0, 5e-324, 1e-45, 0.3, 1.0]),
            "seed": st.sampled_from([0, -(1 << 63), (1 << 63) - 1]),
            "repetition_penalty": st.sampled_from([0.01, 1.0, 100.0]),
            "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
            "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
            "stop_token_ids": st.sampled_from([(), (0,), (1 << 70,), ((1 << 32) - 1,), tuple(range(vocab - MAX_STOP_TOKEN_IDS, vocab))]),
            "ignore_eos": st.booleans(),
            "min_tokens": st.sampled_from([0, 1, 9]),
            "logprobs": st.sampled_from([None, 0, MAX_LOGPROBS]),
            "grammar": st.sampled_from([None, None, None, "[a-c]{2,90}", "(a|b)?", "\\d"]),
            "request_class": st.sampled_from(list(RequestClass)),
            "tpot_s": st.sampled_from([None, 1e-9, 1e9]),
            "prefix_key": st.sampled_from([b"", b"k"]),
        }
    )
    return st.tuples(prompts, options)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    others=st.lists(st.tuples(attackers(), st.integers(0, 8), st.none() | st.integers(0, 6)), min_size=1, max_size=6),
    budget=st.sampled_from([8, 16, 64]),
    seqs=st.sampled_from([2, 8]),
    look_ahead=st.booleans(),
    host_blocks=st.sampled_from([0, 8]),
    ballast=st.integers(0, 2),
)
def test_neighbours_get_what_they_get_alone(
    model_dir: Path,
    others: list[tuple[tuple[list[int], dict[str, Any]], int, int | None]],
    budget: int,
    seqs: int,
    look_ahead: bool,
    host_blocks: int,
    ballast: int,
) -> None:
    """`others`: what they ask for, before which step they come, and how many steps later they are cancelled. `ballast` leaves them so few
    blocks that some give way."""
    runner = runner_of(model_dir)
    config = EngineConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=seqs + ballast,
        hash_unit=BLOCK,
        max_step_s=1.8e-3,
        min_chunk_tokens=3,
        look_ahead=look_ahead,
        host_cache_bytes=host_blocks * runner.kv_shape.block_bytes,
    )
    engine = Engine(runner, config)
    engine.set_curve(StepCurve(fixed_s=1e-3, per_row_s=1e-4))
    want = alone(model_dir)
    for request in neighbours(model_dir):
        engine.submit(request)
    left = set(want)
    got: dict[str, list[int]] = {seq_id: [] for seq_id in want}
    for i in range(ballast):
        engine.reserve(request_of(model_dir, f"ballast{i}", [9] * (CONTEXT - 16), max_tokens=1))
    step = 0
    while left or step <= 8:
        for i, ((prompt, options), at, cancelled_after) in enumerate(others):
            if at == step:
                grammar = options["grammar"]
                try:
                    made = None if grammar is None else Grammar(GrammarKind.REGEX, grammar)
                    engine.submit(request_of(model_dir, f"other{i}", prompt, **options | {"grammar": made}))
                    left.add(f"other{i}")
                except (InvalidRequest, ResourceExhausted):
                    pass
            elif cancelled_after is not None and step == at + cancelled_after and engine.cancel(f"other{i}"):
                left.discard(f"other{i}")
        assert not left or engine.wait_for_work(WAIT_S)
        output = engine.step()
        engine.check_integrity()
        for token in output.tokens:
            got.setdefault(token.seq_id, []).append(token.token_id)
            if token.finish_reason is not None:
                assert token.finish_reason in FinishReason
                left.discard(token.seq_id)
        for failure in output.failures:
            assert failure.seq_id not in want, failure
            assert failure.kind in (FailureKind.NO_TOKEN, FailureKind.REQUEST), failure
            left.discard(failure.seq_id)
        step += 1
    engine.settle_launched()
    for i in range(ballast):
        engine.cancel(f"ballast{i}")
    assert {seq_id: got[seq_id] for seq_id in want} == want
    assert_idle(engine)
