"""Latent attention over the block pool (latent.py), absorbed: all query heads are rows over the same keys, whose first numbers are the
values, so that a key is read once and multiplied twice.

    decode    one program = a share of the tiles of keys x a group of query heads     planned as other decodes are (triton_decode_plan.py)
    chunks    one program = a tile of a sequence's queries x a group of query heads   listed by triton_prefill.plan_tiles

    rows   token 0: the HEADS query heads of the group, token 1: the same, ...        one token where it decodes
    keys   [KEYS, latent] and [KEYS, rope] of the sequence's blocks, read through its table

Weighted latents [rows, latent] are wide: a tile of keys is shared by all warps of a program, which split their columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostep.engine.batch import KvShape
from twostep.model.kernels.latent import LatentDims
from twostep.model.kernels.triton_decode import merge_parts, part_row, worker_of
from twostep.model.kernels.triton_decode_plan import WORK_COLUMNS, DecodeLayout, DecodePlan, last_tile
from twostep.model.kernels.triton_launch import DecodeWorkspace, overlaps, shared_bytes_of
from twostep.model.kernels.triton_quantized_kv import converts_fp8, numbers_of
from twostep.model.kernels.triton_scores import log2_scale
from twostep.model.step.kv_cache import KvCache

# Rows of a program: the first as many as leave their weighted latents in registers of 8 warps, the others for less shared memory.
_ROWS = (64, 32, 16)
_NUM_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProgram:
    """Says what the kernels are compiled for.

    groups     of query heads, `heads` in each; `tokens` of them are `rows`, with padding
    keys       of a tile
    in_float32 the interpreter multiplies bfloat16 wrongly
    """

    groups: int
    heads: int
    tokens: int
    rows: int
    keys: int
    latent: int
    block_latent: int
    rope: int
    block_rope: int
    block_size: int
    quantization: str
    converts_fp8: bool
    in_float32: bool
    pdl: bool
    num_warps: int
    num_stages: int


def latent_program(cache: KvCache, dims: LatentDims, *, num_heads: int, max_queries: int) -> LatentProgram:
    """Returns what attends sequences of at most `max_queries` new tokens each. 1: decodes."""
    shape, device = cache.shape, cache.tensor.device
    # Float32 is multiplied without tensor cores, from registers.
    exact = cache.dtype == torch.float32
    keys = 16 if exact else 32
    key_bytes = keys * triton.next_power_of_2(dims.latent) * cache.dtype.itemsize
    most_rows, num_stages = next(
        (
            (rows, stages)
            for stages in ((1,) if exact else (3, 2))
            for rows in _ROWS
            # Queries, the tiles on their way, and one in another layout.
            if key_bytes * rows // keys + key_bytes * stages <= shared_bytes_of(device)
        ),
        (_ROWS[-1], 1),
    )
    groups = -(-num_heads // most_rows)
    while num_heads % groups:
        groups += 1
    heads = num_heads // groups
    smallest = max(16, triton.next_power_of_2(heads))
    rows = smallest if max_queries <= 1 else max(smallest, min(most_rows, triton.next_power_of_2(heads * max_queries)))
    return LatentProgram(
        groups=groups,
        heads=heads,
        tokens=1 if max_queries <= 1 else rows // heads,
        rows=rows,
        keys=keys,
        latent=dims.latent,
        block_latent=max(16, triton.next_power_of_2(dims.latent)),
        rope=dims.rope,
        block_rope=max(16, triton.next_power_of_2(dims.rope)),
        block_size=shape.block_size,
        quantization=shape.quantization,
        converts_fp8=converts_fp8(device),
        in_float32=device.type != "cuda",
        pdl=overlaps(device),
        num_warps=_NUM_WARPS,
        num_stages=num_stages,
    )


def latent_decode_plan(
    shape: KvShape,
    program: LatentProgram,
    *,
    num_seqs: int,
    device: torch.device | str,
    workspace: DecodeWorkspace,
    num_sms: int | None = None,
) -> DecodePlan:
    """How decodes of so many sequences are shared out. A group of query heads stands where others have a KV head."""
    # Two of few rows share a multiprocessor, so that one streams while the other begins or ends a sequence.
    beside = 2 if program.rows == 16 and shape.quantization == "none" and shape.dtype != "float32" else 1
    layout = DecodeLayout(
        num_heads=1, num_lanes=1, num_keys=program.keys, num_warps=program.num_warps, num_stages=program.num_stages, programs_per_sm=beside
    )
    parts = replace(shape, num_kv_heads=program.groups, head_dim=program.latent, quantization="none")
    return DecodePlan(
        parts,
        num_heads=program.groups * program.heads,
        num_seqs=num_seqs,
        device=device,
        workspace=workspace,
        layout=layout,
        num_sms=num_sms,
        merges_itself=False,
    )


def latent_decode(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: KvCache,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    plan: DecodePlan,
    program: LatentProgram,
    scale: float,
) -> None:
    """Attention of one new token per sequence over its blocks, its own slot included. It may be captured and replayed as decode_attention
    may.

    q             [S, num_heads, latent + rope], dense: absorbed, rotated
    out           [S, num_heads, latent], dense
    block_tables  int32 [S, B], rows dense; entries past a sequence's length are not read
    seq_lens      int32 [S], the new token counted; 0 gives zeros. Padding, behind the others, is negative, and its rows stay as they are
    """
    pool, scales = _layer(cache, layer)
    assert q.shape == (plan.num_seqs, plan.num_heads, program.latent + program.rope)
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert block_tables.stride(1) == 1
    _decode_kernel[(program.groups, plan.num_workers)](
        q, out, pool, scales, block_tables, seq_lens, plan.work, plan.parts, plan.scales, log2_scale(1, scale), block_tables.stride(0),
        pool.stride(0), scales.stride(0), P=program, num_warps=program.num_warps, num_stages=program.num_stages, launch_pdl=program.pdl,
    )  # fmt: skip
    merge_parts(out, plan)


def latent_chunks(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: KvCache,
    layer: int,
    *,
    tiles: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    program: LatentProgram,
    scale: float,
) -> None:
    """Causal attention of chunks whose own latents are in the pool already. Writes the rows of `out` that tiles cover.

    q             [T, num_heads, latent + rope], dense: absorbed, rotated
    out           [T, num_heads, latent], dense
    tiles         int32 [1 + most tiles, 2], by plan_tiles with `program.tokens` tokens a tile
    query_start   int32 [S + 1], rows of q of each sequence
    seq_lens      int32 [S], keys of each sequence, its chunk included
    block_tables  int32 [S, B]
    """
    pool, scales = _layer(cache, layer)
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert block_tables.stride(1) == 1
    if len(tiles) > 1:
        _chunk_kernel[((len(tiles) - 1) * program.groups,)](
            q, out, pool, scales, tiles, query_start, seq_lens, block_tables, log2_scale(1, scale), block_tables.stride(0),
            pool.stride(0), scales.stride(0), P=program, num_warps=program.num_warps, num_stages=program.num_stages,
        )  # fmt: skip


def _layer(cache: KvCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer of the first block: vectors, and their scales (of a pool that has none, anything)."""
    assert cache.shape.vectors == 1
    of_layer = cache.tensor[:, layer]
    return of_layer, of_layer if cache.quantized is None else cache.quantized.scales[:, layer]


@triton.jit
def _load_queries(q_ptr, row, valid, P: tl.constexpr):
    """The rows' latent and rope parts, which lie behind one another."""
    d, e = tl.arange(0, P.block_latent)[None, :], tl.arange(0, P.block_rope)[None, :]
    at = q_ptr + row[:, None] * (P.latent + P.rope)
    latent = tl.load(at + d, mask=valid[:, None] & (d < P.latent), other=0.0)
    rope = tl.load(at + P.latent + e, mask=valid[:, None] & (e < P.rope), other=0.0)
    if P.in_float32:
        latent, rope = latent.to(tl.float32), rope.to(tl.float32)
    return latent, rope


@triton.jit
def _fold_keys(
    best, total, acc, q_latent, q_rope, position, pool_ptr, scales_ptr, table_ptr, stride_block, stride_scales, start, stop, end,
    scale_log2, MASKED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Folds keys [start, stop) into the running maximum, sum and weighted latents of each row, which sees keys up to its position."""
    FORMAT: tl.constexpr = P.quantization
    CONVERTS: tl.constexpr = P.converts_fp8
    d, e = tl.arange(0, P.block_latent)[None, :], tl.arange(0, P.block_rope)[None, :]
    first_key = start + tl.arange(0, P.keys)
    block = tl.load(table_ptr + first_key // P.block_size, mask=first_key < end, other=0).to(tl.int64)
    for key_start in tl.range(start, stop, P.keys):
        key = key_start + tl.arange(0, P.keys)
        # Never more than is there: a slot not yet written may hold anything, and 0 * NaN is NaN.
        there = key < end
        next_key = key + P.keys
        # Of the next tile, so that its keys are on their way while this one's are multiplied.
        next_block = tl.load(table_ptr + next_key // P.block_size, mask=next_key < end, other=0).to(tl.int64)
        at = pool_ptr + (block * stride_block + key % P.block_size * (P.latent + P.rope))[:, None]
        latent = tl.load(at + d, mask=there[:, None] & (d < P.latent), other=0)
        rope = tl.load(at + P.latent + e, mask=there[:, None] & (e < P.rope), other=0)
        if FORMAT != "none":
            # Bytes that were not read are numbers, too, of no weight.
            latent = numbers_of(latent, FORMAT, CONVERTS).to(q_latent.dtype)
            rope = numbers_of(rope, FORMAT, CONVERTS).to(q_latent.dtype)
            key_scale = tl.load(scales_ptr + block * stride_scales + key % P.block_size, mask=there, other=0.0).to(tl.float32)
        if P.in_float32:
            latent, rope = latent.to(tl.float32), rope.to(tl.float32)
        score = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(rope), score, input_precision="ieee") * scale_log2
        if FORMAT != "none":
            score *= key_scale[None, :]
        if MASKED:
            score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, 1)
        if FORMAT != "none":
            weight *= key_scale[None, :]
        acc = tl.dot(weight.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        best = new_best
        block = next_block
    return best, total, acc


@triton.jit
def _decode_kernel(
    q_ptr, out_ptr, pool_ptr, scales_ptr, tables_ptr, lens_ptr, work_ptr, parts_ptr, part_scales_ptr, scale_log2, stride_table,
    stride_block, stride_scales, P: tl.constexpr,
):  # fmt: skip
    if P.pdl:
        gdc_launch_dependents()
    group, worker, num_workers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    work = work_ptr + worker * WORK_COLUMNS
    # The plan, lengths and tables are there before what this launch follows began.
    position, end = tl.load(work), tl.load(work + 1)
    seq, tile = tl.load(work + 2), tl.load(work + 3)
    active = tl.load(work_ptr + num_workers * WORK_COLUMNS)
    all_tiles = tl.load(work_ptr + num_workers * WORK_COLUMNS + 1)
    row = tl.arange(0, P.rows)
    valid = row < P.heads
    d = tl.arange(0, P.block_latent)[None, :]
    mask = valid[:, None] & (d < P.latent)
    inside = row[:, None] * P.latent + d
    if P.pdl:
        gdc_wait()
    while position < end:
        length = tl.load(lens_ptr + seq)
        seq_tiles = last_tile(length, P.keys)
        num_tiles = tl.minimum(seq_tiles - tile, end - position)
        first_row = (seq.to(tl.int64) * P.groups + group) * P.heads
        q_latent, q_rope = _load_queries(q_ptr, first_row + row, valid, P)
        best = tl.full([P.rows], -1e38, tl.float32)
        total = tl.full([P.rows], 0.0, tl.float32)
        acc = tl.full([P.rows, P.block_latent], 0.0, tl.float32)
        last_key = tl.full([P.rows], 0, tl.int32) + (length - 1)
        start = tile * P.keys
        best, total, acc = _fold_keys(
            best, total, acc, q_latent, q_rope, last_key, pool_ptr, scales_ptr, tables_ptr + seq.to(tl.int64) * stride_table, stride_block,
            stride_scales, start, start + num_tiles * P.keys, length, scale_log2, True, P,
        )  # fmt: skip
        seq_start = position - tile
        if num_tiles == seq_tiles:
            result = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out_ptr + first_row * P.latent + inside, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            first_worker = worker_of(seq_start, active, all_tiles)
            part = part_row(worker, first_worker, group, P.groups, P.heads)
            tl.store(parts_ptr + part * P.latent + inside, acc, mask=mask)
            tl.store(part_scales_ptr + part * 2 + row, best, mask=valid)
            tl.store(part_scales_ptr + part * 2 + P.heads + row, total, mask=valid)
        position += num_tiles
        seq += 1
        tile = tile * 0


# As of other chunks (triton_prefill.py): small arrays begin anywhere behind a step's decodes.
@triton.jit(
    do_not_specialize=["stride_table"],
    do_not_specialize_on_alignment=["tiles_ptr", "query_start_ptr", "seq_lens_ptr", "tables_ptr"],
)
def _chunk_kernel(
    q_ptr, out_ptr, pool_ptr, scales_ptr, tiles_ptr, query_start_ptr, seq_lens_ptr, tables_ptr, scale_log2, stride_table, stride_block,
    stride_scales, P: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0) // P.groups, tl.program_id(0) % P.groups
    if tile >= tl.load(tiles_ptr):
        return
    seq = tl.load(tiles_ptr + 2 + tile * 2)
    first = tl.load(tiles_ptr + 2 + tile * 2 + 1)
    row_start = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - row_start
    seq_len = tl.load(seq_lens_ptr + seq)
    context = seq_len - num_queries

    row = tl.arange(0, P.rows)
    token = row // P.heads
    valid = (token < P.tokens) & (first + token < num_queries)
    position = context + first + token
    q_row = ((row_start + first + token).to(tl.int64) * P.groups + group) * P.heads + row % P.heads
    q_latent, q_rope = _load_queries(q_ptr, q_row, valid, P)
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    best = tl.full([P.rows], float("-inf"), tl.float32)
    total = tl.full([P.rows], 0.0, tl.float32)
    acc = tl.full([P.rows, P.block_latent], 0.0, tl.float32)
    # Every row sees all keys up to the first token's own.
    seen_by_all = (context + first + 1) // P.keys * P.keys
    end = tl.minimum(context + first + P.tokens, seq_len)
    best, total, acc = _fold_keys(
        best, total, acc, q_latent, q_rope, position, pool_ptr, scales_ptr, table_ptr, stride_block, stride_scales, 0, seen_by_all, end,
        scale_log2, False, P,
    )  # fmt: skip
    best, total, acc = _fold_keys(
        best, total, acc, q_latent, q_rope, position, pool_ptr, scales_ptr, table_ptr, stride_block, stride_scales, seen_by_all, end, end,
        scale_log2, True, P,
    )  # fmt: skip
    acc = acc / tl.where(valid, total, 1.0)[:, None]
    d = tl.arange(0, P.block_latent)[None, :]
    tl.store(out_ptr + q_row[:, None] * P.latent + d, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (d < P.latent))
