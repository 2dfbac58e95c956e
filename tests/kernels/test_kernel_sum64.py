"""Checksums in the kernels against kv_transfer.checksums, and pulls bit for bit, on shapes that fit no tile."""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_pools import DEVICE

from kv_transfer.checksums import block_sums
from twostep.engine.batch import KvShape
from twostep.model.families.registry import build_model, parse_config
from twostep.model.kernels import triton_elementwise as kernels
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.kernels.triton_prefill import clear_tails
from twostep.model.kernels.triton_pull import PullShape, add_slot_sums, pull_blocks, slot_sums, sum_blocks
from twostep.model.loading.weights import load_weights
from twostep.model.runner.model_runner import ModelRunner, kv_shape
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.kv_sums import KvSums, bytes_beside_block, can_keep

sys.path.insert(0, str(Path(__file__).parents[1] / "models_forward"))
from forward_helpers import make_batch, save_model, scattered_sequences

SMALL = PullShape(num_programs=3, tile_words=64, num_warps=1)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8).cpu().numpy()


def sums_of(cache: KvCache, first_layer: int = 0, num_layers: int | None = None) -> np.ndarray:
    """Returns the blocks' sums, made of the slots'."""
    assert cache.sums is not None
    ids = torch.arange(cache.shape.num_blocks, dtype=torch.int32, device=DEVICE)
    out = torch.empty(len(ids), dtype=torch.int64, device=DEVICE)
    add_slot_sums(
        cache.sums.tensor, ids, out, first_layer=first_layer, num_layers=cache.shape.num_layers if num_layers is None else num_layers
    )
    return out.cpu().numpy().view(np.uint64)


@pytest.mark.parametrize(("block_words", "first", "count"), [(1, 0, 1), (13, 3, 7), (200, 0, 200), (192, 64, 128), (130, 2, 65)])
@pytest.mark.parametrize("with_sums", [True, False])
def test_pull_copies_and_sums_what_it_copied(block_words: int, first: int, count: int, with_sums: bool) -> None:
    rng = np.random.default_rng(block_words)
    data = rng.integers(0, 256, (9, block_words * 8), np.uint8)
    source, target = torch.from_numpy(data).to(DEVICE), torch.zeros(9, block_words * 8, dtype=torch.uint8, device=DEVICE)
    ids = torch.tensor([[7, 0, 3, 8], [2, 8, 5, 1]], dtype=torch.int32, device=DEVICE)
    sums = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    part = {"block_bytes": block_words * 8, "first_byte": first * 8, "num_bytes": count * 8}
    pull_blocks(source.data_ptr(), target.data_ptr(), ids, sums if with_sums else None, **part, shape=SMALL)
    want = np.zeros_like(data)
    columns = slice(first * 8, (first + count) * 8)
    want[[2, 8, 5, 1], columns] = data[[7, 0, 3, 8], columns]
    np.testing.assert_array_equal(target.cpu().numpy(), want)
    expected = block_sums(data[[7, 0, 3, 8], columns], first * 8)
    if with_sums:
        np.testing.assert_array_equal(sums.cpu().numpy().view(np.uint64), expected)
    again = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    sum_blocks(source.data_ptr(), ids[0], again, **part, shape=SMALL)
    np.testing.assert_array_equal(again.cpu().numpy().view(np.uint64), expected)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotated", "block_size", "dtype"),
    [
        (4, 2, 16, 16, 4, torch.float32),
        (9, 3, 64, 64, 4, torch.bfloat16),
        (13, 5, 80, 80, 3, torch.float16),  # in two programs
        (3, 3, 96, 24, 2, torch.bfloat16),
        (32, 8, 16, 16, 3, torch.bfloat16),
        (4, 20, 8, 0, 1, torch.float32),  # in three
    ],
)
def test_steps_keep_the_sums_of_what_they_write(
    num_heads: int, num_kv_heads: int, head_dim: int, rotated: int, block_size: int, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")
    shape = KvShape(num_blocks=5, block_size=block_size, num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=name)
    cache = KvCache(shape, DEVICE)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    cache.sums = KvSums(cache.tensor, cache.shape, num_heads, rotated, slot_sums)
    np.testing.assert_array_equal(sums_of(cache), block_sums(bytes_of(cache.tensor)))
    cos, sin = (torch.randn(50, rotated // 2, device=DEVICE) for _ in range(2))
    for layer in range(2):
        slots = torch.randperm(5 * block_size)[:4].to(DEVICE)
        slots[2] = -1  # padding
        qkv = torch.randn(4, (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
        positions = torch.randint(0, 50, (4,), device=DEVICE)
        kernels.rotate_and_write(qkv, positions, slots, cos, sin, cache, layer, num_heads)
    np.testing.assert_array_equal(sums_of(cache), block_sums(bytes_of(cache.tensor)))
    np.testing.assert_array_equal(sums_of(cache, 1, 1), block_sums(bytes_of(cache.tensor[:, 1:]), shape.layer_bytes))

    # Blocks that are written in other ways.
    cache.write_blocks([4, 1], np.random.default_rng(0).integers(0, 256, (2, shape.block_bytes), np.uint8))
    lengths = torch.tensor([2 * block_size, block_size + 1], dtype=torch.int32, device=DEVICE)
    tables = torch.tensor([[0, 1, 4], [2, 3, 4]], dtype=torch.int32, device=DEVICE)
    if block_size > 1:
        clear_tails(cache, lengths, tables)
        assert not cache.tensor[3, :, :, :, 1:].any()
    kept = [block for block in range(5) if cache.sums.kept([block])]
    assert kept == [0, 2, 3]
    np.testing.assert_array_equal(sums_of(cache)[kept], block_sums(bytes_of(cache.tensor))[kept])


def test_sums_are_kept_of_pools_of_whole_words_only() -> None:
    shape = KvShape(num_blocks=2, block_size=4, num_layers=1, num_kv_heads=1, head_dim=24, dtype="bfloat16")
    assert can_keep(shape, 24 - 8, 2)
    assert not can_keep(shape, 20, 2)
    assert can_keep(shape, 20, 4)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_model_s_steps_keep_the_sums(family: str, tmp_path: Path) -> None:
    """Chunks and decodes; on a GPU also captured ones."""
    save_model(family, tmp_path)
    config = parse_config(tmp_path)
    if DEVICE == "cuda":
        runner = ModelRunner(tmp_path, num_blocks=4, block_size=16, device=DEVICE, max_num_seqs=4, keep_kv_sums=True)
        cache, forward = runner.kv_cache, runner.forward
    else:
        model = build_model(config, torch.float32, TritonOps(DEVICE), DEVICE)
        load_weights(model, tmp_path)
        cache = KvCache(kv_shape(config, "float32", 4, 16), DEVICE)
        cache.sums = KvSums(cache.tensor, cache.shape, config.num_heads, 0 if config.rope is None else config.head_dim, slot_sums)
        forward = partial(model.forward, cache=cache)
    sequences = scattered_sequences([20, 6], 16, 4, random.Random(1))
    empty = sums_of(cache)
    np.testing.assert_array_equal(empty, block_sums(bytes_of(cache.tensor)))
    for counts in ([18, 1], [1, 4], [1, 1]) if DEVICE == "cuda" else ([18, 1], [1, 4]):
        with torch.inference_mode():
            forward(make_batch(list(zip(sequences, counts, strict=True)), 16))
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_computed += count
    used = [block for sequence in sequences for block in sequence.blocks]
    now = sums_of(cache)
    np.testing.assert_array_equal(now, block_sums(bytes_of(cache.tensor)))
    assert all(now[block] != empty[block] for block in used)


def test_a_runner_on_a_cpu_keeps_none(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=4, block_size=16, keep_kv_sums=True)
    assert runner.kv_cache.sums is None


def test_sums_take_little_memory() -> None:
    llama_8b = KvShape(num_blocks=1, block_size=16, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    assert bytes_beside_block(llama_8b, num_heads=32) * 512 == llama_8b.block_bytes
