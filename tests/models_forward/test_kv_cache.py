"""Whole blocks out of the pool and back: what a hand-over moves."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forward_helpers import make_batch, save_model, scattered_sequences

from twostep.engine.batch import KvShape, LayerRange
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.step.kv_cache import KvCache

SHAPE = KvShape(num_blocks=6, block_size=4, num_layers=2, num_kv_heads=3, head_dim=8, dtype="bfloat16")


@pytest.fixture
def cache() -> KvCache:
    made = KvCache(SHAPE)
    made.tensor.copy_(torch.randn(made.tensor.shape))
    return made


def bytes_of(cache: KvCache, block: int) -> np.ndarray:
    return cache.tensor[block].contiguous().view(-1).view(torch.uint8).numpy()


def test_blocks_are_read_in_the_order_asked(cache: KvCache) -> None:
    out = np.empty((3, SHAPE.block_bytes), np.uint8)
    cache.read_blocks([4, 0, 4], out)
    for row, block in enumerate([4, 0, 4]):
        assert np.array_equal(out[row], bytes_of(cache, block))


def test_written_blocks_are_bit_identical_and_others_untouched(cache: KvCache) -> None:
    before = cache.tensor.clone()
    data = np.random.default_rng(0).integers(0, 256, (2, SHAPE.block_bytes), dtype=np.uint8)
    data.flags.writeable = False  # as shared memory of another process is
    cache.write_blocks([5, 1], data)
    assert np.array_equal(bytes_of(cache, 5), data[0])
    assert np.array_equal(bytes_of(cache, 1), data[1])
    assert torch.equal(cache.tensor[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


@pytest.mark.parametrize(
    ("dtype", "block_size", "head_dim", "quantization", "planes"),
    [("bfloat16", 3, 8, "none", 2), ("float32", 5, 3, "none", 1), ("bfloat16", 4, 16, "int8", 2), ("bfloat16", 4, 9, "fp8", 1)],
)
def test_layers_are_parts_of_blocks(dtype: str, block_size: int, head_dim: int, quantization: str, planes: int) -> None:
    sizes: dict[str, Any] = {"block_size": block_size, "head_dim": head_dim, "quantization": quantization, "num_planes": planes}
    shape = KvShape(num_blocks=9, num_layers=5, num_kv_heads=2, dtype=dtype, **sizes)
    cache, rng = KvCache(shape), np.random.default_rng(2)
    want = rng.integers(0, 256, (9, 5, shape.layer_bytes), dtype=np.uint8)
    cache.write_blocks(range(9), want.reshape(9, -1))
    for first, count in [(0, 1), (4, 1), (1, 3), (0, 5), (2, 2)]:
        layers, ids = LayerRange(first, count), rng.permutation(9)[:4].tolist()
        out = np.empty((4, count * shape.layer_bytes), np.uint8)
        cache.read_blocks(ids, out, layers)
        assert np.array_equal(out.reshape(4, count, -1), want[ids, first : first + count])
        data = rng.integers(0, 256, out.shape, dtype=np.uint8)
        data.flags.writeable = False
        cache.write_blocks(ids, data, layers)
        want[ids, first : first + count] = data.reshape(4, count, -1)
        whole = np.empty((9, shape.block_bytes), np.uint8)
        cache.read_blocks(range(9), whole)
        assert np.array_equal(whole.reshape(want.shape), want)
    for wrong in (LayerRange(0, 6), LayerRange(5, 1), LayerRange(-1, 2), LayerRange(2, 0)):
        with pytest.raises(ValueError, match="layers"):
            cache.read_blocks([0], np.empty((1, wrong.num_layers * shape.layer_bytes), np.uint8), wrong)


def test_no_blocks_is_no_work(cache: KvCache) -> None:
    cache.read_blocks([], np.empty((0, SHAPE.block_bytes), np.uint8))
    cache.write_blocks([], np.empty((0, SHAPE.block_bytes), np.uint8))


@pytest.mark.parametrize(
    "out",
    [
        np.empty((1, SHAPE.block_bytes), np.uint8),
        np.empty((2, SHAPE.block_bytes - 1), np.uint8),
        np.empty((2, SHAPE.block_bytes), np.int8),
        np.empty((2, 2 * SHAPE.block_bytes), np.uint8)[:, ::2],
    ],
)
def test_a_wrong_buffer_is_refused(cache: KvCache, out: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        cache.read_blocks([0, 1], out)
    with pytest.raises(ValueError, match="uint8"):
        cache.write_blocks([0, 1], out)


@pytest.mark.parametrize("block", [-1, 6])
def test_blocks_outside_the_pool_are_refused(cache: KvCache, block: int) -> None:
    data = np.zeros((1, SHAPE.block_bytes), np.uint8)
    with pytest.raises(ValueError, match="block ids"):
        cache.read_blocks([block], data)
    with pytest.raises(ValueError, match="block ids"):
        cache.write_blocks([block], data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_moved_to_another_runner_decodes_bit_identically(tmp_path: Path, dtype: str) -> None:
    save_model("qwen3", tmp_path)
    source, target = (ModelRunner(tmp_path, num_blocks=40, block_size=4, dtype=dtype) for _ in range(2))
    (sequence,) = scattered_sequences([30], 4, 40, random.Random(3))
    source.run(make_batch([(sequence, 29)], 4))
    sequence.num_computed = 29
    data = np.empty((len(sequence.blocks), source.kv_shape.block_bytes), np.uint8)
    elsewhere = sequence.blocks[::-1]
    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(source.read_blocks, sequence.blocks, data).result()
        other_thread.submit(target.write_blocks, elsewhere, data).result()
    want = source.forward(make_batch([(sequence, 1)], 4))
    sequence.blocks = elsewhere
    assert torch.equal(target.forward(make_batch([(sequence, 1)], 4)), want)
