"""Products of quantized experts with the tokens that go to them, as Triton kernels: the tiles of pairs of triton_expert_products.py, and
weights in the forms of triton_quantized_linear_tiles.py.

    rows    8-bit weights, of one token or two: rows in registers, and every program rounds the input itself
    eight   8-bit numbers on both sides
    unpack  weights of 4 or 8 bits, inputs of 16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.triton_expert_products import ExpertRowTile, ExpertTile, Pairs, expert_place, gate_of, store_pairs
from twostep.model.kernels.triton_launch import follow, overlaps
from twostep.model.kernels.triton_quantized_input import INPUT_GROUP, RoundedInput, rounded
from twostep.model.kernels.triton_quantized_linear_rows import load_quantized_rows, to_float32
from twostep.model.kernels.triton_quantized_linear_tiles import Packed, dot, load_rows, of_rows, of_tokens, unpack
from twostep.model.kernels.triton_routing import ExpertTiles, pairs_of


def stacked(experts: Sequence[Packed]) -> Packed:
    """Weights of one form as one: the values of each behind those of the one before, scales and zeros [E, groups, rows]."""
    one = experts[0]
    # float8 has no cat on some devices.
    values = torch.cat([each.values.view(torch.uint8) for each in experts]).view(one.values.dtype)
    zeros = None if one.zeros is None else torch.stack([each.zeros for each in experts if each.zeros is not None])
    return replace(one, values=values, scales=torch.stack([each.scales for each in experts]), zeros=zeros)


def multiply_eight(
    pairs: Pairs, x: RoundedInput, tiles: ExpertTiles, packed: Packed, *, tile: ExpertTile, exact: bool, gated: bool = False
) -> torch.Tensor:
    """Each pair's row of `x`, pairs.x rounded, times its expert's weight, transposed; [T * k, N] or float32 [k, T, N].

    packed  of `stacked`
    exact   sums of fp8 products go to float32 after every step; else the tensor cores keep them, in fewer bits
    gated   silu of the first half of the result times the second
    """
    values, (num_rows, width) = x.values, (packed.num_out, packed.width)
    assert values.dtype == packed.values.dtype
    assert values.shape == (len(pairs.x), width)
    assert tiles.tokens == tile.tokens
    assert tile.depth == INPUT_GROUP or not (packed.group or x.scales.dim() == 2)
    num_out = num_rows // 2 if gated else num_rows
    out = pairs.out(num_out)
    if out.numel() and tiles.places:
        pdl, cols = overlaps(values.device), tile.cols // 2 if gated else tile.cols
        source = TensorDescriptor.from_tensor(packed.values, [cols, tile.depth]) if tile.bulk else packed.values
        _eight_kernel[(triton.cdiv(num_out, cols) * tiles.places,)](
            values, values.stride(0), x.scales, source,
            packed.scales, packed.scales.stride(0), packed.scales.stride(1), *tiles.arguments,
            *pairs.ends, out, len(pairs.chosen), len(values), tiles.places, num_out, width,
            TOKENS=tile.tokens, AMONG=tiles.among, COLS=cols, DEPTH=tile.depth, BLOCK_ROWS=packed.block_rows, X_GROUPS=x.scales.dim() == 2,
            W_GROUPS=bool(packed.group), IN_INT=not packed.is_float, EXACT=exact and packed.is_float, GATED=gated, TURNED=tile.turned,
            BULK=tile.bulk, EVEN=width % tile.depth == 0, **pairs.constants, PDL=pdl,
            num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
        )  # fmt: skip
    return out


def multiply_unpacked(pairs: Pairs, tiles: ExpertTiles, packed: Packed, *, tile: ExpertTile, gated: bool = False) -> torch.Tensor:
    """The same of pairs.x as it is, in 16 bits. A step is as many columns as `packed` has in a block, whatever `tile` says."""
    x, num_rows = pairs.x, packed.num_out
    assert x.shape[1] == packed.width
    assert tiles.tokens == tile.tokens
    assert tile.turned
    num_out = num_rows // 2 if gated else num_rows
    out = pairs.out(num_out)
    if out.numel() and tiles.places:
        pdl, cols, zeros = overlaps(x.device), tile.cols // 2 if gated else tile.cols, packed.zeros
        source = TensorDescriptor.from_tensor(packed.values, [cols, packed.slice]) if tile.bulk else packed.values
        _unpack_kernel[(triton.cdiv(num_out, cols) * tiles.places,)](
            x, x.stride(0), source, packed.scales, packed.scales if zeros is None else zeros, packed.scales.stride(0),
            packed.scales.stride(1), 0 if zeros is None else zeros.stride(0), 0 if zeros is None else zeros.stride(1),
            *tiles.arguments, *pairs.ends, out, len(pairs.chosen), tiles.places,
            num_out, packed.width, TOKENS=tile.tokens, AMONG=tiles.among, COLS=cols, SLICE=packed.slice, BITS=packed.bits,
            IS_FLOAT=packed.is_float, GROUP=packed.group, BLOCK_ROWS=packed.block_rows, HAS_ZEROS=zeros is not None,
            GATED=gated, BULK=tile.bulk, EVEN=packed.width % (packed.num_slices * packed.slice) == 0, **pairs.constants, PDL=pdl,
            ON_GPU=x.is_cuda, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
        )  # fmt: skip
    return out


def multiply_eight_rows(pairs: Pairs, packed: Packed, how: InputQuantizer, *, tile: ExpertRowTile, gated: bool = False) -> torch.Tensor:
    """multiply_eight of pairs.x in 16 bits, which `how` rounds."""
    x, (num_rows, width) = pairs.x, (packed.num_out, packed.width)
    assert x.shape[1] == width
    num_out = num_rows // 2 if gated else num_rows
    out = pairs.out(num_out)
    if out.numel():
        pdl, static = overlaps(x.device), packed.scales if how.scale is None else how.scale
        # (Groups are whole: a row ends with the last one's zeros.)
        block = triton.next_power_of_2(max(width, INPUT_GROUP))
        _eight_rows_kernel[(triton.cdiv(num_out, tile.rows), pairs.chosen.numel())](
            x, packed.values, packed.scales, packed.scales.stride(0), packed.scales.stride(1), static, pairs.chosen, *pairs.ends, out,
            len(pairs.chosen), num_out, x.stride(0), pairs.held.start, len(pairs.held), WIDTH=width, BLOCK=block, ROWS=tile.rows,
            BLOCK_ROWS=packed.block_rows, W_GROUPS=bool(packed.group), X_GROUPS=how.how.group > 0, FLOAT8=packed.is_float, GATED=gated,
            STATIC=how.scale is not None, ON_GPU=x.is_cuda, **pairs.constants, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens", "first", "held"])
def _eight_rows_kernel(
    x_ptr, weight_ptr, scales_ptr, stride_expert, stride_scales, static_ptr, chosen_ptr, bias_ptr, alpha, limit, weights_ptr, out_ptr,
    tokens, num_out, stride_x, first, held,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, W_GROUPS: tl.constexpr,
    X_GROUPS: tl.constexpr, FLOAT8: tl.constexpr, GATED: tl.constexpr, STATIC: tl.constexpr, ON_GPU: tl.constexpr, TOP: tl.constexpr,
    OF_PAIRS: tl.constexpr, WEIGHTED: tl.constexpr, IN_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = BLOCK // 128 if X_GROUPS else 1
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the end compute the last one again and store nothing.
    at = tl.minimum(row, num_out - 1)
    k = tl.arange(0, BLOCK)
    if PDL:
        follow()
    expert = tl.load(chosen_ptr + pair) - first
    if (expert < 0) | (expert >= held):
        return
    num_rows = num_out * (2 if GATED else 1)
    of_expert = weight_ptr + expert.to(tl.int64) * num_rows * WIDTH
    scales_ptr += expert.to(tl.int64) * stride_expert
    weight = load_quantized_rows(of_expert, at + num_out * GATED, k, WIDTH, BLOCK)
    gate = weight
    if GATED:
        gate = load_quantized_rows(of_expert, at, k, WIDTH, BLOCK)
    source = pair if OF_PAIRS else pair // TOP
    x = tl.load(x_ptr + source.to(tl.int64) * stride_x + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    numbers, x_scale = rounded(tl.reshape(x, [COUNT, BLOCK // COUNT]), static_ptr, FLOAT8, STATIC, ON_GPU)
    x = tl.reshape(to_float32(numbers, ON_GPU) * x_scale, [BLOCK])
    y = _scaled_sums(weight, x, scales_ptr, stride_scales, at + num_out * GATED, WIDTH, BLOCK, ROWS, BLOCK_ROWS, W_GROUPS, ON_GPU)
    g = y
    if GATED:
        g = _scaled_sums(gate, x, scales_ptr, stride_scales, at, WIDTH, BLOCK, ROWS, BLOCK_ROWS, W_GROUPS, ON_GPU)
    if HAS_BIAS:
        bias_ptr += expert.to(tl.int64) * num_rows + at
        y += tl.load(bias_ptr + num_out * GATED).to(tl.float32)
        if GATED:
            g += tl.load(bias_ptr).to(tl.float32)
    if GATED:
        y = gate_of(g, y, alpha, limit, CLAMPED)
    if WEIGHTED:
        y *= tl.load(weights_ptr + pair)
    to = (pair % TOP) * tokens + pair // TOP if IN_PARTS else pair
    tl.store(out_ptr + to.to(tl.int64) * num_out + row, y.to(out_ptr.dtype.element_ty), mask=row < num_out)


@triton.jit
def _scaled_sums(
    weight, x, scales_ptr, stride, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    W_GROUPS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Returns the products of rows [ROWS, BLOCK] with x [BLOCK], each times its scale or scales."""
    product = to_float32(weight, ON_GPU) * x[None, :]
    if W_GROUPS:
        group = tl.arange(0, BLOCK // 128)[None, :]
        sums = tl.sum(tl.reshape(product, [ROWS, BLOCK // 128, 128]), 2)
        scale = tl.load(scales_ptr + group * stride + (row // BLOCK_ROWS)[:, None], mask=group * 128 < WIDTH, other=0.0)
        return tl.sum(sums * scale, 1)
    else:
        return tl.sum(product, 1) * tl.load(scales_ptr + row // BLOCK_ROWS)


@triton.jit(do_not_specialize=["tokens", "num_x", "places", "first_held"])
def _eight_kernel(
    x_ptr, stride_x, x_scales_ptr, source, scales_ptr, stride_expert, stride_scales, pairs_ptr, experts_ptr, first_held, bias_ptr, alpha,
    limit, weights_ptr, out_ptr, tokens, num_x, places, num_out, width,
    TOKENS: tl.constexpr, AMONG: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, X_GROUPS: tl.constexpr,
    W_GROUPS: tl.constexpr, IN_INT: tl.constexpr, EXACT: tl.constexpr, GATED: tl.constexpr, TURNED: tl.constexpr, BULK: tl.constexpr,
    EVEN: tl.constexpr, TOP: tl.constexpr, OF_PAIRS: tl.constexpr, WEIGHTED: tl.constexpr, IN_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place, first = expert_place(places, num_out, COLS)
    if PDL:
        follow()
    expert, pair = pairs_of(place, pairs_ptr, experts_ptr, first_held, tokens * TOP, TOKENS, AMONG)
    if expert < 0:
        return
    there = pair < tokens * TOP
    # Where there is no pair, the first token is scaled, and nothing stored.
    token = tl.where(there, pair if OF_PAIRS else pair // TOP, 0)
    x_row = x_ptr + token.to(tl.int64) * stride_x
    row = first + tl.arange(0, COLS)
    at = tl.minimum(row, num_out - 1)
    of_expert = expert * num_out * (2 if GATED else 1)
    scales_ptr += expert.to(tl.int64) * stride_expert
    shape: tl.constexpr = [COLS, TOKENS] if TURNED else [TOKENS, COLS]
    SUM: tl.constexpr = tl.int32 if IN_INT else tl.float32
    acc = tl.zeros(shape, SUM)
    gate_acc = tl.zeros(shape, SUM)
    depth = tl.arange(0, DEPTH)
    for k in tl.range(0, width, DEPTH):
        inside = there[:, None] if EVEN else there[:, None] & (k + depth < width)[None, :]
        x = tl.load(x_row[:, None] + k + depth[None, :], mask=inside, other=0.0)
        if GATED:
            gate = load_rows(source, of_expert + first, of_expert + at, k, width, width, DEPTH, BULK, EVEN)
            begin = of_expert + num_out
            weight = load_rows(source, begin + first, begin + at, k, width, width, DEPTH, BULK, EVEN)
        else:
            weight = load_rows(source, of_expert + first, of_expert + at, k, width, width, DEPTH, BULK, EVEN)
        if X_GROUPS or W_GROUPS or EXACT:
            # Sums of one step each.
            group = k // DEPTH
            d = dot(x, weight, tl.zeros(shape, SUM), TURNED)
            if W_GROUPS:
                d *= of_rows(tl.load(scales_ptr + group * stride_scales + (at + num_out * GATED) // BLOCK_ROWS), TURNED)
            if X_GROUPS:
                x_scale = of_tokens(tl.load(x_scales_ptr + group * num_x + token), TURNED)
                d *= x_scale
            acc += d
            if GATED:
                d = dot(x, gate, tl.zeros(shape, SUM), TURNED)
                if W_GROUPS:
                    d *= of_rows(tl.load(scales_ptr + group * stride_scales + at // BLOCK_ROWS), TURNED)
                if X_GROUPS:
                    d *= x_scale
                gate_acc += d
        else:
            if GATED:
                gate_acc = dot(x, gate, gate_acc, TURNED)
            acc = dot(x, weight, acc, TURNED)
    acc = acc.to(tl.float32)
    gate_acc = gate_acc.to(tl.float32)
    if not X_GROUPS:
        x_scale = of_tokens(tl.load(x_scales_ptr + token), TURNED)
        acc *= x_scale
        gate_acc *= x_scale
    if not W_GROUPS:
        acc *= of_rows(tl.load(scales_ptr + (at + num_out * GATED) // BLOCK_ROWS), TURNED)
        if GATED:
            gate_acc *= of_rows(tl.load(scales_ptr + at // BLOCK_ROWS), TURNED)
    store_pairs(
        acc, gate_acc, bias_ptr + of_expert, alpha, limit, weights_ptr, out_ptr, pair, there, row, tokens, num_out,
        GATED, TURNED, TOP, WEIGHTED, IN_PARTS, HAS_BIAS, CLAMPED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "places", "first_held"])
def _unpack_kernel(
    x_ptr, stride_x, source, scales_ptr, zeros_ptr, stride_expert, stride_scales, stride_expert_zeros, stride_zeros, pairs_ptr, experts_ptr,
    first_held, bias_ptr, alpha, limit, weights_ptr, out_ptr, tokens, places, num_out, width,
    TOKENS: tl.constexpr, AMONG: tl.constexpr, COLS: tl.constexpr, SLICE: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr, GATED: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr,
    TOP: tl.constexpr, OF_PAIRS: tl.constexpr, WEIGHTED: tl.constexpr, IN_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = 16 // BITS * SLICE
    place, first = expert_place(places, num_out, COLS)
    if PDL:
        follow()
    expert, pair = pairs_of(place, pairs_ptr, experts_ptr, first_held, tokens * TOP, TOKENS, AMONG)
    if expert < 0:
        return
    there = pair < tokens * TOP
    x_row = x_ptr + (pair if OF_PAIRS else pair // TOP).to(tl.int64) * stride_x
    row = first + tl.arange(0, COLS)
    at = tl.minimum(row, num_out - 1)
    num_rows = num_out * (2 if GATED else 1)
    num_blocks = tl.cdiv(width, BLOCK)
    scales_ptr += expert.to(tl.int64) * stride_expert
    zeros_ptr += expert.to(tl.int64) * stride_expert_zeros
    acc = tl.zeros([COLS, TOKENS], tl.float32)
    gate_acc = tl.zeros([COLS, TOKENS], tl.float32)
    for b in tl.range(0, num_blocks):
        begin = (expert * num_blocks + b) * num_rows
        if GATED:
            words = load_rows(source, begin + first, begin + at, 0, SLICE, SLICE, SLICE, BULK, True)
            gate_acc = _add_block(
                words, x_row, there, scales_ptr + at // BLOCK_ROWS, zeros_ptr + at, stride_scales, stride_zeros, gate_acc, b, width,
                TOKENS, COLS, SLICE, BITS, IS_FLOAT, GROUP, HAS_ZEROS, EVEN, ON_GPU,
            )  # fmt: skip
            begin += num_out
        words = load_rows(source, begin + first, begin + at, 0, SLICE, SLICE, SLICE, BULK, True)
        acc = _add_block(
            words, x_row, there, scales_ptr + (at + num_out * GATED) // BLOCK_ROWS, zeros_ptr + at + num_out * GATED, stride_scales,
            stride_zeros, acc, b, width, TOKENS, COLS, SLICE, BITS, IS_FLOAT, GROUP, HAS_ZEROS, EVEN, ON_GPU,
        )  # fmt: skip
    if GROUP == 0:
        acc *= tl.load(scales_ptr + (at + num_out * GATED) // BLOCK_ROWS)[:, None]
        if GATED:
            gate_acc *= tl.load(scales_ptr + at // BLOCK_ROWS)[:, None]
    store_pairs(
        acc, gate_acc, bias_ptr + expert * num_rows, alpha, limit, weights_ptr, out_ptr, pair, there, row, tokens, num_out,
        GATED, True, TOP, WEIGHTED, IN_PARTS, HAS_BIAS, CLAMPED,
    )  # fmt: skip


@triton.jit
def _add_block(
    words, x_row, there, scales_ptr, zeros_ptr, stride, stride_zeros, acc, b, width,
    TOKENS: tl.constexpr, COLS: tl.constexpr, SLICE: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, EVEN: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Adds a block of columns to acc [COLS, TOKENS]."""
    SLICES: tl.constexpr = 16 // BITS
    # Slices that share a scale, of a block at most.
    TOGETHER: tl.constexpr = SLICES if (GROUP == 0 or GROUP >= SLICES * SLICE) else GROUP // SLICE
    d = tl.zeros([COLS, TOKENS], tl.float32)
    zero = tl.full([COLS], 8.0, tl.float32)
    i = tl.arange(0, SLICE)
    for p in tl.static_range(SLICES):
        column = (b * SLICES + p) * SLICE + i
        inside = there[:, None] if EVEN else there[:, None] & (column < width)[None, :]
        x = tl.load(x_row[:, None] + column[None, :], mask=inside, other=0.0)
        group = (b * SLICES + p) * SLICE // GROUP if GROUP > 0 else 0
        if p % TOGETHER == 0:
            if GROUP > 0:
                d = tl.zeros([COLS, TOKENS], tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + group * stride_zeros)
        numbers = unpack(words, zero, x.dtype, p, BITS, IS_FLOAT, HAS_ZEROS, ON_GPU)
        if ON_GPU:
            d = tl.dot(numbers, tl.trans(x), d)
        else:
            d = tl.dot(numbers.to(tl.float32), tl.trans(x.to(tl.float32)), d, input_precision="ieee")
        if GROUP > 0 and p % TOGETHER == TOGETHER - 1:
            acc += d * tl.load(scales_ptr + group * stride)[:, None]
    return acc if GROUP > 0 else acc + d
