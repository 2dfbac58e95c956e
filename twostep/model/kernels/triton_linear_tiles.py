"""Matrix products for some tokens, bound by the weight's bytes: tiles of the weight stream through tensor cores, each read once.

weight [N, K]    COLS rows × DEPTH columns a step, several steps on their way to shared memory
x      [T, K]    all tokens, padded to a tile
grid             (N / COLS, parts): every multiprocessor has a part of the bytes; parts of K leave float32 sums, [parts, T, N],
                 which the kernel after adds up in order (`add_rms_norm`): no atomics, the same bits every run
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twostep.model.kernels.triton_launch import follow, overlaps


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTile:
    """How one program works.

    cols      rows of the weight (gated: half of them of each half)
    depth     columns of the weight a step
    parts     of K, each a program's
    turned    weight times tokens (64 rows of weight are one tensor-core tile) or tokens times weight
    bulk      the weight comes by the tensor memory accelerator
    """

    cols: int
    depth: int
    parts: int
    num_warps: int
    num_stages: int
    turned: bool
    bulk: bool


def linear_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, tile: LinearTile, gated: bool = False
) -> torch.Tensor:
    """x @ weight.T + bias, float32 inside.

    x       [T, K], rows dense
    weight  [N, K], dense; gated: [2 * N, K], gates first
    gated   silu of the first half of the result times the second; one part only
    Returns [T, N], or with several parts float32 [parts, T, N], whose sum it is.
    """
    tokens, width = x.shape
    num_out = len(weight) // 2 if gated else len(weight)
    assert weight.shape[1] == width
    assert weight.is_contiguous()
    assert x.stride(1) == 1
    assert not gated or tile.parts == 1
    # Whole steps each; there may be fewer parts than asked for, but none is empty.
    part = triton.cdiv(triton.cdiv(width, tile.parts), tile.depth) * tile.depth
    parts = triton.cdiv(width, part)
    shape, dtype = ((tokens, num_out), x.dtype) if parts == 1 else ((parts, tokens, num_out), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    if not tokens:
        return out
    cols = tile.cols // 2 if gated else tile.cols
    pdl = overlaps(x.device)
    source = TensorDescriptor.from_tensor(weight, [cols, tile.depth]) if tile.bulk else weight
    _tiles_kernel[(triton.cdiv(num_out, cols), parts)](
        x,
        source,
        weight if bias is None else bias,
        out,
        tokens,
        num_out,
        x.stride(0),
        WIDTH=width,
        PART=part,
        TOKENS=max(16, triton.next_power_of_2(tokens)),
        COLS=cols,
        DEPTH=tile.depth,
        HAS_BIAS=bias is not None,
        GATED=gated,
        TURNED=tile.turned,
        BULK=tile.bulk,
        PDL=pdl,
        IN_FLOAT32=not x.is_cuda,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=pdl,
    )
    return out


# One program for every number of tokens of a tile: steps of all sizes are captured at start-up.
@triton.jit(do_not_specialize=["tokens"])
def _tiles_kernel(
    x_ptr, source, bias_ptr, out_ptr, tokens, num_out, stride_x,
    WIDTH: tl.constexpr, PART: tl.constexpr, TOKENS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, TURNED: tl.constexpr, BULK: tl.constexpr, PDL: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * COLS
    part = tl.program_id(1)
    start = part * PART
    end = tl.minimum(start + PART, WIDTH)
    col = first + tl.arange(0, COLS)
    # Rows past the end compute the last one again and store nothing.
    at = tl.minimum(col, num_out - 1).to(tl.int64)
    if PDL:
        follow()
    t = tl.arange(0, TOKENS)
    shape: tl.constexpr = [COLS, TOKENS] if TURNED else [TOKENS, COLS]
    acc = tl.zeros(shape, tl.float32)
    gate_acc = tl.zeros(shape, tl.float32)
    for k in tl.range(start, end, DEPTH):
        x = _load_tokens(x_ptr, stride_x, t, tokens, k, WIDTH, DEPTH)
        if GATED:
            gate = _load_tile(source, first, at, k, WIDTH, DEPTH, BULK)
            weight = _load_tile(source, first + num_out, at + num_out, k, WIDTH, DEPTH, BULK)
            gate_acc = _multiply(x, gate, gate_acc, TURNED, IN_FLOAT32)
        else:
            weight = _load_tile(source, first, at, k, WIDTH, DEPTH, BULK)
        acc = _multiply(x, weight, acc, TURNED, IN_FLOAT32)
    if HAS_BIAS and part == 0:
        if GATED:
            gate_acc += _spread(tl.load(bias_ptr + at).to(tl.float32), TURNED)
            acc += _spread(tl.load(bias_ptr + num_out + at).to(tl.float32), TURNED)
        else:
            acc += _spread(tl.load(bias_ptr + at).to(tl.float32), TURNED)
    if GATED:
        acc = gate_acc * tl.sigmoid(gate_acc) * acc
    if TURNED:
        place = t[None, :].to(tl.int64) * num_out + col[:, None]
        mask = (t < tokens)[None, :] & (col < num_out)[:, None]
    else:
        place = t[:, None].to(tl.int64) * num_out + col[None, :]
        mask = (t < tokens)[:, None] & (col < num_out)[None, :]
    tl.store(out_ptr + part.to(tl.int64) * tokens * num_out + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_tokens(x_ptr, stride_x, t, tokens, k, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """[TOKENS, DEPTH], zeros past what is there."""
    depth = k + tl.arange(0, DEPTH)
    inside = (t < tokens)[:, None]
    if WIDTH % DEPTH != 0:
        inside = inside & (depth < WIDTH)[None, :]
    return tl.load(x_ptr + t[:, None] * stride_x + depth[None, :], mask=inside, other=0.0)


@triton.jit
def _load_tile(source, first, row, k, WIDTH: tl.constexpr, DEPTH: tl.constexpr, BULK: tl.constexpr):
    """[COLS, DEPTH] of the weight, zeros past its width."""
    if BULK:
        return source.load([first, k])
    else:
        depth = k + tl.arange(0, DEPTH)
        at = source + row[:, None] * WIDTH + depth[None, :]
        if WIDTH % DEPTH != 0:
            return tl.load(at, mask=(depth < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def _multiply(x, weight, acc, TURNED: tl.constexpr, IN_FLOAT32: tl.constexpr):
    if IN_FLOAT32:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if TURNED:
        return tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(weight), acc, input_precision="ieee")


@triton.jit
def _spread(values, TURNED: tl.constexpr):
    if TURNED:
        return values[:, None]
    else:
        return values[None, :]
