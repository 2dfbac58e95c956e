"""Decode attention over quantized blocks against float64 attention over the numbers that the same bytes stand for."""

from __future__ import annotations

import random

import pytest
import torch
from attention_oracle import paged_attention
from kernel_pools import DEVICE
from test_kernel_decode import layout, queries

from twostep.engine.batch import KvShape
from twostep.model.kernels.triton_decode import decode_attention
from twostep.model.kernels.triton_decode_plan import DecodeLayout, DecodePlan
from twostep.model.step.kv_cache import KvCache

LAYER = 1
FORMATS = ["fp8", "int8"]


def poisoned(quantization: str, *, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: str) -> KvCache:
    """Slots never written have any bytes but a NaN's, and scales that are NaN."""
    cache = KvCache(
        KvShape(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=2,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            quantization=quantization,
        ),
        DEVICE,
    )
    cache.tensor.copy_(torch.randint(0, 0x7F, cache.tensor.shape, dtype=torch.uint8))
    assert cache.quantized is not None
    cache.quantized.scales.fill_(torch.nan)
    return cache


def fill(cache: KvCache, lengths: list[int], *, window: int, spread: float) -> torch.Tensor:
    """Random keys and values, some vectors much larger than others; int32 tables whose entries outside are no blocks."""
    size, heads = cache.shape.block_size, 2 * cache.shape.num_kv_heads
    free = random.Random(sum(lengths)).sample(range(cache.shape.num_blocks), cache.shape.num_blocks)
    tables = torch.full((len(lengths), max(1, -(-max(lengths) // size))), 2**31 - 1, dtype=torch.int32)
    assert cache.quantized is not None
    for s, length in enumerate(lengths):
        first = max(0, length - window) if window else 0
        for i in range(first // size, -(-length // size)):
            tables[s, i] = free.pop()
        place = torch.arange(first, length)
        vectors = torch.randn(len(place), heads, cache.shape.head_dim) * torch.exp(spread * torch.randn(len(place), heads, 1))
        cache.quantized.write(LAYER, tables[s, place // size].long().to(DEVICE), (place % size).to(DEVICE), vectors.to(DEVICE))
    return tables.to(DEVICE)


def check(
    quantization: str,
    lengths: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    program: DecodeLayout | None = None,
    spread: float = 0.0,
    merges_itself: bool = True,
    num_sms: int | None = 3,
) -> None:
    cache = poisoned(
        quantization,
        num_blocks=sum(-(-n // block_size) for n in lengths) + 3,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
    )
    tables = fill(cache, lengths, window=window, spread=spread)
    q = queries(len(lengths), num_heads, num_kv_heads, head_dim, dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan = DecodePlan(
        cache.shape,
        num_heads=num_heads,
        num_seqs=len(lengths),
        device=DEVICE,
        window=window,
        layout=program,
        num_sms=num_sms,
        merges_itself=merges_itself,
    )
    plan.parts.fill_(torch.nan)
    plan.scales.fill_(torch.nan)
    plan.refresh(seq_lens)
    out = torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE)
    decode_attention(q, cache, LAYER, tables, seq_lens, plan=plan, out=out)
    for s, length in enumerate(lengths):
        want = paged_attention(q[s : s + 1], cache, LAYER, tables[s].clamp(max=cache.shape.num_blocks - 1), length, window=window)[0]
        error = (out[s].double() - want).norm() / want.norm().clamp_min(1e-9)
        # Queries and weights are float16 in products; outputs are rounded.
        assert error < (5e-3 if dtype == torch.bfloat16 else 1.5e-3), (s, float(error))
    assert not plan.counters.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("quantization", FORMATS)
def test_ragged_lengths_over_scattered_blocks(quantization: str, dtype: torch.dtype) -> None:
    check(quantization, [1, 150, 0, 33, 16, 64, 0], num_heads=6, num_kv_heads=2, head_dim=32, dtype=dtype)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 32), (80, 16), (96, 64)])
@pytest.mark.parametrize("quantization", FORMATS)
def test_head_sizes_and_block_sizes(quantization: str, head_dim: int, block_size: int) -> None:
    check(quantization, [70, 3, 33], num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=block_size)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (7, 1), (12, 1), (20, 1)], ids=str)
def test_groups_of_every_size(num_heads: int, num_kv_heads: int) -> None:
    check("fp8", [70, 7], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16)


@pytest.mark.parametrize("window", [1, 18, 1000])
def test_sliding_window_reads_nothing_before_it(window: int) -> None:
    check("fp8", [1, 90, 40, 0, 17], num_heads=4, num_kv_heads=2, head_dim=32, window=window)


@pytest.mark.parametrize("quantization", FORMATS)
def test_scales_far_apart(quantization: str) -> None:
    """Factors of thousands between the scales of one sequence's keys and values."""
    check(quantization, [90, 64], num_heads=4, num_kv_heads=2, head_dim=16, spread=2.5)


def test_parts_merged_by_a_second_launch() -> None:
    check("int8", [1, 150, 0, 33], num_heads=12, num_kv_heads=2, head_dim=32, program=layout(2, 2), merges_itself=False)


def test_random_shapes() -> None:
    rng = random.Random(11)
    for _ in range(6):
        num_kv_heads = rng.choice([1, 2, 3])
        check(
            rng.choice(FORMATS),
            [rng.choice([0, 1, rng.randrange(20), rng.randrange(150)]) for _ in range(rng.randrange(1, 6))],
            num_heads=num_kv_heads * rng.choice([1, 2, 3, 8]),
            num_kv_heads=num_kv_heads,
            head_dim=rng.choice([16, 24, 64]),
            block_size=rng.choice([16, 32]),
            dtype=rng.choice([torch.bfloat16, torch.float16]),
            window=rng.choice([0, 0, 30]),
        )
