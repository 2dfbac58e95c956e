"""Merges what several programs found for the same queries over different keys (Dao et al., "Flash-Decoding", 2023)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16


def merge_parts(
    parts: torch.Tensor, scales: torch.Tensor, merges: torch.Tensor, out: torch.Tensor, *, share: int, head_dim: int, num_rows: int
) -> None:
    """Writes the merged rows of `out`.

    parts   float32 [P, num_rows, head_dim]: each part's result, as if its keys were all
    scales  float32 [P, num_rows]: log2 of each part's sum of exp2(scores); -inf where it saw no key
    merges  int32 [M, 5] (hopper_plan.HopperItems)
    out     [T, num_heads * head_dim], dense; rows of a tile are its tokens' `share` query heads each
    """
    assert out.is_contiguous()
    if len(merges):
        _merge_kernel[(len(merges), num_rows // _ROWS)](
            parts,
            scales,
            merges,
            out,
            out.stride(0),
            SHARE=share,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            NUM_ROWS=num_rows,
            ROWS=_ROWS,
            num_warps=4,
        )


@triton.jit
def _merge_kernel(
    parts_ptr, scales_ptr, merges_ptr, out_ptr, stride_out,
    SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    merge = merges_ptr + tl.program_id(0) * 5
    kv_head, token = tl.load(merge), tl.load(merge + 1).to(tl.int64)
    num_tokens = tl.load(merge + 2)
    first, count = tl.load(merge + 3).to(tl.int64), tl.load(merge + 4)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = row < num_tokens * SHARE
    d = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (d < HEAD_DIM)[None, :]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for part in range(0, count):
        at = (first + part) * NUM_ROWS + row
        scale = tl.load(scales_ptr + at, mask=valid, other=0.0)
        value = tl.load(parts_ptr + at[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        best_now = tl.maximum(best, scale)
        base = tl.where(best_now == float("-inf"), 0.0, best_now)
        weight, shrink = tl.exp2(scale - base), tl.exp2(best - base)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + value * weight[:, None]
        best = best_now
    acc = acc / tl.where(valid, total, 1.0)[:, None]
    out = out_ptr + (token + row // SHARE)[:, None] * stride_out + ((kv_head * SHARE + row % SHARE) * HEAD_DIM)[:, None] + d[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
