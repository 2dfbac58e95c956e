"""Rows of NaN on the device: their requests end alone, and who decodes beside them, or takes their blocks after them, gets the tokens that
it gets alone. Through Triton's interpreter, or on a GPU, where float16 decodes in graphs too:

    python -m pytest -q tests/kernels/test_device_non_finite.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_pools import DEVICE
from test_device_steps import DeviceRunner

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.self_test import gives_tokens
from twostep.engine.types import EngineRequest, FailureKind
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import save_poisoned_model

BROKEN = 300
ON_GPU = DEVICE != "cpu"
# Length of the prompts that fill blocks with NaN: the interpreter takes its time for every token.
LENGTH = 25 if ON_GPU else 6
ENGINE = EngineConfig(max_num_batched_tokens=32, max_num_seqs=8, hash_unit=16, enable_prefix_caching=False)


def requests(count: int) -> list[EngineRequest]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": 11},
        {"temperature": 0.7, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "seed": 3},
    ]
    return [request_of(f"n{i}", [5, 6, 7 + i] * (1 + 2 * i), **kinds[i % 3]) for i in range(count)]


def request_of(seq_id: str, prompt: Sequence[int], *, max_tokens: int = 8 if ON_GPU else 3, **sampling: Any) -> EngineRequest:
    return EngineRequest(
        seq_id=seq_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
    )


def run(runner: ModelRunner, work: Sequence[EngineRequest]) -> tuple[dict[str, list[int]], dict[str, FailureKind]]:
    """Runs all at once, to their ends."""
    engine = Engine(runner, ENGINE)
    for request in work:
        engine.submit(request)
    tokens: dict[str, list[int]] = {}
    failed: dict[str, FailureKind] = {}
    while engine.wait_for_work(0.0):
        output = engine.step()
        engine.check_integrity()
        for token in output.tokens:
            tokens.setdefault(token.seq_id, []).append(token.token_id)
        failed |= {failure.seq_id: failure.kind for failure in output.failures}
    return tokens, failed


def mixed(long: Sequence[EngineRequest], short: Sequence[EngineRequest]) -> list[EngineRequest]:
    return [long[0], short[0], long[1], short[1], long[2]]


def check(runner: ModelRunner) -> None:
    assert gives_tokens(runner)
    neighbours = requests(3)
    options: list[dict[str, Any]] = [{"temperature": 0.0, "logprobs": 3}, {"temperature": 1.0, "presence_penalty": 1.0, "top_p": 0.5}]
    # Harmless prompts as long as the poisoned ones give steps the same shapes: over quantized KV, where a prompt is cut changes its KV.
    want, failed = run(runner, mixed(neighbours, [request_of(f"s{i}", [5, 8, 7 + i], max_tokens=1, **options[i]) for i in range(2)]))
    assert not failed
    # Leave blocks full of NaN to the requests that come next.
    poison = [request_of(f"p{i}", [5, BROKEN, 7] * LENGTH, temperature=0.0) for i in range(2)]
    assert run(runner, poison) == ({}, dict.fromkeys(("p0", "p1"), FailureKind.NO_TOKEN))
    short = [request_of(f"s{i}", [5, BROKEN, 7 + i], **options[i]) for i in range(2)]
    got, failed = run(runner, mixed(neighbours, short))
    assert failed == dict.fromkeys(("s0", "s1"), FailureKind.NO_TOKEN)
    assert got == {name: tokens for name, tokens in want.items() if name not in failed}
    assert gives_tokens(runner)


@pytest.mark.system
# The interpreter computes in numpy, which says so.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_of_nan_hurt_nobody(tmp_path: Path) -> None:
    save_poisoned_model(tmp_path, BROKEN, value=torch.inf, dtype=torch.float32, num_hidden_layers=1)
    check(DeviceRunner(tmp_path))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_rows_of_nan_hurt_nobody_in_graphs(tmp_path: Path, kv_cache_dtype: str) -> None:
    """A model in bfloat16 with one number too large for float16, as somebody may serve it. Heads of 64, which all kernels take."""
    save_poisoned_model(tmp_path, BROKEN, hidden_size=256)
    runner = ModelRunner(
        tmp_path, num_blocks=64, block_size=16, dtype="float16", kv_cache_dtype=kv_cache_dtype, device="cuda", max_num_seqs=8
    )
    check(runner)
