"""Prefill attention over a scattered pool against float64, on ragged chunks; on the CPU through Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_pools import DEVICE, DTYPES, poisoned_pool

from twostep.engine.kv_cache import KvCache
from twostep.kernels.triton_prefill import plan_tiles, prefill_attention, tile_shape

# (tokens in the pool before, tokens of the chunk)
Chunks = list[tuple[int, int]]


def fill(cache: KvCache, lengths: list[int], seed: int) -> np.ndarray:
    """Random keys and values of sequences over blocks in no order; int32 block tables."""
    shape, rng = cache.shape, random.Random(seed)
    free = list(range(shape.num_blocks))
    rng.shuffle(free)
    tables = np.zeros((len(lengths), max(-(-n // shape.block_size) for n in lengths) + 1), np.int32)
    for s, length in enumerate(lengths):
        for i in range(-(-length // shape.block_size)):
            tables[s, i] = block = free.pop()
            used = min(shape.block_size, length - i * shape.block_size)
            part = cache.tensor[block, :, :, :, :used]
            part.copy_(torch.randn(part.shape))
    return tables


def oracle(query: torch.Tensor, cache: KvCache, layer: int, table: np.ndarray, context: int) -> torch.Tensor:
    """float64 [T, H, D] of one sequence's queries [T, H, D] that follow `context` tokens."""
    num_tokens, num_heads, head_dim = query.shape
    length = context + num_tokens
    blocks = cache.tensor[torch.from_numpy(table[: -(-length // cache.shape.block_size)].astype(np.int64)), layer].double()
    kv = blocks.permute(1, 2, 0, 3, 4).reshape(2, cache.shape.num_kv_heads, -1, head_dim)[:, :, :length]
    k, v = kv.repeat_interleave(num_heads // cache.shape.num_kv_heads, 1)
    score = torch.einsum("thd,hkd->htk", query.double(), k) / head_dim**0.5
    hidden = torch.arange(length, device=query.device) > context + torch.arange(num_tokens, device=query.device)[:, None]
    return torch.einsum("htk,hkd->thd", score.masked_fill(hidden, -torch.inf).softmax(-1), v)


def check(chunks: Chunks, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, rows: int = 0) -> None:
    lengths = [context + count for context, count in chunks]
    num_blocks = sum(-(-n // block_size) for n in lengths) + 3
    cache = poisoned_pool(dtype, num_blocks=num_blocks, num_layers=2, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim)
    tables = fill(cache, lengths, seed=len(chunks))
    counts = np.array([count for _, count in chunks], np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    qkv = torch.randn(int(starts[-1]), (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
    share = num_heads // num_kv_heads
    shape = tile_shape(dtype, head_dim, share, int(counts.max()))
    if rows:
        shape = replace(shape, num_rows=rows, num_keys=16)
    out = torch.full((len(qkv), num_heads * head_dim), torch.nan, device=DEVICE, dtype=dtype)

    def upload(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(DEVICE)

    prefill_attention(
        qkv,
        out,
        cache,
        1,
        num_heads=num_heads,
        tiles=upload(plan_tiles(counts, np.array(lengths), shape.num_rows // share)),
        query_start=upload(starts),
        seq_lens=upload(np.array(lengths)),
        block_tables=upload(tables),
        shape=shape,
    )
    for s, (context, count) in enumerate(chunks):
        part = slice(int(starts[s]), int(starts[s]) + count)
        want = oracle(qkv[part, : num_heads * head_dim].view(count, num_heads, head_dim), cache, 1, tables[s], context)
        got = out[part].double().view(want.shape)
        error = float((got - want).norm() / want.norm())
        assert error < {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype], (s, error)


RAGGED: Chunks = [(0, 1), (0, 33), (70, 5), (15, 17), (64, 1), (31, 50)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_chunks_behind_prefixes(dtype: torch.dtype) -> None:
    check(RAGGED, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (7, 1, 80, 32), (2, 2, 96, 5), (8, 2, 128, 16), (2, 1, 256, 64), (6, 2, 8, 4), (3, 3, 12, 7)],
)
def test_heads_and_blocks(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    chunks = [(0, 21), (45, 3)]
    check(chunks, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_many_tiles_of_one_chunk(rows: int) -> None:
    check([(37, 101), (0, 66)], num_heads=3, num_kv_heads=1, head_dim=16, block_size=8, dtype=torch.float32, rows=rows)


def test_one_query_each_is_decode() -> None:
    check([(n, 1) for n in (0, 1, 15, 16, 63, 64, 130)], num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32)


def test_tiles_cover_every_query_once_heaviest_first() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 200, 40)
    lengths = counts + rng.integers(0, 500, 40)
    tiles = plan_tiles(counts, lengths, 32)
    assert sorted(map(tuple, tiles.tolist())) == [(s, f) for s in range(40) for f in range(0, int(counts[s]), 32)]
    ends = [int(lengths[s] - counts[s]) + min(f + 32, int(counts[s])) for s, f in tiles.tolist()]
    assert ends == sorted(ends, reverse=True)
