"""Attention of prompt chunks over the block pool, on tensor cores: online softmax over tiles of keys (Dao, FlashAttention-2, 2023).

    one program = one tile of a sequence's queries x one KV head

    rows   token 0: the SHARE query heads of the KV head, token 1: the same, ...      BLOCK_M rows
    keys   blocks of the sequence in order, read through its block table              BLOCK_N at once

The query heads that share a KV head are rows of one tile, so that K and V are read once for all of them and the causal edge is narrow
in tokens. Tiles are listed heaviest first, so that the last ones to run are short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from twostep.engine.batch import KvShape
from twostep.model.kernels.triton_pull import clear_sums
from twostep.model.kernels.triton_quantized_kv import converts_fp8, load_quantized, words_of_slot
from twostep.model.kernels.triton_scores import LOG2_E, capped, log2_scale
from twostep.model.step.kv_cache import KvCache

_CLEAR_TILE = 8192
HOPPER_ROWS = 128
# Rows (tokens times the query heads of a KV head) of the largest chunk from which on a tile of HOPPER_ROWS is filled well enough.
_ENOUGH_ROWS = 64


def uses_hopper(kv: KvShape, *, num_heads: int, max_queries: int, capability: tuple[int, int] | None) -> bool:
    """Whether hopper_prefill.py, or hopper_prefill_quantized.py, attends chunks of at most `max_queries` tokens; the kernel here does
    otherwise, exactly in float32. Chosen by measurement (benchmarks/gpu_prefill_attention.py, table in RESULTS.md). `capability` is the
    device's, None: no NVIDIA GPU."""
    share = num_heads // kv.num_kv_heads
    rows = kv.num_blocks * kv.num_layers * kv.vectors * kv.block_size
    if kv.quantization == "none":
        # What TMA boxes can be.
        readable = kv.dtype in ("bfloat16", "float16") and kv.block_size in (8, 16, 32, 64, 128) and rows < 2**31
    else:
        # What bytes are made numbers of, and what is: int4 is read by the kernel here.
        readable = kv.dtype == "bfloat16" and kv.quantization != "int4"
    return (
        capability is not None
        and capability[0] == 9
        and readable
        # What tiles in shared memory can be.
        and kv.head_dim in (64, 128)
        and share <= HOPPER_ROWS
        and share * max_queries >= _ENOUGH_ROWS
    )


def num_leading_decodes(num_queries: list[int], block_size: int) -> int:
    """Returns how many sequences, from the first on, flash-decoding serves: those of one token, which a step lists before its chunks."""
    if block_size % 16:
        return 0
    for index, count in enumerate(num_queries):
        if count != 1:
            return index
    return len(num_queries)


@dataclass(frozen=True, slots=True)
class TileShape:
    """How one program works. `num_rows` (a power of 2) rows of queries, `num_keys` keys at once."""

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


def tile_shape(dtype: torch.dtype, head_dim: int, share: int, max_queries: int, *, quantized: bool = False) -> TileShape:
    """The tile for chunks of at most `max_queries` tokens; `share` query heads to a KV head. `quantized`: bytes become numbers on the way,
    for which four warps have no registers beside 128 rows."""
    wide = triton.next_power_of_2(head_dim)
    largest = 64 if dtype == torch.float32 or wide > 128 else 128
    smallest = max(16, triton.next_power_of_2(share))
    rows = max(smallest, min(largest, triton.next_power_of_2(share * max_queries)))
    if dtype == torch.float32:
        return TileShape(num_rows=rows, num_keys=32, num_warps=4, num_stages=2)
    warps = 8 if quantized and rows == 128 else 4
    return TileShape(num_rows=rows, num_keys=64 if wide <= 128 else 32, num_warps=warps, num_stages=3 if wide <= 128 else 2)


def plan_tiles(num_queries: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64], tokens_per_tile: int) -> npt.NDArray[np.int32]:
    """int32 [1 + tiles, 2]: how many tiles follow; then of each the sequence, and its first query, counted in the chunk. Heaviest (most
    keys) first. A sequence without queries has no tile. The number is among them so that a captured step can be replayed with another."""
    counts = -(-num_queries // tokens_per_tile)
    seq = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens_per_tile
    last_key = (seq_lens - num_queries)[seq] + np.minimum(first + tokens_per_tile, num_queries[seq])
    order = np.argsort(-last_key, kind="stable")
    tiles = np.zeros((1 + len(seq), 2), np.int32)
    tiles[0, 0] = len(seq)
    tiles[1:, 0], tiles[1:, 1] = seq[order], first[order]
    return tiles


def prefill_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    cache: KvCache,
    layer: int,
    *,
    num_heads: int,
    tiles: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    shape: TileShape,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Causal attention of chunks whose own keys and values are in the pool already. Writes the rows of `out` that tiles cover.

    qkv           [T, at least num_heads * D], rows dense: query heads first
    out           [T, num_heads * D], dense
    tiles         int32 [1 + most tiles, 2], by plan_tiles with `shape.num_rows // share` tokens a tile
    query_start   int32 [S + 1], rows of qkv of each sequence
    seq_lens      int32 [S], keys of each sequence, its chunk included
    block_tables  int32 [S, B]; entries wholly before every window are not read
    window        keys that a query sees, its own included; 0: all
    scale, softcap, sinks    of the logits, as AttentionSpec has them; sinks float32 [num_heads], those of the layer
    """
    pool, kv, quantized = cache.tensor, cache.shape, cache.quantized
    assert qkv.stride(1) == 1
    assert out.is_contiguous()
    assert pool.stride(-1) == 1
    assert block_tables.stride(1) == 1
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous())
    share = num_heads // kv.num_kv_heads
    if len(tiles) == 1:
        return
    words = None if quantized is None else quantized.words[:, layer]
    # The interpreter multiplies bfloat16 wrongly.
    _prefill_kernel[((len(tiles) - 1) * kv.num_kv_heads,)](
        qkv, out, pool[:, layer], tiles, query_start, seq_lens, block_tables, qkv.stride(0), out.stride(0), block_tables.stride(0),
        pool.stride(0), *(pool.stride()[2:5] if quantized is None else quantized.strides), words, 0 if words is None else words.stride(0),
        log2_scale(kv.head_dim, scale, softcap), sinks,
        NUM_KV_HEADS=kv.num_kv_heads, SHARE=share, HEAD_DIM=kv.head_dim, BLOCK_D=max(16, triton.next_power_of_2(kv.head_dim)),
        BLOCK_SIZE=kv.block_size, BLOCK_M=shape.num_rows, BLOCK_N=shape.num_keys, TOKENS=shape.num_rows // share, WINDOW=window,
        SOFTCAP=softcap, SINKS=sinks is not None, FORMAT=kv.quantization, CONVERTS=converts_fp8(pool.device), IN_FLOAT32=not pool.is_cuda,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip


def clear_tails(cache: KvCache, seq_lens: torch.Tensor, block_tables: torch.Tensor) -> None:
    """Zeros the slots past each sequence's end in its last block, in all layers: for a kernel that reads blocks as a whole and must not
    meet what is no number (0 * NaN is NaN). The block is the sequence's own: it writes its last token there in this step.

    seq_lens int32 [S], block_tables int32 [S, B]
    """
    kv, pool = cache.shape, cache.tensor
    assert pool.is_contiguous()
    assert block_tables.stride(1) == 1
    numbers = kv.num_layers * kv.vectors * kv.block_size * kv.head_dim
    if len(seq_lens) and kv.block_size > 1:
        _clear_kernel[(len(seq_lens), triton.cdiv(numbers, _CLEAR_TILE))](
            pool, seq_lens, block_tables, block_tables.stride(0), numbers,
            HEAD_DIM=kv.head_dim, BLOCK_SIZE=kv.block_size, TILE=_CLEAR_TILE, num_warps=4,
        )  # fmt: skip
        if cache.sums is not None:
            clear_sums(cache.sums.tensor, cache.sums.of_zeros, seq_lens, block_tables)


# Of all sequences but some first ones: addresses of any alignment.
@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["seq_lens_ptr", "tables_ptr"])
def _clear_kernel(
    pool_ptr, seq_lens_ptr, tables_ptr, stride_table, numbers, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    seq = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq)
    used = seq_len % BLOCK_SIZE
    if used > 0:
        block = tl.load(tables_ptr + seq * stride_table + seq_len // BLOCK_SIZE).to(tl.int64)
        number = tl.program_id(1) * TILE + tl.arange(0, TILE)
        unwritten = (number < numbers) & (number // HEAD_DIM % BLOCK_SIZE >= used)
        tl.store(pool_ptr + block * numbers + number, tl.zeros([TILE], pool_ptr.dtype.element_ty), mask=unwritten)


# Behind a step's decodes the small arrays begin anywhere. Single numbers are read from them: a kernel for each alignment gains nothing,
# and would be built while somebody waits.
@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["tiles_ptr", "query_start_ptr", "seq_lens_ptr", "tables_ptr"],
)
def _prefill_kernel(
    q_ptr, out_ptr, pool_ptr, tiles_ptr, query_start_ptr, seq_lens_ptr, tables_ptr, stride_q, stride_out, stride_table,
    stride_block, stride_kv, stride_head, stride_slot, words_ptr, stride_words, scale_log2, sinks_ptr,
    NUM_KV_HEADS: tl.constexpr, SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, FORMAT: tl.constexpr, CONVERTS: tl.constexpr, IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    if tile >= tl.load(tiles_ptr):
        return
    seq = tl.load(tiles_ptr + 2 + tile * 2)
    first = tl.load(tiles_ptr + 2 + tile * 2 + 1)
    row_start = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - row_start
    seq_len = tl.load(seq_lens_ptr + seq)
    context = seq_len - num_queries

    row = tl.arange(0, BLOCK_M)
    token = row // SHARE
    valid = (token < TOKENS) & (first + token < num_queries)
    position = context + first + token
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    token_row = (row_start + first + token).to(tl.int64)
    head_col = (kv_head * SHARE + row % SHARE) * HEAD_DIM
    q = tl.load(q_ptr + token_row[:, None] * stride_q + head_col[:, None] + d[None, :], mask=valid[:, None] & d_mask[None, :], other=0.0)
    if IN_FLOAT32:
        q = q.to(tl.float32)

    k_ptr = pool_ptr + kv_head.to(tl.int64) * stride_head
    v_ptr = k_ptr + stride_kv
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    if FORMAT != "none":
        words_ptr += kv_head * BLOCK_SIZE * words_of_slot(FORMAT, HEAD_DIM)
    pool = (k_ptr, v_ptr, table_ptr, stride_block, stride_slot, words_ptr, stride_words)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        best = tl.load(sinks_ptr + kv_head * SHARE + row % SHARE) * LOG2_E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Every row sees all keys up to the first token's own, and all from where the last token's window begins.
    seen_by_all = (context + first + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(context + first + TOKENS, seq_len)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(context + first + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        in_all_windows = tl.maximum(end - WINDOW + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        in_all_windows = tl.minimum(in_all_windows, seen_by_all)
        best, total, acc = _attend_keys(
            best,
            total,
            acc,
            q,
            position,
            pool,
            start,
            in_all_windows,
            end,
            scale_log2,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_SIZE,
            BLOCK_N,
            WINDOW,
            SOFTCAP,
            FORMAT,
            CONVERTS,
            IN_FLOAT32,
            True,
        )
        start = in_all_windows
    best, total, acc = _attend_keys(
        best,
        total,
        acc,
        q,
        position,
        pool,
        start,
        seen_by_all,
        end,
        scale_log2,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        BLOCK_N,
        WINDOW,
        SOFTCAP,
        FORMAT,
        CONVERTS,
        IN_FLOAT32,
        False,
    )
    best, total, acc = _attend_keys(
        best,
        total,
        acc,
        q,
        position,
        pool,
        seen_by_all,
        end,
        end,
        scale_log2,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        BLOCK_N,
        WINDOW,
        SOFTCAP,
        FORMAT,
        CONVERTS,
        IN_FLOAT32,
        True,
    )
    acc = acc / tl.where(valid, total, 1.0)[:, None]
    out = out_ptr + token_row[:, None] * stride_out + head_col[:, None] + d[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & d_mask[None, :])


@triton.jit
def _attend_keys(
    best, total, acc, q, position, pool, start, stop, end, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, FORMAT: tl.constexpr, CONVERTS: tl.constexpr, IN_FLOAT32: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Folds keys [start, stop) into the running maximum, sum and weighted values of each row."""
    k_ptr, v_ptr, table_ptr, stride_block, stride_slot, words_ptr, stride_words = pool
    d = tl.arange(0, BLOCK_D)
    d_mask = d < HEAD_DIM
    for key_start in tl.range(start, stop, BLOCK_N):
        key = key_start + tl.arange(0, BLOCK_N)
        # Never more than is there: a slot not yet written may hold anything, and 0 * NaN is NaN.
        if FORMAT != "none":
            k, v = load_quantized(
                k_ptr, v_ptr, words_ptr, table_ptr, key_start, end, stride_block, stride_words,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, FORMAT, CONVERTS, q.dtype,
            )  # fmt: skip
        else:
            if MASKED:
                there = key < end
                block = tl.load(table_ptr + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            else:
                block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
            at = (block * stride_block + (key % BLOCK_SIZE) * stride_slot)[:, None] + d[None, :]
            if MASKED:
                k = tl.load(k_ptr + at, mask=there[:, None] & d_mask[None, :], other=0.0)
                v = tl.load(v_ptr + at, mask=there[:, None] & d_mask[None, :], other=0.0)
            elif BLOCK_D == HEAD_DIM:
                k = tl.load(k_ptr + at)
                v = tl.load(v_ptr + at)
            else:
                k = tl.load(k_ptr + at, mask=d_mask[None, :], other=0.0)
                v = tl.load(v_ptr + at, mask=d_mask[None, :], other=0.0)
            if IN_FLOAT32:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if SOFTCAP > 0:
            score = capped(score, SOFTCAP)
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        base = new_best
        if MASKED and WINDOW > 0:
            # A row whose window begins later has no maximum to subtract yet.
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        best = new_best
    return best, total, acc
