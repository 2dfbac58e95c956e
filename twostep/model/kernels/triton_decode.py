"""Decode attention over the block pool: flash-decoding with equal shares of work for every program.

1. DecodePlan.refresh plans the step on the device                    twostep/model/kernels/triton_decode_plan.py
2. A program walks its share, sequence by sequence; per sequence it folds tiles of keys into a running maximum, sum and
   weighted value of each query (online softmax)
3. A sequence all in one share is written at once. Of the others each program leaves its part in the workspace, and the one that
   arrives last merges the parts and writes (Dao et al., "Flash-Decoding", 2023); or a second launch does, where they are many

    part   [query heads of a group of KV heads, head_dim] of weighted values; as many maxima (in units of log2), then as many sums

The query heads that share a KV head are the rows of one matrix product, padded to 16. A tile is several such products side by side,
one for each KV head and lane of keys; every warp has its own, so nothing is exchanged between warps while keys stream by. All heads
of a block lie beside each other in the pool, so a tile of many heads is one long run of memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostep.model.kernels.triton_decode_plan import WORK_COLUMNS, DecodePlan, first_tile, last_tile, load_blocks, sum_first
from twostep.model.kernels.triton_decode_quantized import attend_quantized
from twostep.model.kernels.triton_scores import LOG2_E, capped, log2_scale
from twostep.model.kernels.triton_shared_prefix import fold_states
from twostep.model.step.kv_cache import KvCache


def decode_attention(
    q: torch.Tensor,
    cache: KvCache,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    plan: DecodePlan,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence over its blocks, its own slot included. Captured in a CUDA graph, it may be replayed
    with other lengths, tables and queries in the same tensors; `plan.refresh(seq_lens)` has to come before, once for all layers.

    q             [S, num_heads, D] in the pool's dtype, rows [num_heads, D] dense: a slice of a fused projection will do
    block_tables  int32 [S, B], rows dense; entries past a sequence's length, or before its window, are not read
    seq_lens      int32 [S], the new token counted; 0 gives zeros. Padding, behind the others, is negative, and its rows stay as they are
    scale         of the scores; D ** -0.5 where it is None
    sinks         float32 [num_heads], dense: one more logit of each head, where the plan is for such layers
    out           like q
    Returns out, or a new dense tensor.
    """
    shape, pool, layout = cache.shape, cache.tensor, plan.layout
    if out is None:
        out = q.new_empty(q.shape)
    assert q.shape == out.shape == (plan.num_seqs, plan.num_heads, shape.head_dim)
    assert q.dtype == out.dtype == cache.dtype
    assert (sinks is not None) == plan.program.sinks
    assert sinks is None or (sinks.shape == (plan.num_heads,) and sinks.is_contiguous())
    for rows in (q, out):
        assert rows.stride()[1:] == (shape.head_dim, 1)
    assert pool.stride(-1) == 1
    quantized, shared, program = cache.quantized, plan.shared, plan.program
    assert (block_tables.dtype, seq_lens.dtype) == (torch.int32, torch.int32)
    assert block_tables.shape[0] == plan.num_seqs
    assert block_tables.stride(1) == 1
    assert shape.block_size % layout.num_keys == 0
    assert (shape.num_kv_heads, shape.head_dim, shape.block_size) == (plan.shape.num_kv_heads, plan.shape.head_dim, plan.shape.block_size)
    scale_log2 = log2_scale(shape.head_dim, scale, program.softcap)
    if shared is not None:
        shared.attend(q, cache, layer, block_tables, scale_log2=scale_log2, softcap=program.softcap)
    # What a plan without a shared prefix, or a pool without scales, has no use for is not read.
    listed, shared_parts, shared_scales = (
        (plan.work, plan.parts, plan.scales) if shared is None else (shared.listed, shared.parts, shared.scales)
    )
    words = None if quantized is None else quantized.words[:, layer]
    _decode_kernel[(plan.num_groups, plan.num_workers)](
        q, out, pool[:, layer], block_tables, seq_lens, plan.work, plan.parts, plan.scales, plan.counters,
        listed, shared_parts, shared_scales, scale_log2, q.stride(0), out.stride(0), block_tables.stride(0), pool.stride(0),
        *(pool.stride()[2:5] if quantized is None else quantized.strides), words, 0 if words is None else words.stride(0), sinks,
        P=program, num_warps=layout.num_warps, num_stages=layout.num_stages, maxnreg=plan.max_registers, launch_pdl=program.pdl,
    )  # fmt: skip
    if not plan.merges_itself:
        merge_parts(out, plan)
    return out


def merge_parts(out: torch.Tensor, plan: DecodePlan) -> None:
    """Writes the rows of those sequences that are in several programs' shares: out [S, num_heads, the plan's head_dim], rows dense."""
    _merge_kernel[(plan.num_heads, plan.num_seqs)](
        out, plan.work, plan.starts, plan.parts, plan.scales, out.stride(0), plan.num_workers, PARTS=plan.parts_at_once, P=plan.program,
        num_warps=1 if plan.parts_at_once <= 8 else 4, launch_pdl=plan.program.pdl,
    )  # fmt: skip


@triton.jit
def _decode_kernel(
    q_ptr, out_ptr, pool_ptr, tables_ptr, lens_ptr, work_ptr, parts_ptr, scales_ptr, counters_ptr,
    own_ptr, shared_parts_ptr, shared_scales_ptr, scale_log2, stride_q, stride_out, stride_table, stride_block,
    stride_kv, stride_head, stride_slot, words_ptr, stride_words, sinks_ptr, P: tl.constexpr,
):  # fmt: skip
    if P.pdl:
        gdc_launch_dependents()
    TILE: tl.constexpr = P.lanes * P.keys
    group = tl.program_id(0)
    worker = tl.program_id(1)
    num_workers = tl.num_programs(1)
    work = work_ptr + worker * WORK_COLUMNS
    position, end = tl.load(work), tl.load(work + 1)
    seq, tile = tl.load(work + 2), tl.load(work + 3)
    length, next_length = tl.load(work + 4), tl.load(work + 5)
    num_shared = position * 0
    next_shared = num_shared
    if P.shared > 0:
        num_shared, next_shared = tl.load(work + 6), tl.load(work + 7)
    active = tl.load(work_ptr + num_workers * WORK_COLUMNS)
    all_tiles = tl.load(work_ptr + num_workers * WORK_COLUMNS + 1)
    block = load_blocks(tables_ptr, stride_table, seq, tile, length, position < end, P)
    # What came before need not have ended: the plan is made by a launch of its own, and tables are there before that.
    if P.shared == 0 and P.pdl:
        gdc_wait()
    q = _load_queries(q_ptr, stride_q, seq, group, position < end, P)
    while position < end:
        num_tiles = tl.minimum(last_tile(length, TILE) - tile, end - position)
        # What the next sequence begins with is on its way while this one's keys stream by.
        more = position + num_tiles < end
        last_length = tl.load(lens_ptr + seq + 2, mask=position + num_tiles + 1 < end, other=0)
        last_shared = num_shared * 0
        if P.shared > 0:
            last_shared = tl.load(own_ptr + (seq + 2) * P.shared, mask=position + num_tiles + 1 < end, other=0)
            first_item, num_items = tl.load(own_ptr + seq * P.shared + 1), tl.load(own_ptr + seq * P.shared + 2)
            place = tl.load(own_ptr + seq * P.shared + 3)
        next_tile = first_tile(next_length, next_shared, TILE, P.window)
        next_block = load_blocks(tables_ptr, stride_table, seq + 1, next_tile, next_length, more, P)
        next_q = _load_queries(q_ptr, stride_q, seq + 1, group, more, P)
        if P.quantization == "none":
            best, total, acc = _attend(
                q, pool_ptr, tables_ptr, stride_table, seq, block, group * P.heads, length, tile, num_tiles,
                scale_log2, stride_block, stride_kv, stride_head, stride_slot, P,
            )  # fmt: skip
        else:
            best, total, acc = attend_quantized(
                q, pool_ptr, words_ptr, tables_ptr, stride_table, seq, block, group * P.heads, length, tile, num_tiles,
                scale_log2, stride_block, stride_kv, stride_head, stride_words, P,
            )  # fmt: skip
        # Where the sequence's tiles begin and end, counted over all sequences, says which workers have a part of it.
        start = first_tile(length, num_shared, TILE, P.window)
        if P.shared > 0:
            begins = (num_items > 0) & (tile == start)
            if begins:
                if P.pdl:
                    gdc_wait()
                best, total, acc = fold_states(
                    best, total, acc, shared_parts_ptr, shared_scales_ptr, first_item, num_items, place, group * P.heads,
                    P.groups * P.heads, P.share, P.shared_rows, P.head_dim, 4,
                )  # fmt: skip
        seq_start = position - (tile - start)
        seq_end = seq_start + last_tile(length, TILE) - start
        out = out_ptr + seq.to(tl.int64) * stride_out + group * (P.heads * P.share * P.head_dim)
        KEPT: tl.constexpr = 8 if P.share <= 8 else P.rows
        row = tl.arange(0, P.heads)[:, None] * P.share + tl.arange(0, KEPT)[None, :]
        valid = (tl.arange(0, KEPT) < P.share)[None, :] & (row >= 0)
        d = tl.arange(0, P.block_d)[None, None, :]
        at = row[:, :, None] * P.head_dim + d
        mask = valid[:, :, None] & (d < P.head_dim)
        if P.sinks:
            # Once a sequence: where its first tile is.
            sink_at = sinks_ptr + group * (P.heads * P.share) + row
            sink = tl.load(sink_at, mask=valid & (tile == start), other=-1e38) * LOG2_E
            best_own = best
            best = tl.maximum(best_own, sink)
            shrink = tl.exp2(best_own - best)
            total = total * shrink + tl.exp2(sink - best)
            acc = acc * shrink[:, :, None]
        if (seq_start >= position) & (seq_end <= end):
            result = acc / tl.where(total > 0, total, 1.0)[:, :, None]
            tl.store(out + at, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            first_worker = worker_of(seq_start, active, all_tiles)
            last_worker = worker_of(seq_end - 1, active, all_tiles)
            part = part_row(worker, first_worker, group, P.groups, P.heads * P.share)
            tl.store(parts_ptr + part * P.head_dim + at, acc, mask=mask)
            tl.store(scales_ptr + part * 2 + row, best, mask=valid)
            tl.store(scales_ptr + part * 2 + P.heads * P.share + row, total, mask=valid)
            if P.fused:
                tl.debug_barrier()
                arrived = tl.atomic_add(counters_ptr + seq * P.groups + group, 1, sem="acq_rel")
                if arrived == last_worker - first_worker:
                    _merge_parts(out, parts_ptr, scales_ptr, first_worker, last_worker, group, P)
                    tl.store(counters_ptr + seq * P.groups + group, 0)
        position += num_tiles
        seq += 1
        tile = next_tile
        length = next_length
        next_length = last_length
        num_shared = next_shared
        next_shared = last_shared
        block = next_block
        q = next_q
    if P.shared > 0 and P.pdl:
        gdc_wait()


@triton.jit
def _load_queries(q_ptr, stride_q, seq, group, there, P: tl.constexpr):
    """A sequence's queries [matrices, rows, block_d]."""
    head = group * P.heads + tl.arange(0, P.lanes * P.heads)[:, None, None] % P.heads
    row = tl.arange(0, P.rows)[None, :, None]
    d = tl.arange(0, P.block_d)[None, None, :]
    at = (head * P.share + row) * P.head_dim + d
    return tl.load(q_ptr + seq.to(tl.int64) * stride_q + at, mask=there & (row < P.share) & (d < P.head_dim) & (at >= 0), other=0.0)


@triton.jit
def _attend(
    q, pool_ptr, tables_ptr, stride_table, seq, block, first_head, length, tile, num_tiles, scale_log2,
    stride_block, stride_kv, stride_head, stride_slot, P: tl.constexpr,
):  # fmt: skip
    """Running maximum [heads, rows] (in units of log2), sum, and weighted values [heads, rows, block_d] over `num_tiles` tiles, of
    which the first has the numbers `block`. 8 rows where the queries of a head are no more, else all."""
    TILE: tl.constexpr = P.lanes * P.keys
    MATRICES: tl.constexpr = P.lanes * P.heads
    matrix = tl.arange(0, MATRICES)
    head_at = (first_head + matrix % P.heads).to(tl.int64) * stride_head
    d = tl.arange(0, P.block_d)[None, None, :]
    inside = tl.arange(0, P.keys)[None, :, None] * stride_slot + d
    if P.in_float32:
        q = q.to(tl.float32)
    best = tl.full([MATRICES, P.rows], -1e38, tl.float32)
    total = tl.full([MATRICES, P.rows], 0.0, tl.float32)
    acc = tl.full([MATRICES, P.rows, P.block_d], 0.0, tl.float32)
    key = tile * TILE + matrix // P.heads * P.keys
    for i in tl.range(0, num_tiles):
        next_block = load_blocks(tables_ptr, stride_table, seq, tile + i + 1, length, i + 1 < num_tiles, P)
        at = block.to(tl.int64) * stride_block + head_at + (key % P.block_size) * stride_slot
        each_key = key[:, None] + tl.arange(0, P.keys)[None, :]
        seen = each_key < length
        if P.window > 0:
            seen = seen & (each_key >= length - P.window)
        # Never more than is there: a slot not yet written may hold anything, and 0 * NaN is NaN.
        mask = seen[:, :, None] & (d < P.head_dim)
        k_ptr = pool_ptr + at[:, None, None] + inside
        k = tl.load(k_ptr, mask=mask, other=0.0)
        v = tl.load(k_ptr + stride_kv, mask=mask, other=0.0)
        if P.in_float32:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        score = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision="ieee") * scale_log2
        if P.softcap > 0:
            score = capped(score, P.softcap)
        score = tl.where(seen[:, None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 2))
        weight = tl.exp2(score - new_best[:, :, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, 2)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, :, None], input_precision="ieee")
        best = new_best
        key += TILE
        block = next_block
    KEPT: tl.constexpr = 8 if P.share <= 8 else P.rows
    if P.share <= 8:
        # The padding goes before anything is exchanged.
        best = _half(best)
        total = _half(total)
        acc = _half(acc)
    if P.lanes > 1:
        lanes_best = tl.reshape(best, [P.lanes, P.heads, KEPT])
        best = tl.max(lanes_best, 0)
        shrink = tl.exp2(lanes_best - best[None, :, :])
        total = tl.sum(tl.reshape(total, [P.lanes, P.heads, KEPT]) * shrink, 0)
        acc = sum_first(tl.reshape(acc, [P.lanes, P.heads, KEPT, P.block_d]) * shrink[:, :, :, None])
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
def worker_of(tile, active, all_tiles):
    """Worker w has tiles w * all_tiles // active up to (w + 1) * all_tiles // active."""
    return (((tile + 1).to(tl.int64) * active - 1) // all_tiles).to(tl.int32)


@triton.jit
def part_row(worker, first_worker, group, GROUPS: tl.constexpr, PART_ROWS: tl.constexpr):
    """First row of a worker's part. Two places a worker: for the sequence that it ends or crosses, and for one that it begins."""
    return ((2 * worker + (worker == first_worker)) * GROUPS + group).to(tl.int64) * PART_ROWS


@triton.jit
def _merge_parts(out_ptr, parts_ptr, scales_ptr, first_worker, last_worker, group, P: tl.constexpr):
    """Writes the sequence's rows from the parts of its workers, past the first-level cache, which may hold older ones."""
    AT_ONCE: tl.constexpr = P.merge_parts
    i = tl.arange(0, P.heads * P.merge_share)[:, None]
    row = i // P.merge_share * P.share + i % P.merge_share
    valid = i % P.merge_share < P.share
    d = tl.arange(0, P.block_d)[None, :]
    inside = row * P.head_dim + d
    mask = valid & (d < P.head_dim)
    best = tl.full([P.heads * P.merge_share, 1], -1e38, tl.float32)
    total = tl.full([P.heads * P.merge_share, 1], 0.0, tl.float32)
    acc = tl.full([P.heads * P.merge_share, P.block_d], 0.0, tl.float32)
    for start in tl.range(first_worker, last_worker + 1, AT_ONCE, num_stages=1):
        # Unrolled, so that all parts are asked for before the first is used; nothing is exchanged between threads.
        new_best = best
        for j in tl.static_range(AT_ONCE):
            at = part_row(start + j, first_worker, group, P.groups, P.heads * P.share)
            there = valid & (start + j <= last_worker)
            new_best = tl.maximum(new_best, tl.load(scales_ptr + at * 2 + row, mask=there, other=-1e38, cache_modifier=".cg"))
        shrink = tl.exp2(best - new_best)
        total *= shrink
        acc *= shrink
        best = new_best
        for j in tl.static_range(AT_ONCE):
            at = part_row(start + j, first_worker, group, P.groups, P.heads * P.share)
            there = start + j <= last_worker
            part_best = tl.load(scales_ptr + at * 2 + row, mask=valid & there, other=-1e38, cache_modifier=".cg")
            part_total = tl.load(scales_ptr + at * 2 + P.heads * P.share + row, mask=valid & there, other=0.0, cache_modifier=".cg")
            part_acc = tl.load(parts_ptr + at * P.head_dim + inside, mask=mask & there, other=0.0, cache_modifier=".cg")
            weight = tl.exp2(part_best - best)
            total += part_total * weight
            acc += part_acc * weight
    result = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + inside, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merge_kernel(out_ptr, work_ptr, starts_ptr, parts_ptr, scales_ptr, stride_out, num_workers, PARTS: tl.constexpr, P: tl.constexpr):
    """Writes one row of one sequence, if it has parts."""
    if P.pdl:
        gdc_launch_dependents()
    PART_ROWS: tl.constexpr = P.heads * P.share
    head = tl.program_id(0)
    seq = tl.program_id(1)
    # The plan is made before what this launch follows began.
    active = tl.load(work_ptr + num_workers * WORK_COLUMNS)
    all_tiles = tl.maximum(tl.load(work_ptr + num_workers * WORK_COLUMNS + 1), 1)
    first_worker = worker_of(tl.load(starts_ptr + seq), active, all_tiles)
    last_worker = worker_of(tl.load(starts_ptr + seq + 1) - 1, active, all_tiles)
    if P.pdl:
        gdc_wait()
    d = tl.arange(0, P.block_d)
    if first_worker < last_worker:
        best = tl.full([1], -1e38, tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.full([P.block_d], 0.0, tl.float32)
        for start in tl.range(first_worker, last_worker + 1, PARTS, num_stages=1):
            worker = start + tl.arange(0, PARTS)
            part = part_row(worker, first_worker, head // PART_ROWS, P.groups, PART_ROWS)
            part_scales = scales_ptr + part * 2 + head % PART_ROWS
            best, total, acc = _fold(
                best, total, acc, parts_ptr + (part + head % PART_ROWS) * P.head_dim, part_scales, part_scales + PART_ROWS,
                worker <= last_worker, d, P.head_dim,
            )  # fmt: skip
        result = acc / tl.where(total > 0, total, 1.0)
        out = out_ptr + seq.to(tl.int64) * stride_out + head * P.head_dim
        tl.store(out + d, result.to(out_ptr.dtype.element_ty), mask=d < P.head_dim)


@triton.jit
def _fold(best, total, acc, part, part_best, part_total, there, d, HEAD_DIM: tl.constexpr):
    """Merges parts, at these addresses, into a running maximum, sum and weighted value."""
    part_best = tl.load(part_best, mask=there, other=-1e38)
    part_total = tl.load(part_total, mask=there, other=0.0)
    part_acc = tl.load(part[:, None] + d[None, :], mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    new_best = tl.maximum(best, tl.max(part_best, 0))
    shrink = tl.exp2(best - new_best)
    weight = tl.exp2(part_best - new_best)
    total = total * shrink + tl.sum(part_total * weight, 0)
    acc = acc * shrink + tl.sum(part_acc * weight[:, None], 0)
    return new_best, total, acc
