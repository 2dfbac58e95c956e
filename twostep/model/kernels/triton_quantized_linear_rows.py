"""Products of one token or a few with 8-bit weights: whole rows of the weight in registers.

As triton_linear.py's rows: all of a program's weights are asked for before the kernel ahead has ended, and nothing is shared between
programs. An input that the kernel ahead has not rounded each program rounds for itself, which takes less time than one more kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.triton_launch import overlaps, start_next, wait_for_previous
from twostep.model.kernels.triton_quantized_input import RoundedInput, rounded
from twostep.model.kernels.triton_quantized_linear_tiles import Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRowTile:
    """Says how one program works. rows: of the weight in one program, a power of 2 (gated: as many of each half)."""

    rows: int
    num_warps: int


def multiply_rows(
    x: RoundedInput | torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None,
    *,
    how: InputQuantizer,
    tile: QuantizedRowTile,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """x @ weight.T + bias, [T, N] in `dtype`, of a weight with a scale per row and an input with one per token: x [T, K], rows dense, in 16
    bits, or rounded by `how` already."""
    values = x if isinstance(x, torch.Tensor) else x.values
    tokens, width = values.shape
    assert width == packed.width
    assert not packed.group
    assert not how.how.group
    assert values.stride(1) == 1
    num_out = packed.num_out // 2 if gated else packed.num_out
    out = torch.empty(tokens, num_out, dtype=dtype, device=values.device)
    if tokens:
        pdl, rounds = overlaps(out.device), isinstance(x, torch.Tensor)
        static = packed.scales if how.scale is None else how.scale
        _rows_kernel[(triton.cdiv(num_out, tile.rows),)](
            values, values.stride(0), static if isinstance(x, torch.Tensor) else x.scales, packed.values, packed.scales,
            packed.scales if bias is None else bias, out, num_out,
            TOKENS=tokens, WIDTH=width, BLOCK=triton.next_power_of_2(width), ROWS=tile.rows, BLOCK_ROWS=packed.block_rows,
            ROUNDS=rounds, STATIC=how.scale is not None, FLOAT8=packed.is_float, ON_GPU=out.is_cuda, HAS_BIAS=bias is not None, GATED=gated,
            PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
        )  # fmt: skip
    return out


@triton.jit
def _rows_kernel(
    x_ptr, stride_x, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, num_out,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, ROUNDS: tl.constexpr,
    STATIC: tl.constexpr, FLOAT8: tl.constexpr, ON_GPU: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        start_next()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the end compute the last one again and store nothing.
    at = tl.minimum(row, num_out - 1)
    k = tl.arange(0, BLOCK)
    weight = load_quantized_rows(weight_ptr, at + num_out * GATED, k, WIDTH, BLOCK)
    scale = tl.load(scales_ptr + (at + num_out * GATED) // BLOCK_ROWS)
    gate = weight
    gate_scale = scale
    if GATED:
        gate = load_quantized_rows(weight_ptr, at, k, WIDTH, BLOCK)
        gate_scale = tl.load(scales_ptr + at // BLOCK_ROWS)
    if PDL:
        wait_for_previous()
    for t in tl.static_range(TOKENS):
        x = tl.load(x_ptr + t * stride_x + k, mask=k < WIDTH, other=0.0)
        if ROUNDS:
            numbers, scales = rounded(tl.reshape(x.to(tl.float32), [1, BLOCK]), x_scales_ptr, FLOAT8, STATIC, ON_GPU)
            x = tl.reshape(to_float32(numbers, ON_GPU), [BLOCK])
            x_scale = tl.sum(tl.reshape(scales, [1]), 0)
        else:
            x = to_float32(x, ON_GPU)
            x_scale = tl.load(x_scales_ptr + t)
        y = tl.sum(to_float32(weight, ON_GPU) * x[None, :], 1) * (scale * x_scale)
        if HAS_BIAS:
            y += tl.load(bias_ptr + at + num_out * GATED).to(tl.float32)
        if GATED:
            g = tl.sum(to_float32(gate, ON_GPU) * x[None, :], 1) * (gate_scale * x_scale)
            if HAS_BIAS:
                g += tl.load(bias_ptr + at).to(tl.float32)
            y = g * tl.sigmoid(g) * y
        tl.store(out_ptr + t * tl.full([], num_out, tl.int64) + row, y.to(out_ptr.dtype.element_ty), mask=row < num_out)


@triton.jit
def load_quantized_rows(weight_ptr, row, k, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[len(row), BLOCK], zeros past WIDTH. Every weight is read once: it need not stay in the first-level cache."""
    at = weight_ptr + row[:, None].to(tl.int64) * WIDTH + k[None, :]
    if WIDTH == BLOCK:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=(k < WIDTH)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def to_float32(x, ON_GPU: tl.constexpr):
    # By way of 16 bits, which all of these numbers fit: the chip converts pairs.
    return x.to(tl.float16).to(tl.float32) if ON_GPU else x.to(tl.float32)
