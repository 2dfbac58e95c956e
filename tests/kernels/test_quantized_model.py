"""A whole model over quantized KV on the GPU's operations against the CPU's; on the CPU through Triton's interpreter.

A rounding of the last bit may turn a stored byte to its neighbour, so logits are near, not equal.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from kernel_pools import DEVICE

from twostep.errors import SetupError
from twostep.model.families.registry import build_model, parse_config
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.loading.weights import load_weights
from twostep.model.runner.model_runner import ModelRunner, kv_shape
from twostep.model.step.kv_cache import KvCache

sys.path.insert(0, str(Path(__file__).parents[1] / "models_forward"))
from forward_helpers import make_batch, save_model, scattered_sequences

NUM_BLOCKS, BLOCK_SIZE = 24, 16


@pytest.mark.parametrize(
    ("family", "quantization", "steps"),
    # Few tokens for fp8: the search for its scales takes the interpreter long.
    [("qwen2", "fp8", ([7, 1, 3], [1, 3, 1])), ("qwen3-windows", "int8", ([35, 1, 17], [1, 18, 1], [1, 1, 0]))],
)
def test_chunks_behind_prefixes_mixed_with_decode(family: str, quantization: str, steps: tuple[list[int], ...], tmp_path: Path) -> None:
    save_model(family, tmp_path)
    config = parse_config(tmp_path)
    model = build_model(config, torch.float32, TritonOps(DEVICE), DEVICE)
    load_weights(model, tmp_path)
    cache = KvCache(kv_shape(config, "float32", NUM_BLOCKS, BLOCK_SIZE, quantization), DEVICE)
    same, exact = (ModelRunner(tmp_path, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_cache_dtype=kv) for kv in (quantization, "auto"))
    sequences = scattered_sequences([40, 20, 18], BLOCK_SIZE, NUM_BLOCKS, random.Random(1))
    for counts in steps:
        work = [(s, n) for s, n in zip(sequences, counts, strict=True) if n]
        batch = make_batch(work, BLOCK_SIZE)
        with torch.inference_mode():
            got = model.forward(batch, cache).cpu()
        want, lossless = same.forward(batch), exact.forward(batch)
        assert float((got - want).norm()) < 0.1 * float((want - lossless).norm())
        for sequence, count in work:
            sequence.num_computed += count


def test_flash_decoding_says_which_blocks_it_takes(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    config = parse_config(tmp_path)
    ops = TritonOps(DEVICE)
    model = build_model(config, torch.float32, ops, DEVICE)
    cache = KvCache(kv_shape(config, "float32", 4, 8, "fp8"), DEVICE)
    inputs = torch.zeros(4, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(SetupError, match="--block-size 16"):
        ops.plan_decode(inputs, inputs[:1], cache, model.attention)
