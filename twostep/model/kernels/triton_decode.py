"""Decode attention over the block pool: flash-decoding with equal shares of work for every program.

1. DecodePlan.refresh plans the step on the device                    twostep/model/kernels/triton_decode_plan.py
2. A program walks its share, sequence by sequence; per sequence it folds tiles of keys into a running maximum, sum and
   weighted value of each query (online softmax)
3. A sequence all in one share is written at once. Of the others each program leaves its part in the workspace, and the one that
   arrives last merges the parts and writes (Dao et al., "Flash-Decoding", 2023); or a second launch does, where they are many

The query heads that share a KV head are the rows of one matrix product, padded to 16. A tile is several such products side by side,
one for each KV head and lane of keys; every warp has its own, so nothing is exchanged between warps while keys stream by. All heads
of a block lie beside each other in the pool, so a tile of many heads is one long run of memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostep.model.kernels.shared_prefix import OWN_COLUMNS
from twostep.model.kernels.triton_decode_merge import merge_kernel, merge_parts, part_row, worker_of
from twostep.model.kernels.triton_decode_plan import WORK_COLUMNS, DecodePlan, first_tile, last_tile
from twostep.model.kernels.triton_decode_quantized import attend_quantized, converts_fp8
from twostep.model.kernels.triton_launch import overlaps
from twostep.model.kernels.triton_shared_prefix import fold_states, log2_scale
from twostep.model.step.kv_cache import KvCache

# Numbers of parts that a warp of the merge has on their way at once; fewer where registers are to leave room for more programs.
_MERGE_NUMBERS = 2048
_MERGE_NUMBERS_QUANTIZED = 1024
# Of a multiprocessor, for 32 threads.
_REGISTERS = 2048


def decode_attention(
    q: torch.Tensor,
    cache: KvCache,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    plan: DecodePlan,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence over its blocks, its own slot included. Captured in a CUDA graph, it may be replayed
    with other lengths, tables and queries in the same tensors; `plan.refresh(seq_lens)` has to come before, once for all layers.

    q             [S, num_heads, D] in the pool's dtype, rows [num_heads, D] dense: a slice of a fused projection will do
    block_tables  int32 [S, B], rows dense; entries past a sequence's length, or before its window, are not read
    seq_lens      int32 [S], the new token counted; 0 gives zeros
    scale         of the scores; D ** -0.5 where it is None
    out           like q
    Returns out, or a new dense tensor.
    """
    shape, pool, layout = cache.shape, cache.tensor, plan.layout
    if out is None:
        out = q.new_empty(q.shape)
    assert q.shape == out.shape == (plan.num_seqs, plan.num_heads, shape.head_dim)
    assert q.dtype == out.dtype == cache.dtype
    for rows in (q, out):
        assert rows.stride()[1:] == (shape.head_dim, 1)
    assert pool.stride(-1) == 1
    quantized = cache.quantized
    merge_numbers = _MERGE_NUMBERS if quantized is None else _MERGE_NUMBERS_QUANTIZED
    assert quantized is None or plan.shared is None, "a shared prefix of quantized KV is read by each sequence"
    assert (block_tables.dtype, seq_lens.dtype) == (torch.int32, torch.int32)
    assert block_tables.shape[0] == plan.num_seqs
    assert block_tables.stride(1) == 1
    assert (shape.num_kv_heads, shape.head_dim, shape.block_size) == (
        plan.shape.num_kv_heads,
        plan.shape.head_dim,
        plan.shape.block_size,
    )
    share = plan.num_heads // shape.num_kv_heads
    share_wide, wide = triton.next_power_of_2(share), max(16, triton.next_power_of_2(shape.head_dim))
    pdl = overlaps(pool.device)
    scale_log2, shared = log2_scale(shape.head_dim, scale), plan.shared
    if shared is not None:
        shared.attend(q, cache, layer, block_tables, scale_log2=scale_log2)
    _decode_kernel[(plan.num_groups, plan.num_workers)](
        q,
        out,
        pool[:, layer],
        block_tables,
        seq_lens,
        plan.work,
        plan.parts,
        plan.scales,
        plan.counters,
        plan.work if shared is None else shared.listed,
        plan.parts if shared is None else shared.parts,
        plan.scales if shared is None else shared.scales,
        scale_log2,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        pool.stride(0),
        *(pool.stride()[2:5] if quantized is None else quantized.strides),
        None if quantized is None else quantized.words[:, layer],
        0 if quantized is None else quantized.words.stride(0),
        GROUPS=plan.num_groups,
        SHARE=share,
        ROWS=max(16 if quantized is None else 8, share_wide),
        HEADS=layout.num_heads,
        LANES=layout.num_lanes,
        KEYS=layout.num_keys,
        HEAD_DIM=shape.head_dim,
        BLOCK_D=wide,
        BLOCK_SIZE=shape.block_size,
        WINDOW=plan.window,
        QUANTIZATION=shape.quantization,
        CONVERTS_FP8=converts_fp8(pool.device),
        MERGE_SHARE=share_wide,
        MERGE_PARTS=max(2, min(16, merge_numbers * layout.num_warps // (layout.num_heads * share_wide * wide))),
        FUSED=plan.merges_itself,
        SHARED=0 if shared is None else OWN_COLUMNS,
        SHARED_ROWS=1 if shared is None else shared.tile.num_rows,
        # The interpreter multiplies bfloat16 wrongly.
        IN_FLOAT32=not pool.is_cuda,
        PDL=pdl,
        num_warps=layout.num_warps,
        num_stages=layout.num_stages,
        maxnreg=None if quantized is None else min(255, _REGISTERS // (layout.num_warps * layout.programs_per_sm) // 8 * 8),
        launch_pdl=pdl,
    )
    if not plan.merges_itself:
        merge_kernel[(plan.num_heads, plan.num_seqs)](
            out,
            plan.work,
            plan.starts,
            plan.parts,
            plan.scales,
            out.stride(0),
            plan.num_workers,
            GROUPS=plan.num_groups,
            PART_ROWS=layout.num_heads * share,
            HEAD_DIM=shape.head_dim,
            BLOCK_D=wide,
            MERGE_PARTS=plan.parts_at_once,
            PDL=pdl,
            num_warps=1 if plan.parts_at_once <= 8 else 4,
            launch_pdl=pdl,
        )
    return out


@triton.jit
def _decode_kernel(
    q_ptr,
    out_ptr,
    pool_ptr,
    tables_ptr,
    lens_ptr,
    work_ptr,
    parts_ptr,
    scales_ptr,
    counters_ptr,
    own_ptr,
    shared_parts_ptr,
    shared_scales_ptr,
    scale_log2,
    stride_q,
    stride_out,
    stride_table,
    stride_block,
    stride_kv,
    stride_head,
    stride_slot,
    words_ptr,
    stride_words,
    GROUPS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUANTIZATION: tl.constexpr,
    CONVERTS_FP8: tl.constexpr,
    MERGE_SHARE: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    FUSED: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    TILE: tl.constexpr = LANES * KEYS
    group = tl.program_id(0)
    worker = tl.program_id(1)
    num_workers = tl.num_programs(1)
    work = work_ptr + worker * WORK_COLUMNS
    position, end = tl.load(work), tl.load(work + 1)
    seq, tile = tl.load(work + 2), tl.load(work + 3)
    length, next_length = tl.load(work + 4), tl.load(work + 5)
    num_shared = position * 0
    next_shared = num_shared
    if SHARED > 0:
        num_shared, next_shared = tl.load(work + 6), tl.load(work + 7)
    active = tl.load(work_ptr + num_workers * WORK_COLUMNS)
    all_tiles = tl.load(work_ptr + num_workers * WORK_COLUMNS + 1)
    block = _load_blocks(tables_ptr, stride_table, seq, tile, length, position < end, HEADS, LANES, KEYS, BLOCK_SIZE, WINDOW)
    # What came before need not have ended: the plan is made by a launch of its own, and tables are there before that.
    if SHARED == 0 and PDL:
        gdc_wait()
    q = _load_queries(q_ptr, stride_q, seq, group, position < end, SHARE, ROWS, HEADS, LANES, HEAD_DIM, BLOCK_D)
    while position < end:
        num_tiles = tl.minimum(last_tile(length, TILE) - tile, end - position)
        # What the next sequence begins with is on its way while this one's keys stream by.
        more = position + num_tiles < end
        last_length = tl.load(lens_ptr + seq + 2, mask=position + num_tiles + 1 < end, other=0)
        last_shared = num_shared * 0
        if SHARED > 0:
            last_shared = tl.load(own_ptr + (seq + 2) * SHARED, mask=position + num_tiles + 1 < end, other=0)
            first_item, num_items = tl.load(own_ptr + seq * SHARED + 1), tl.load(own_ptr + seq * SHARED + 2)
            place = tl.load(own_ptr + seq * SHARED + 3)
        next_tile = first_tile(next_length, next_shared, TILE, WINDOW)
        next_block = _load_blocks(tables_ptr, stride_table, seq + 1, next_tile, next_length, more, HEADS, LANES, KEYS, BLOCK_SIZE, WINDOW)
        next_q = _load_queries(q_ptr, stride_q, seq + 1, group, more, SHARE, ROWS, HEADS, LANES, HEAD_DIM, BLOCK_D)
        if QUANTIZATION == "none":
            best, total, acc = _attend(
                q, pool_ptr, tables_ptr, stride_table, seq, block, group * HEADS, length, tile, num_tiles,
                scale_log2, stride_block, stride_kv, stride_head, stride_slot,
                SHARE, ROWS, HEADS, LANES, KEYS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, IN_FLOAT32,
            )  # fmt: skip
        else:
            best, total, acc = attend_quantized(
                q, pool_ptr, words_ptr, tables_ptr, stride_table, seq, block, group * HEADS, length, tile, num_tiles,
                scale_log2, stride_block, stride_kv, stride_head, stride_words, _load_blocks, _sum_first,
                QUANTIZATION == "fp8", CONVERTS_FP8, ROWS, HEADS, LANES, KEYS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, IN_FLOAT32,
            )  # fmt: skip
        # Where the sequence's tiles begin and end, counted over all sequences, says which workers have a part of it.
        start = first_tile(length, num_shared, TILE, WINDOW)
        if SHARED > 0:
            begins = (num_items > 0) & (tile == start)
            if begins:
                if PDL:
                    gdc_wait()
                best, total, acc = fold_states(
                    best, total, acc, shared_parts_ptr, shared_scales_ptr, first_item, num_items, place, group * HEADS, GROUPS * HEADS,
                    SHARE, SHARED_ROWS, HEAD_DIM, 4,
                )  # fmt: skip
        seq_start = position - (tile - start)
        seq_end = seq_start + last_tile(length, TILE) - start
        out = out_ptr + seq.to(tl.int64) * stride_out + group * (HEADS * SHARE * HEAD_DIM)
        KEPT: tl.constexpr = 8 if SHARE <= 8 else ROWS
        row = tl.arange(0, HEADS)[:, None] * SHARE + tl.arange(0, KEPT)[None, :]
        valid = (tl.arange(0, KEPT) < SHARE)[None, :] & (row >= 0)
        d = tl.arange(0, BLOCK_D)[None, None, :]
        at = row[:, :, None] * HEAD_DIM + d
        mask = valid[:, :, None] & (d < HEAD_DIM)
        if (seq_start >= position) & (seq_end <= end):
            result = acc / tl.where(total > 0, total, 1.0)[:, :, None]
            tl.store(out + at, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            first_worker = worker_of(seq_start, active, all_tiles)
            last_worker = worker_of(seq_end - 1, active, all_tiles)
            part = part_row(worker, first_worker, group, GROUPS, HEADS * SHARE)
            tl.store(parts_ptr + part * HEAD_DIM + at, acc, mask=mask)
            tl.store(scales_ptr + part * 2 + row, best, mask=valid)
            tl.store(scales_ptr + part * 2 + HEADS * SHARE + row, total, mask=valid)
            if FUSED:
                tl.debug_barrier()
                arrived = tl.atomic_add(counters_ptr + seq * GROUPS + group, 1, sem="acq_rel")
                if arrived == last_worker - first_worker:
                    merge_parts(
                        out, parts_ptr, scales_ptr, first_worker, last_worker, group,
                        GROUPS, SHARE, HEADS, HEAD_DIM, BLOCK_D, MERGE_SHARE, MERGE_PARTS,
                    )  # fmt: skip
                    tl.store(counters_ptr + seq * GROUPS + group, 0)
        position += num_tiles
        seq += 1
        tile = next_tile
        length = next_length
        next_length = last_length
        num_shared = next_shared
        next_shared = last_shared
        block = next_block
        q = next_q
    if SHARED > 0 and PDL:
        gdc_wait()


@triton.jit
def _load_blocks(
    tables_ptr, stride_table, seq, tile, length, there, HEADS: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Block numbers of a tile, one for each of its matrices; 0 where no key of theirs is seen."""
    key = tile * (LANES * KEYS) + tl.arange(0, LANES * HEADS) // HEADS * KEYS
    mask = there & (key < length)
    if WINDOW > 0:
        mask = mask & (key + KEYS > length - WINDOW)
    return tl.load(tables_ptr + seq.to(tl.int64) * stride_table + key // BLOCK_SIZE, mask=mask, other=0)


@triton.jit
def _load_queries(
    q_ptr, stride_q, seq, group, there, SHARE: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A sequence's queries [matrices, ROWS, BLOCK_D]."""
    head = group * HEADS + tl.arange(0, LANES * HEADS)[:, None, None] % HEADS
    row = tl.arange(0, ROWS)[None, :, None]
    d = tl.arange(0, BLOCK_D)[None, None, :]
    at = (head * SHARE + row) * HEAD_DIM + d
    return tl.load(q_ptr + seq.to(tl.int64) * stride_q + at, mask=there & (row < SHARE) & (d < HEAD_DIM) & (at >= 0), other=0.0)


@triton.jit
def _attend(
    q, pool_ptr, tables_ptr, stride_table, seq, block, first_head, length, tile, num_tiles, scale_log2,
    stride_block, stride_kv, stride_head, stride_slot,
    SHARE: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Running maximum [HEADS, rows] (in units of log2), sum, and weighted values [HEADS, rows, BLOCK_D] over `num_tiles` tiles, of
    which the first has the numbers `block`. 8 rows where the queries of a head are no more, else ROWS."""
    TILE: tl.constexpr = LANES * KEYS
    MATRICES: tl.constexpr = LANES * HEADS
    matrix = tl.arange(0, MATRICES)
    head_at = (first_head + matrix % HEADS).to(tl.int64) * stride_head
    d = tl.arange(0, BLOCK_D)[None, None, :]
    inside = tl.arange(0, KEYS)[None, :, None] * stride_slot + d
    if IN_FLOAT32:
        q = q.to(tl.float32)
    best = tl.full([MATRICES, ROWS], -1e38, tl.float32)
    total = tl.zeros([MATRICES, ROWS], tl.float32)
    acc = tl.zeros([MATRICES, ROWS, BLOCK_D], tl.float32)
    key = tile * TILE + matrix // HEADS * KEYS
    for i in tl.range(0, num_tiles):
        next_block = _load_blocks(
            tables_ptr, stride_table, seq, tile + i + 1, length, i + 1 < num_tiles, HEADS, LANES, KEYS, BLOCK_SIZE, WINDOW
        )
        at = block.to(tl.int64) * stride_block + head_at + (key % BLOCK_SIZE) * stride_slot
        each_key = key[:, None] + tl.arange(0, KEYS)[None, :]
        seen = each_key < length
        if WINDOW > 0:
            seen = seen & (each_key >= length - WINDOW)
        # Never more than is there: a slot not yet written may hold anything, and 0 * NaN is NaN.
        mask = seen[:, :, None] & (d < HEAD_DIM)
        k_ptr = pool_ptr + at[:, None, None] + inside
        k = tl.load(k_ptr, mask=mask, other=0.0)
        v = tl.load(k_ptr + stride_kv, mask=mask, other=0.0)
        if IN_FLOAT32:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        score = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision="ieee") * scale_log2
        score = tl.where(seen[:, None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 2))
        weight = tl.exp2(score - new_best[:, :, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, 2)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, :, None], input_precision="ieee")
        best = new_best
        key += TILE
        block = next_block
    KEPT: tl.constexpr = 8 if SHARE <= 8 else ROWS
    if SHARE <= 8:
        # The padding goes before anything is exchanged.
        best = _half(best)
        total = _half(total)
        acc = _half(acc)
    if LANES > 1:
        lanes_best = tl.reshape(best, [LANES, HEADS, KEPT])
        best = tl.max(lanes_best, 0)
        shrink = tl.exp2(lanes_best - best[None, :, :])
        total = tl.sum(tl.reshape(total, [LANES, HEADS, KEPT]) * shrink, 0)
        acc = _sum_first(tl.reshape(acc, [LANES, HEADS, KEPT, BLOCK_D]) * shrink[:, :, :, None])
    return best, total, acc


@triton.jit
def _half(x):
    """Rows 0 to 7 of [matrices, 16] or [matrices, 16, ...]. They lie in registers of their own, so nothing moves."""
    if len(x.shape) == 2:
        low, _ = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, 8]), (0, 2, 1)))
    else:
        low, _ = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, 8, x.shape[2]]), (0, 2, 3, 1)))
    return low


@triton.jit
def _sum_first(x):
    """Sum over the first of four dimensions, a power of 2, by halves: fewer exchanges than a reduction across warps makes."""
    if x.shape[0] == 1:
        return tl.reshape(x, [x.shape[1], x.shape[2], x.shape[3]])
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2], x.shape[3]]), (1, 2, 3, 4, 0)))
        return _sum_first(a + b)
