"""Greedy tokens of every kind of configuration through two engines: prompts in chunks on one, handed over as bytes, decoded on the other,
whose pool is too small for all, so that sequences give way and are computed again."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from forward_helpers import FAMILIES, VOCAB, reference_logits, save_model

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.types import EngineRequest
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams

NUM_TOKENS, BLOCK = 200, 4
# Of float32 sums in another order; logits are some units apart.
TIE = 1e-3
KINDS = {config_class: family for family, (config_class, _) in FAMILIES.items()}

# Of each kind of memory one: windows, latents, a state.
OFTEN = ("gemma3", "deepseek-v2", "qwen3-next")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.system if name in OFTEN else pytest.mark.exhaustive)
        for name in dict.fromkeys((*KINDS.values(), "falcon", "gpt-neox", *OFTEN))
    ],
)
def test_tokens_are_the_likeliest(family: str, tmp_path: Path) -> None:
    oracle = save_model(family, tmp_path)
    shape = ModelRunner(tmp_path, num_blocks=1, block_size=BLOCK).kv_shape
    # Too few for all three answers, of which layers with windows keep a part.
    sizes = (number * shape.num_groups for number in (64, 100 if shape.reach else 130))
    prefill_runner, decode_runner = (ModelRunner(tmp_path, num_blocks=number, block_size=BLOCK) for number in sizes)
    prefill = Engine(prefill_runner, EngineConfig(max_num_batched_tokens=9, hash_unit=BLOCK))
    decode = Engine(decode_runner, EngineConfig(max_num_batched_tokens=16, hash_unit=BLOCK))
    rng = random.Random(family)
    tokens: dict[str, list[int]] = {}
    prompts = {f"s{i}": [rng.randrange(VOCAB) for _ in range(length)] for i, length in enumerate((5, 31, 50))}
    for name, prompt in prompts.items():
        request = EngineRequest(
            seq_id=name,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
            prefix_key=b"tenant",
        )
        prefill.submit(request, hold=True)
        while not (first := [token.token_id for token in prefill.step().tokens]):
            pass
        blocks = prefill.block_ids(name)
        data = np.empty((len(blocks), prefill_runner.kv_shape.block_bytes), np.uint8)
        prefill_runner.read_blocks(blocks, data)
        decode_runner.write_blocks(decode.reserve(request).block_ids[: len(blocks)], data)
        decode.commit(name, first)
        prefill.release(name)
        tokens[name] = first
    while decode.wait_for_work(0.0):
        for token in decode.step().tokens:
            tokens[token.seq_id].append(token.token_id)
    assert decode.stats().num_preemptions
    for name, prompt in prompts.items():
        assert len(tokens[name]) == NUM_TOKENS
        logits = reference_logits(oracle, prompt + tokens[name])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens[name])[:, None])[:, 0]
        assert bool((chosen >= logits.amax(-1) - TIE).all())
