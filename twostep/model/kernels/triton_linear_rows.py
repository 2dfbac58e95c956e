"""Matrix products for one to a few tokens: each program keeps whole rows of the weight in registers and meets every token with them.

    weight [N, K]   ── ROWS rows ──▶ registers, all loads at once, before the kernel ahead has ended
    x      [T, K]   ──▶ · ──▶ + bias ──▶ silu · up? ──▶ [T, N]

Bound by the weight's bytes. Nothing is shared between programs, so a token's result depends neither on its neighbours nor on the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostep.model.kernels.triton_launch import overlaps, start_next, wait_for_previous


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTile:
    """rows: of the weight in one program, a power of 2 (gated: as many of each half)."""

    rows: int
    num_warps: int


def linear_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tile: RowTile,
    gated: bool = False,
) -> torch.Tensor:
    """x @ weight.T + bias, float32 inside.

    x       [T, K], rows dense
    weight  [N, K], dense; gated: [2 * N, K], gates first
    gated   silu of the first half of the result times the second
    Returns [T, N].
    """
    tokens, width = x.shape
    num_out = len(weight) // 2 if gated else len(weight)
    assert weight.shape[1] == width
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    out = x.new_empty(tokens, num_out)
    if not tokens:
        return out
    pdl = overlaps(x.device)
    _rows_kernel[(triton.cdiv(num_out, tile.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_out,
        x.stride(0),
        TOKENS=tokens,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=tile.rows,
        HAS_BIAS=bias is not None,
        GATED=gated,
        PDL=pdl,
        num_warps=tile.num_warps,
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_out, stride_x,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        start_next()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the end compute the last one again and store nothing.
    at = tl.minimum(row, num_out - 1).to(tl.int64)
    k = tl.arange(0, BLOCK)
    weight = _load_rows(weight_ptr, at, k, WIDTH, BLOCK)
    gate = weight
    if GATED:
        weight = _load_rows(weight_ptr, at + num_out, k, WIDTH, BLOCK)
    if PDL:
        wait_for_previous()
    for t in tl.static_range(TOKENS):
        x = tl.load(x_ptr + t * stride_x + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
        if GATED:
            g = tl.sum(gate.to(tl.float32) * x[None, :], 1)
            if HAS_BIAS:
                g += tl.load(bias_ptr + at).to(tl.float32)
                y += tl.load(bias_ptr + num_out + at).to(tl.float32)
            y = g * tl.sigmoid(g) * y
        elif HAS_BIAS:
            y += tl.load(bias_ptr + at).to(tl.float32)
        target = out_ptr + t * tl.full([], num_out, tl.int64) + row  # (an argument of 1 has no type of its own)
        tl.store(target, y.to(out_ptr.dtype.element_ty), mask=row < num_out)


@triton.jit
def _load_rows(weight_ptr, row, k, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[len(row), BLOCK], zeros past WIDTH. Every weight is read once: it need not stay in the first-level cache."""
    at = weight_ptr + row[:, None] * WIDTH + k[None, :]
    if WIDTH == BLOCK:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=(k < WIDTH)[None, :], other=0.0, eviction_policy="evict_first")
