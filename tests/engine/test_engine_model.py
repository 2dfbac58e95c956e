"""A real model on the CPU, in float32: who goes first, what gives way, how prompts are cut, what shares a step and when it is launched
change; tokens do not."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_helpers import assert_idle

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.types import EngineRequest
from twostep.model.runner.model_runner import ModelRunner
from twostep.request_class import RequestClass
from twostep.sampling_params import SamplingParams
from twostep.step_curve import StepCurve

INTERACTIVE, STANDARD, BATCH = RequestClass
MIXED = [BATCH, BATCH, STANDARD, BATCH, INTERACTIVE, BATCH, STANDARD, BATCH, INTERACTIVE]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "seed": 11, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.5, "min_tokens": 4, "logprobs": 2},
    {"temperature": 1.2, "presence_penalty": 1.0, "seed": -5},
]


def answers(directory: Path, num_blocks: int, classes: Sequence[RequestClass], **config: Any) -> tuple[list[list[int]], Engine]:
    """Returns the tokens of requests that arrive while others run, greedy, drawn and penalized; some end at a stop token."""
    runner = ModelRunner(directory, num_blocks=num_blocks, block_size=4, max_model_len=64, dtype="float32")
    engine = Engine(runner, EngineConfig(**({"max_num_batched_tokens": 24, "max_num_seqs": 5, "hash_unit": 4} | config)))
    engine.set_curve(StepCurve(fixed_s=1e-3, per_row_s=1e-4))
    got: list[list[int]] = [[] for _ in classes]
    coming = deque(enumerate(classes))
    for number in itertools.count():
        while coming and number >= 4 * coming[0][0]:
            i, request_class = coming.popleft()
            tokens = [(7 * i + k * k) % 500 for k in range(6 + 3 * i)]
            engine.submit(
                EngineRequest(
                    seq_id=str(i),
                    token_ids=tokens,
                    num_prompt_tokens=len(tokens),
                    sampling=SamplingParams(max_tokens=25, ignore_eos=i % 2 == 0, **KINDS[i % 4]),
                    eos_token_ids=frozenset(range(0, 500, 29)),
                    prefix_key=b"key",
                    request_class=request_class,
                )
            )
        output = engine.step()
        assert not output.failures
        for token in output.tokens:
            got[int(token.seq_id)].append(token.token_id)
        if not coming and not output.num_prefill_tokens + output.num_decode_tokens:
            break
    assert_idle(engine)
    return got, engine


def test_a_model_s_tokens_do_not_depend_on_who_else_is_there(tiny_llama_dir: Path) -> None:
    alone, _ = answers(tiny_llama_dir, 300, [STANDARD] * 9, look_ahead=False, max_num_seqs=1)
    assert all(len(tokens) == 25 for tokens in alone[::2])
    tight: dict[str, Any] = {"max_step_s": 1.8e-3, "min_chunk_tokens": 3}
    among, engine = answers(tiny_llama_dir, 26, MIXED, look_ahead=True, **tight)
    assert among == alone
    assert engine.stats().num_preemptions
