"""Prefill attention over a scattered pool against float64, on ragged chunks; on the CPU through Triton's interpreter. The Hopper kernel,
which that cannot run, is under test on a Hopper GPU only."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_oracle import Rounding, assert_attends
from hypothesis import given
from hypothesis import strategies as st
from kernel_pools import DEVICE, DTYPES, poisoned_pool, some_sinks

from twostep.engine.batch import KvShape
from twostep.model.kernels.ops import KEYS_TOGETHER
from twostep.model.kernels.triton_prefill import (
    HOPPER_ROWS,
    TileShape,
    clear_tails,
    num_leading_decodes,
    plan_tiles,
    prefill_attention,
    tile_shape,
    uses_hopper,
)
from twostep.model.step.kv_cache import KvCache

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

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
            if cache.quantized is not None:
                vectors = torch.randn(used, 2 * shape.num_kv_heads, shape.head_dim) * torch.exp(
                    torch.randn(used, 2 * shape.num_kv_heads, 1)
                )
                cache.quantized.write(1, torch.full((used,), block, device=DEVICE), torch.arange(used, device=DEVICE), vectors.to(DEVICE))
                continue
            part = cache.tensor[block, :, :, :, :used]
            part.copy_(torch.randn(part.shape))
    return tables


def check(
    chunks: Chunks,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    rows: int = 0,
    window: int = 0,
    num_programs: int = 0,
    quantization: str = "none",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    spoil: Callable[[KvCache, np.ndarray], None] | None = None,
) -> None:
    """`num_programs`: of the Hopper kernel; 0: the portable kernel. `spoil` changes the pool or the tables behind the kernel's back."""
    lengths = [context + count for context, count in chunks]
    num_blocks = sum(-(-n // block_size) for n in lengths) + 3
    sizes = {"num_blocks": num_blocks, "num_layers": 2, "num_kv_heads": num_kv_heads, "block_size": block_size, "head_dim": head_dim}
    cache = poisoned_pool(dtype, quantization=quantization, **sizes)
    tables = fill(cache, lengths, seed=len(chunks))
    if window and cache.quantized is None:
        # What no kernel may read: another sequence's by now.
        for s, (context, _) in enumerate(chunks):
            cache.tensor[tables[s, : max(0, context + 1 - window - KEYS_TOGETHER) // block_size]] = torch.nan
    counts = np.array([count for _, count in chunks], np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    qkv = torch.randn(int(starts[-1]), (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
    share = num_heads // num_kv_heads
    shape = tile_shape(dtype, head_dim, share, int(counts.max()), quantized=cache.quantized is not None)
    if rows:
        shape = replace(shape, num_rows=rows, num_keys=16)
    out = torch.full((len(qkv), num_heads * head_dim), torch.nan, device=DEVICE, dtype=dtype)

    def upload(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(DEVICE)

    logits: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": some_sinks(num_heads) if sinks else None}
    inputs = {"query_start": upload(starts), "seq_lens": upload(np.array(lengths)), "block_tables": upload(tables)}
    if num_programs:
        # Of use on a Hopper GPU only.
        from twostep.model.kernels.hopper_prefill import hopper_attention  # noqa: PLC0415
        from twostep.model.kernels.hopper_prefill_quantized import hopper_quantized_attention  # noqa: PLC0415

        tiles = upload(plan_tiles(counts, np.array(lengths), HOPPER_ROWS // share))
        if cache.quantized is None:
            clear_tails(cache, inputs["seq_lens"], inputs["block_tables"])
        attention = hopper_attention if cache.quantized is None else hopper_quantized_attention
        attention(qkv, out, cache, 1, num_heads=num_heads, tiles=tiles, window=window, num_programs=num_programs, **inputs, **logits)
    else:
        tiles = upload(plan_tiles(counts, np.array(lengths), shape.num_rows // share))
        prefill_attention(qkv, out, cache, 1, num_heads=num_heads, tiles=tiles, shape=shape, window=window, **inputs, **logits)
    if spoil is not None:
        spoil(cache, tables)
    # Through the interpreter, all is multiplied in float32.
    products = dtype if DEVICE == "cuda" else None
    rounding = Rounding(weights=products, keys_and_values=None if cache.quantized is None else products)
    for s, (context, count) in enumerate(chunks):
        part = slice(int(starts[s]), int(starts[s]) + count)
        query = qkv[part, : num_heads * head_dim].view(count, num_heads, head_dim)
        table = torch.from_numpy(tables[s]).to(DEVICE)
        got = out[part].view(query.shape)
        assert_attends(got, query, cache, 1, table, context + count, rounding=rounding, window=window, **logits)


def _double_a_scale(cache: KvCache, tables: np.ndarray) -> None:
    """That of the value whose key is the largest of a block."""
    assert cache.quantized is not None
    scales = cache.quantized.scales[int(tables[2, 1]), 1, 0]
    scales[scales[:, 0].argmax(), 1] *= 2


def _take_another_s_block(cache: KvCache, tables: np.ndarray) -> None:
    tables[2, 1] = tables[1, 0]


def _drop_a_block(cache: KvCache, tables: np.ndarray) -> None:
    cache.tensor[int(tables[2, 3])] = 0


FORMATS = ["fp8", "int8"]
RAGGED: Chunks = [(0, 1), (0, 33), (70, 5), (15, 17), (64, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_chunks_behind_prefixes(dtype: torch.dtype) -> None:
    check(RAGGED, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(9, 3, 64, 16), (7, 1, 80, 32), (2, 2, 96, 5), (2, 1, 112, 16), (2, 1, 256, 64), (3, 3, 12, 7)],
)
def test_heads_and_blocks(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    chunks = [(0, 21), (45, 3)]
    check(chunks, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [16, 64])
def test_many_tiles_of_one_chunk(rows: int) -> None:
    check([(37, 70), (0, 40)], num_heads=3, num_kv_heads=1, head_dim=16, block_size=8, dtype=torch.float32, rows=rows)


def test_one_query_each_is_decode() -> None:
    check([(n, 1) for n in (0, 1, 15, 16, 63, 64, 130)], num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32)


@pytest.mark.parametrize(
    ("spoil", "quantization"),
    [
        (_take_another_s_block, "none"),
        (_drop_a_block, "none"),
        (_drop_a_block, "int8"),
        (_double_a_scale, "fp8"),
        (_double_a_scale, "int8"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_roundings_do_not_explain_is_found(dtype: torch.dtype, spoil: Any, quantization: str) -> None:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    with pytest.raises(AssertionError, match="roundings explain"):
        check(RAGGED, **shape, dtype=dtype, quantization=quantization, spoil=spoil)


@pytest.mark.parametrize("window", [1, 16, 40])
def test_windows(window: int) -> None:
    chunks = [(0, 37), (60, 21), (64, 1), (260, 20)]
    check(chunks, num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, rows=32, window=window)
    check(chunks, num_heads=4, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32, window=window)


QUANTIZED = [(4, 2, 64, 16, torch.bfloat16), (7, 1, 80, 32, torch.float32), (3, 3, 12, 4, torch.float32), (2, 2, 96, 8, torch.float16)]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "quantization"),
    [
        *((*shape, format) for shape in QUANTIZED for format in FORMATS),
        (*QUANTIZED[0], "int4"),
        pytest.param(*QUANTIZED[-1], "int4", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_chunks_read_quantized_blocks(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, quantization: str
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    check(RAGGED, **shape, dtype=dtype, quantization=quantization)


@pytest.mark.parametrize("window", [1, 40])
def test_windows_over_quantized_blocks(window: int) -> None:
    chunks = [(0, 37), (60, 21), (64, 1)]
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 16}
    check(chunks, **shape, dtype=torch.float32, rows=32, window=window, quantization="int8")


LOGITS: list[dict[str, Any]] = [
    {"softcap": 2.0, "scale": 0.3},
    {"sinks": True},
    {"sinks": True, "softcap": 5.0, "window": 20},
]


@pytest.mark.parametrize("logits", LOGITS, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "quantization"), [(6, 2, 16, "none"), (2, 1, 256, "none"), (6, 2, 32, "int8")], ids=str
)
def test_softcaps_and_sinks(num_heads: int, num_kv_heads: int, head_dim: int, quantization: str, logits: dict[str, Any]) -> None:
    chunks = [(0, 37), (60, 21), (64, 1)]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": 16}
    check(chunks, **shape, dtype=torch.float32, quantization=quantization, **logits)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("quantization", ["none", *FORMATS])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(64, 8, 64), (32, 16, 128)])
def test_hopper_softcaps_and_sinks(num_heads: int, num_kv_heads: int, head_dim: int, quantization: str) -> None:
    from twostep.model.kernels.hopper_trial import trial  # noqa: PLC0415 - Gluon is there on Hopper only

    shape = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": 16}
    kv = KvShape(num_layers=2, num_blocks=9, **shape, dtype="bfloat16", quantization=quantization)
    chunks = [*RAGGED, (0, 700), (513, 257), (127, 129)]
    for logits in LOGITS:
        softcap, sinks = logits.get("softcap", 0.0), logits.get("sinks", False)
        assert not trial(kv, num_heads, torch.device(DEVICE), softcap=softcap, sinks=sinks)
        check(chunks, num_heads=num_heads, **shape, dtype=torch.bfloat16, num_programs=132, quantization=quantization, **logits)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype", "windows"),
    [
        (32, 8, 128, 16, torch.bfloat16, (0, 1, 100, 300)),
        (9, 3, 64, 32, torch.bfloat16, (0, 257)),
        (2, 2, 128, 64, torch.float16, (0, 30)),
        (7, 1, 64, 128, torch.float16, (0, 128)),
        (5, 1, 128, 8, torch.bfloat16, (0,)),
    ],
)
def test_hopper(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, windows: tuple[int, ...]) -> None:
    chunks = [*RAGGED, (0, 700), (513, 257), (1000, 64), (127, 129), (128, 128)]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    for window in windows:
        for num_programs in (1, 7, 132):
            check(chunks, **shape, dtype=dtype, window=window, num_programs=num_programs)


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "windows"),
    [(32, 8, 128, 16, (0, 1, 100, 300)), (9, 3, 64, 32, (0, 257)), (7, 1, 64, 4, (0,)), (5, 1, 128, 64, (0, 128))],
)
def test_hopper_over_quantized_blocks(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, windows: tuple[int, ...], quantization: str
) -> None:
    from twostep.model.kernels.hopper_trial import trial  # noqa: PLC0415 - Gluon is there on Hopper only

    kv = KvShape(
        num_layers=2,
        num_blocks=9,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype="bfloat16",
        quantization=quantization,
    )
    assert not trial(kv, num_heads, torch.device(DEVICE))
    chunks = [*RAGGED, (0, 700), (513, 257), (1000, 64), (127, 129), (128, 128)]
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    for window in windows:
        for num_programs in (1, 7, 132):
            check(chunks, **shape, dtype=torch.bfloat16, window=window, num_programs=num_programs, quantization=quantization)


@pytest.mark.skipif(ON_HOPPER, reason="the kernel itself is tried there")
@pytest.mark.parametrize("quantization", ["none", *FORMATS])
def test_hopper_s_kernels_have_to_agree_with_the_portable_one(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from twostep.model.kernels import hopper_trial as hopper  # noqa: PLC0415 - Gluon is no part of some Tritons

    kv = KvShape(num_layers=2, num_blocks=9, num_kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16", quantization=quantization)
    shape = TileShape(num_rows=HOPPER_ROWS, num_keys=64, num_warps=4, num_stages=1)
    left_out: dict[str, Any] = {}

    def stand_in(qkv: torch.Tensor, out: torch.Tensor, *given: Any, num_programs: int, **inputs: Any) -> None:
        prefill_attention(qkv, out, *given, shape=shape, **inputs | left_out)

    monkeypatch.setattr(hopper, "hopper_attention" if quantization == "none" else "hopper_quantized_attention", stand_in)
    monkeypatch.setattr(hopper, "num_sms_of", lambda device: 1)
    assert not hopper.trial(kv, 2, torch.device(DEVICE), softcap=2.0, sinks=True)
    left_out = {"sinks": None}
    assert hopper.trial(kv, 2, torch.device(DEVICE), softcap=2.0, sinks=True)
    left_out = {"softcap": 0.0}
    assert hopper.trial(kv, 2, torch.device(DEVICE), softcap=1.0, sinks=False)


def test_tails_are_zeros_and_nothing_else_changes() -> None:
    lengths, block_size = [1, 16, 17, 40, 79], 16
    cache = poisoned_pool(torch.bfloat16, num_blocks=14, num_layers=3, num_kv_heads=2, block_size=block_size, head_dim=24)
    tables = fill(cache, lengths, seed=5)
    want = cache.tensor.clone()
    for s, length in enumerate(lengths):
        if length % block_size:
            want[int(tables[s, length // block_size]), :, :, :, length % block_size :] = 0
    clear_tails(cache, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), torch.from_numpy(tables).to(DEVICE))
    torch.testing.assert_close(cache.tensor, want, rtol=0, atol=0, equal_nan=True)


@given(
    num_queries=st.lists(st.sampled_from([0, 1, 1, 1, 2, 9]), max_size=9),
    block_size=st.sampled_from([8, 16, 24, 32]),
)
def test_flash_decoding_serves_what_comes_first(num_queries: list[int], block_size: int) -> None:
    count = num_leading_decodes(num_queries, block_size)
    assert all(n == 1 for n in num_queries[:count])
    assert count == 0 or block_size % 16 == 0
    assert block_size % 16 or count == len(num_queries) or num_queries[count] != 1


def test_the_hopper_kernel_is_for_what_it_can_hold() -> None:
    kv = KvShape(num_blocks=9, block_size=16, num_layers=2, num_kv_heads=2, head_dim=128, dtype="bfloat16")
    good = {"num_heads": 8, "max_queries": 100, "capability": (9, 0)}
    assert uses_hopper(kv, **good)
    for change in ({"capability": None}, {"capability": (8, 0)}, {"capability": (10, 0)}, {"max_queries": 1}):
        assert not uses_hopper(kv, **(good | change)), change
    for change in (
        {"dtype": "float32"},
        {"head_dim": 80},
        {"head_dim": 256},
        {"block_size": 5},
        {"quantization": "fp8", "dtype": "float16"},
        {"num_blocks": 2**25},
    ):
        assert not uses_hopper(replace(kv, **change), **good), change
    assert uses_hopper(replace(kv, quantization="int8", block_size=4, num_blocks=2**25), **good)
    assert not uses_hopper(replace(kv, quantization="int4"), **good)


def test_tiles_cover_every_query_once_heaviest_first() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 200, 40)
    lengths = counts + rng.integers(0, 500, 40)
    (num_tiles, _), *rest = plan_tiles(counts, lengths, 32).tolist()
    tiles = np.array(rest)
    assert num_tiles == len(tiles)
    assert sorted(map(tuple, tiles.tolist())) == [(s, f) for s in range(40) for f in range(0, int(counts[s]), 32)]
    ends = [int(lengths[s] - counts[s]) + min(f + 32, int(counts[s])) for s, f in tiles.tolist()]
    assert ends == sorted(ends, reverse=True)
