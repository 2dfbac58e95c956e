"""Prefill attention for Hopper (sm_90): tensor cores and softmax overlap as in FlashAttention-3 (Shah et al., 2024), blocks by TMA.

    warp group 0    64 rows of queries    scores of tile i + 1 | values of tile i        both products run on the tensor cores
    warp group 1    the other 64 rows     softmax of tile i + 1 meanwhile                while the other group's softmax runs too
    one warp        block table → TMA: 16 tokens at once straight into the tiles of keys and values, STAGES tiles ahead

    rows    token 0: the SHARE query heads of the KV head, token 1: the same, ...      128 rows a program
    tiles   NUM_KEYS keys, the last (which needs the causal mask) first

A program takes several tiles of queries, there and back over the list that is sorted by weight, so that all end at about the same time
and the next tile's keys are on their way while the last one's results are written.

Written in Gluon, Triton's lower language, which its interpreter does not run: this kernel is under test on a Hopper GPU only
(tests/kernels/test_kernel_prefill.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from twostep.engine.batch import KvShape
from twostep.model.kernels.triton_prefill import HOPPER_ROWS
from twostep.model.kernels.triton_scores import LOG2_E, log2_scale
from twostep.model.step.kv_cache import KvCache

_NUM_KEYS = 128
# Columns of one TMA box: rows of 128 bytes are what the tensor cores' swizzle is made of.
_BOX_COLUMNS = 64
_NUM_STAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperProgram:
    """Says what the kernel is compiled for. `tokens` of a tile of queries; `block_rows` of the pool from block to block; `turned`: values
    lie in shared memory by dimension, not by key."""

    num_kv_heads: int
    share: int
    tokens: int
    head_dim: int
    block_size: int
    block_rows: int
    window: int
    softcap: float
    sinks: bool
    num_keys: int
    stages: int
    turned: bool
    fp8: bool


def hopper_attention(
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
    num_programs: int,
    blocks: TensorDescriptor | None = None,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """triton_prefill.prefill_attention for shapes that triton_prefill.uses_hopper allows: tiles of HOPPER_ROWS // share tokens, no
    TileShape. Slots past a sequence's end in its last block are read and have to be finite: clear_tails comes before.

    num_programs  how many run at once: the number of multiprocessors
    blocks        pool_blocks(cache), the same for all layers; None: made here
    """
    kv = cache.shape
    most_items = (len(tiles) - 1) * kv.num_kv_heads
    if not most_items:
        return
    assert qkv.stride(1) == 1
    assert out.is_contiguous()
    assert block_tables.stride(1) == 1
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous())
    program = program_of(kv, num_heads, window, softcap, sinks is not None)
    _attention_kernel[(min(most_items, num_programs),)](
        qkv, out, pool_blocks(cache) if blocks is None else blocks, tiles, query_start, seq_lens, block_tables, qkv.stride(0),
        out.stride(0), block_tables.stride(0), layer * _rows_of_layer(kv), kv.num_blocks * program.block_rows,
        log2_scale(kv.head_dim, scale, softcap), sinks, P=program, num_warps=4, maxnreg=168,
    )  # fmt: skip


def pool_blocks(cache: KvCache) -> TensorDescriptor:
    """Describes the pool to the tensor memory accelerator, as rows of one head's numbers."""
    kv = cache.shape
    rows = cache.tensor.view(-1, kv.head_dim)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [kv.block_size, _BOX_COLUMNS], layout)


@functools.cache
def program_of(kv: KvShape, num_heads: int, window: int, softcap: float, sinks: bool) -> HopperProgram:
    share = num_heads // kv.num_kv_heads
    return HopperProgram(
        num_kv_heads=kv.num_kv_heads,
        share=share,
        tokens=HOPPER_ROWS // share,
        head_dim=kv.head_dim,
        block_size=kv.block_size,
        block_rows=kv.num_layers * _rows_of_layer(kv),
        window=window,
        softcap=softcap,
        sinks=sinks,
        num_keys=_NUM_KEYS,
        stages=_NUM_STAGES,
        turned=kv.quantization != "none",
        fp8=kv.quantization == "fp8",
    )


def _rows_of_layer(kv: KvShape) -> int:
    return 2 * kv.num_kv_heads * kv.block_size


@gluon.jit
def tile_of(item, step, P: gl.constexpr):
    """KV head, sequence, first query, rows and length of an item, and its tiles of keys: [first_tile, num_tiles)."""
    tiles_ptr, query_start_ptr, seq_lens_ptr = step
    tile = item // P.num_kv_heads
    kv_head = item % P.num_kv_heads
    seq = gl.load(tiles_ptr + 2 + tile * 2)
    first = gl.load(tiles_ptr + 2 + tile * 2 + 1)
    row_start = gl.load(query_start_ptr + seq)
    num_queries = gl.load(query_start_ptr + seq + 1) - row_start
    seq_len = gl.load(seq_lens_ptr + seq)
    context = seq_len - num_queries
    num_tiles = (gl.minimum(context + first + P.tokens, seq_len) + P.num_keys - 1) // P.num_keys
    first_tile = num_tiles * 0
    if P.window > 0:
        first_tile = gl.maximum(context + first + 1 - P.window, 0) // P.num_keys
    return kv_head, seq, first, row_start, num_queries, seq_len, first_tile, num_tiles


@gluon.jit
def item_of(turn):
    """There and back over the list: who has the heaviest item of one turn has the lightest of the next."""
    width = gl.num_programs(0)
    me = gl.program_id(0)
    return turn * width + gl.where(turn % 2 == 0, me, width - 1 - me)


@gluon.jit
def _fill(blocks, ring, step, tables_ptr, stride_table, layer_row, num_rows, P: gl.constexpr):
    """The loading warp. A tile [P.num_keys, P.head_dim] lies in shared memory as P.head_dim / 64 columns of [P.num_keys, 64]."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = ring
    num_items = gl.load(step[0]) * P.num_kv_heads
    BOX_COLUMNS: gl.constexpr = 64
    TILE_BYTES: gl.constexpr = P.num_keys * P.head_dim * 2
    BLOCKS: gl.constexpr = P.num_keys // P.block_size
    BOXES: gl.constexpr = P.head_dim // BOX_COLUMNS
    count = 0
    for turn in range(0, (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn)
        if item < num_items:
            kv_head, seq, _, _, _, seq_len, first_tile, num_tiles = tile_of(item, step, P)
            table_ptr = tables_ptr + seq.to(gl.int64) * stride_table
            num_blocks = (seq_len + P.block_size - 1) // P.block_size
            for i in range(first_tile, num_tiles):
                first_block = (num_tiles - 1 - i + first_tile) * (P.num_keys // P.block_size)
                stage = count % P.stages
                phase = (count // P.stages) & 1 ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), TILE_BYTES)
                for b in gl.static_range(BLOCKS):
                    # Past the sequence's blocks a row past the pool's, for which TMA writes zeros.
                    there = first_block + b < num_blocks
                    block = gl.load(table_ptr + first_block + b, mask=there, other=0)
                    row = gl.where(there, block * P.block_rows + layer_row + kv_head * P.block_size, num_rows)
                    for c in gl.static_range(BOXES):
                        tma.async_copy_global_to_shared(
                            blocks, [row, c * BOX_COLUMNS], k_full.index(stage),
                            k_smem.index(stage).slice(c * P.num_keys + b * P.block_size, P.block_size),
                        )  # fmt: skip
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), TILE_BYTES)
                for b in gl.static_range(BLOCKS):
                    there = first_block + b < num_blocks
                    block = gl.load(table_ptr + first_block + b, mask=there, other=0)
                    row = gl.where(there, block * P.block_rows + layer_row + (P.num_kv_heads + kv_head) * P.block_size, num_rows)
                    for c in gl.static_range(BOXES):
                        tma.async_copy_global_to_shared(
                            blocks, [row, c * BOX_COLUMNS], v_full.index(stage),
                            v_smem.index(stage).slice(c * P.num_keys + b * P.block_size, P.block_size),
                        )  # fmt: skip
                count += 1


@gluon.jit
def _values(v_smem, stage, P: gl.constexpr):
    """A tile of values [P.num_keys, P.head_dim], whichever way it lies."""
    if P.turned:
        return v_smem.index(stage)._reinterpret(v_smem.dtype, [P.head_dim, P.num_keys], v_smem.layout).permute((1, 0))
    else:
        return v_smem.index(stage)._reinterpret(v_smem.dtype, [P.num_keys, P.head_dim], v_smem.layout)


@gluon.jit
def _softmax(score, best, total, position, key_start, scale_log2, P: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights of a tile's scores under the new maximum, and by how much the old sums shrink."""
    if P.softcap > 0:
        # As triton_scores.capped has it, which Gluon cannot call.
        score = P.softcap * LOG2_E - 2.0 * P.softcap * LOG2_E / (gl.exp2(score * scale_log2) + 1.0)
        scale_log2 = 1.0
    if MASKED:
        key = (key_start + gl.arange(0, P.num_keys, layout=gl.SliceLayout(0, LAYOUT)))[None, :]
        seen = key <= position[:, None]
        if P.window > 0:
            seen = seen & (key > position[:, None] - P.window)
        score = gl.where(seen, score, float("-inf"))
    best_now = gl.maximum(best, gl.max(score, 1) * scale_log2)
    # A row that has seen no key yet has no maximum to subtract.
    base = gl.where(best_now == float("-inf"), 0.0, best_now) if MASKED else best_now
    weight = gl.exp2(score * scale_log2 - base[:, None])
    shrink = gl.exp2(best - base)
    return weight, best_now, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _fold(
    q, ring, count, weight, acc, best, total, position, key_start, scale_log2,
    P: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Scores of tile `count` and values of the tile before run at once; the softmax of the former overlaps the latter."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = ring
    NUM_KEYS: gl.constexpr = P.num_keys
    stage = count % P.stages
    before = (count - 1) % P.stages
    keys = k_smem.index(stage)._reinterpret(k_smem.dtype, [P.num_keys, P.head_dim], k_smem.layout).permute((1, 0))
    values = _values(v_smem, before, P)
    mbarrier.wait(k_full.index(stage), (count // P.stages) & 1)
    score_token = warpgroup_mma(q, keys, gl.zeros([64, NUM_KEYS], gl.float32, SCORES), use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((count - 1) // P.stages) & 1)
    acc_token = warpgroup_mma(weight, values, acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=(score_token,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    weight_now, best, total, shrink = _softmax(score, best, total, position, key_start, scale_log2, P, MASKED, SCORES)
    acc = warpgroup_mma_wait(0, deps=(acc_token,))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.convert_layout(weight_now.to(k_smem.dtype), WEIGHTS), acc, best, total


@gluon.jit
def attend(q_ptr, out_ptr, q_smem, ring, step, stride_q, stride_out, scale_log2, sinks_ptr, GROUP: gl.constexpr, P: gl.constexpr):
    """A warp group: 64 rows of each item."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = ring
    num_items = gl.load(step[0]) * P.num_kv_heads
    ROWS: gl.constexpr = 64
    NUM_KEYS: gl.constexpr = P.num_keys
    HEAD_DIM: gl.constexpr = P.head_dim
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, P.num_keys, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, P.head_dim, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    # How rows travel between shared and global memory: 16 bytes a thread.
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // P.head_dim, P.head_dim // 8], [4, 1], [1, 0])
    q = q_smem.index(GROUP)
    count = 0
    for turn in range(0, (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn)
        if item < num_items:
            kv_head, _, first, row_start, num_queries, seq_len, first_tile, num_tiles = tile_of(item, step, P)
            context = seq_len - num_queries
            row = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
            d = gl.arange(0, P.head_dim, layout=gl.SliceLayout(0, WIDE))
            valid = (first + row // P.share < num_queries) & (row // P.share < P.tokens)
            token = (row_start + first + row // P.share).to(gl.int64)
            column = (kv_head * P.share + row % P.share) * P.head_dim
            queries = gl.load(q_ptr + (token * stride_q + column)[:, None] + d[None, :], mask=valid[:, None], other=0.0)
            gl.thread_barrier()
            q.store(queries)
            fence_async_shared()
            gl.thread_barrier()

            position = context + first + (GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))) // P.share
            best = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            if P.sinks:
                head = kv_head * P.share + (GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))) % P.share
                best = gl.load(sinks_ptr + head) * LOG2_E
                total = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, ACC)

            # Tiles from `masked_to` on have keys that some row does not see yet, those before `masked_from` keys out of some window.
            masked_to = gl.minimum((context + first + 1) // P.num_keys, num_tiles - 1)
            masked_from = first_tile
            if P.window > 0:
                masked_from = gl.maximum(context + first + P.tokens - P.window + P.num_keys - 1, 0) // P.num_keys
                masked_from = gl.minimum(gl.maximum(masked_from, first_tile), masked_to)

            stage = count % P.stages
            keys = k_smem.index(stage)._reinterpret(k_smem.dtype, [P.num_keys, P.head_dim], k_smem.layout).permute((1, 0))
            mbarrier.wait(k_full.index(stage), (count // P.stages) & 1)
            score_token = warpgroup_mma(q, keys, gl.zeros([ROWS, NUM_KEYS], gl.float32, SCORES), use_acc=False, is_async=True)
            score = warpgroup_mma_wait(0, deps=(score_token,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            weight32, best, total, _ = _softmax(score, best, total, position, (num_tiles - 1) * P.num_keys, scale_log2, P, True, SCORES)
            weight = gl.convert_layout(weight32.to(k_smem.dtype), WEIGHTS)
            count += 1
            for i in range(0, num_tiles - 1 - masked_to):
                weight, acc, best, total = _fold(
                    q, ring, count, weight, acc, best, total, position, (num_tiles - 2 - i) * P.num_keys, scale_log2,
                    P, True, SCORES, WEIGHTS,
                )  # fmt: skip
                count += 1
            for _ in range(masked_from, masked_to):
                weight, acc, best, total = _fold(
                    q, ring, count, weight, acc, best, total, position, 0, scale_log2,
                    P, False, SCORES, WEIGHTS,
                )  # fmt: skip
                count += 1
            if P.window > 0:
                for i in range(first_tile, masked_from):
                    weight, acc, best, total = _fold(
                        q, ring, count, weight, acc, best, total, position, (masked_from - 1 - i + first_tile) * P.num_keys, scale_log2,
                        P, True, SCORES, WEIGHTS,
                    )  # fmt: skip
                    count += 1
            last = (count - 1) % P.stages
            values = _values(v_smem, last, P)
            mbarrier.wait(v_full.index(last), ((count - 1) // P.stages) & 1)
            acc_token = warpgroup_mma(weight, values, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
            mbarrier.arrive(v_empty.index(last), count=1)
            acc = acc / gl.convert_layout(total, gl.SliceLayout(1, ACC))[:, None]
            result = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), WIDE)
            gl.store(out_ptr + (token * stride_out + column)[:, None] + d[None, :], result, mask=valid[:, None])


@gluon.jit(do_not_specialize=["stride_table", "layer_row", "num_rows"])
def _attention_kernel(
    q_ptr, out_ptr, blocks, tiles_ptr, query_start_ptr, seq_lens_ptr, tables_ptr, stride_q, stride_out, stride_table,
    layer_row, num_rows, scale_log2, sinks_ptr, P: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = P.head_dim // 64
    STAGES: gl.constexpr = P.stages
    q_smem = gl.allocate_shared_memory(blocks.dtype, [2, 64, P.head_dim], blocks.layout)
    k_smem = gl.allocate_shared_memory(blocks.dtype, [P.stages, COLUMNS * P.num_keys, 64], blocks.layout)
    v_smem = gl.allocate_shared_memory(blocks.dtype, [P.stages, COLUMNS * P.num_keys, 64], blocks.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    ring = (k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    step = (tiles_ptr, query_start_ptr, seq_lens_ptr)
    gl.warp_specialize(
        [
            (attend, (q_ptr, out_ptr, q_smem, ring, step, stride_q, stride_out, scale_log2, sinks_ptr, 0, P)),
            (attend, (q_ptr, out_ptr, q_smem, ring, step, stride_q, stride_out, scale_log2, sinks_ptr, 1, P)),
            (_fill, (blocks, ring, step, tables_ptr, stride_table, layer_row, num_rows, P)),
        ],
        [4, 1],
        [232, 40],
    )
