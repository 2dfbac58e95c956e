"""Parts that several programs have of one sequence's attention become its rows: inside the program that arrives last, or by a launch of
its own.

    part   [query heads of a group of KV heads, head_dim] of weighted values; as many maxima (in units of log2), then as many sums
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostep.model.kernels.triton_decode_plan import WORK_COLUMNS


@triton.jit
def worker_of(tile, active, all_tiles):
    """Worker w has tiles w * all_tiles // active up to (w + 1) * all_tiles // active."""
    return (((tile + 1).to(tl.int64) * active - 1) // all_tiles).to(tl.int32)


@triton.jit
def part_row(worker, first_worker, group, GROUPS: tl.constexpr, PART_ROWS: tl.constexpr):
    """First row of a worker's part. Two places a worker: for the sequence that it ends or crosses, and for one that it begins."""
    return ((2 * worker + (worker == first_worker)) * GROUPS + group).to(tl.int64) * PART_ROWS


@triton.jit
def merge_parts(
    out_ptr, parts_ptr, scales_ptr, first_worker, last_worker, group,
    GROUPS: tl.constexpr, SHARE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MERGE_SHARE: tl.constexpr, MERGE_PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the sequence's rows from the parts of its workers, past the first-level cache, which may hold older ones."""
    i = tl.arange(0, HEADS * MERGE_SHARE)[:, None]
    row = i // MERGE_SHARE * SHARE + i % MERGE_SHARE
    valid = i % MERGE_SHARE < SHARE
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = row * HEAD_DIM + d
    mask = valid & (d < HEAD_DIM)
    best = tl.full([HEADS * MERGE_SHARE, 1], -1e38, tl.float32)
    total = tl.zeros([HEADS * MERGE_SHARE, 1], tl.float32)
    acc = tl.zeros([HEADS * MERGE_SHARE, BLOCK_D], tl.float32)
    for start in tl.range(first_worker, last_worker + 1, MERGE_PARTS, num_stages=1):
        # Unrolled, so that all parts are asked for before the first is used; nothing is exchanged between threads.
        new_best = best
        for j in tl.static_range(MERGE_PARTS):
            at = part_row(start + j, first_worker, group, GROUPS, HEADS * SHARE)
            there = valid & (start + j <= last_worker)
            new_best = tl.maximum(new_best, tl.load(scales_ptr + at * 2 + row, mask=there, other=-1e38, cache_modifier=".cg"))
        shrink = tl.exp2(best - new_best)
        total *= shrink
        acc *= shrink
        best = new_best
        for j in tl.static_range(MERGE_PARTS):
            at = part_row(start + j, first_worker, group, GROUPS, HEADS * SHARE)
            there = start + j <= last_worker
            part_best = tl.load(scales_ptr + at * 2 + row, mask=valid & there, other=-1e38, cache_modifier=".cg")
            part_total = tl.load(scales_ptr + at * 2 + HEADS * SHARE + row, mask=valid & there, other=0.0, cache_modifier=".cg")
            part_acc = tl.load(parts_ptr + at * HEAD_DIM + inside, mask=mask & there, other=0.0, cache_modifier=".cg")
            weight = tl.exp2(part_best - best)
            total += part_total * weight
            acc += part_acc * weight
    result = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + inside, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def merge_kernel(
    out_ptr, work_ptr, starts_ptr, parts_ptr, scales_ptr, stride_out, num_workers,
    GROUPS: tl.constexpr, PART_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MERGE_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes one row of one sequence, if it has parts."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    seq = tl.program_id(1)
    # The plan is made before what this launch follows began.
    active = tl.load(work_ptr + num_workers * WORK_COLUMNS)
    all_tiles = tl.load(work_ptr + num_workers * WORK_COLUMNS + 1)
    first_worker = worker_of(tl.load(starts_ptr + seq), active, all_tiles)
    last_worker = worker_of(tl.load(starts_ptr + seq + 1) - 1, active, all_tiles)
    if PDL:
        gdc_wait()
    d = tl.arange(0, BLOCK_D)
    if first_worker < last_worker:
        best = tl.full([1], -1e38, tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        for start in tl.range(first_worker, last_worker + 1, MERGE_PARTS, num_stages=1):
            worker = start + tl.arange(0, MERGE_PARTS)
            part = part_row(worker, first_worker, head // PART_ROWS, GROUPS, PART_ROWS)
            part_scales = scales_ptr + part * 2 + head % PART_ROWS
            best, total, acc = _fold(
                best, total, acc, parts_ptr + (part + head % PART_ROWS) * HEAD_DIM, part_scales, part_scales + PART_ROWS,
                worker <= last_worker, d, HEAD_DIM,
            )  # fmt: skip
        result = acc / tl.where(total > 0, total, 1.0)
        out = out_ptr + seq.to(tl.int64) * stride_out + head * HEAD_DIM
        tl.store(out + d, result.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


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
