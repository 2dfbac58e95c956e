"""Products of experts with the tokens that go to them, as Triton kernels.

    gate_up   x [T, K] of each pair's token ─ silu(gate) · up ─ [T * k, F]
    down      [T * k, F] of each pair ─ times its weight ─ terms

    rows      one to a few tokens: a program keeps some rows of one pair's expert in registers
    tiles     more: a tile of pairs of one expert (triton_routing.py) meets tiles of its weight, which stream through the tensor cores

A pair's sum has one program, whatever tile the pair is in: the same bits every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twostep.model.kernels.experts import ClampedGate
from twostep.model.kernels.triton_launch import follow, overlaps
from twostep.model.kernels.triton_routing import ExpertTiles, pairs_of
from twostep.model.kernels.triton_weight_tiles import load_weight_rows, load_weight_tile, multiply_tile

# Tiles of pairs whose tiles of the weight run together, so that both come from the second-level cache.
_TILES_TOGETHER = tl.constexpr(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """What a product is of, and where its results go.

    x         rows dense: of each token [T, K], or of each pair [T * k, K]
    chosen    int32 [T, k], dense
    held      experts that there are weights of; pairs of others are left alone
    weights   float32 [T, k]: what results are multiplied with; None: nothing
    of_pairs  whether x has a row for each pair
    in_parts  results go to float32 [k, T, N], else to [T * k, N] in x's dtype
    bias      [E, rows of the weight], dense; of a gated product its gates' first
    clamped   how a gated product is gated; None: silu(gate) · up
    """

    x: torch.Tensor
    chosen: torch.Tensor
    held: range
    weights: torch.Tensor | None = None
    of_pairs: bool = False
    in_parts: bool = False
    bias: torch.Tensor | None = None
    clamped: ClampedGate | None = None

    @property
    def top_k(self) -> int:
        return self.chosen.shape[1]

    def out(self, num_out: int) -> torch.Tensor:
        assert self.x.stride(1) == 1
        assert self.chosen.is_contiguous()
        assert len(self.x) == (self.chosen.numel() if self.of_pairs else len(self.chosen))
        if self.in_parts:
            return torch.empty(self.top_k, len(self.chosen), num_out, dtype=torch.float32, device=self.x.device)
        return self.x.new_empty(self.chosen.numel(), num_out)

    @property
    def constants(self) -> dict[str, object]:
        return {
            "TOP": self.top_k,
            "OF_PAIRS": self.of_pairs,
            "WEIGHTED": self.weights is not None,
            "IN_PARTS": self.in_parts,
            "HAS_BIAS": self.bias is not None,
            "CLAMPED": self.clamped is not None,
        }

    @property
    def ends(self) -> tuple[torch.Tensor, float, float, torch.Tensor]:
        """What finish_pairs asks of a kernel: bias, alpha, limit, weights."""
        clamped = self.clamped or ClampedGate(0.0, 0.0)
        bias, weights = (self.chosen if each is None else each for each in (self.bias, self.weights))
        assert self.bias is None or self.bias.is_contiguous()
        return bias, clamped.alpha, clamped.limit, weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRowTile:
    """rows: of the weight in one program, a power of 2 (gated: as many of each half)."""

    rows: int
    num_warps: int


def multiply_rows(pairs: Pairs, weight: torch.Tensor, *, tile: ExpertRowTile, gated: bool = False) -> torch.Tensor:
    """Each pair's row times its expert's weight, transposed, float32 inside.

    weight  [E, N, K], dense; gated: [E, 2 * N, K], gates first
    gated   silu of the first half of the result times the second
    Returns [T * k, N] or float32 [k, T, N].
    """
    x, (_, num_rows, width) = pairs.x, weight.shape
    assert weight.is_contiguous()
    assert x.shape[1] == width
    num_out = num_rows // 2 if gated else num_rows
    out = pairs.out(num_out)
    if out.numel():
        pdl = overlaps(x.device)
        _rows_kernel[(triton.cdiv(num_out, tile.rows), pairs.chosen.numel())](
            x, weight, pairs.chosen, *pairs.ends, out, len(pairs.chosen), num_out, x.stride(0),
            pairs.held.start, len(pairs.held), WIDTH=width, BLOCK=triton.next_power_of_2(width), ROWS=tile.rows, GATED=gated,
            **pairs.constants, PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens", "first", "held"])
def _rows_kernel(
    x_ptr, weight_ptr, chosen_ptr, bias_ptr, alpha, limit, weights_ptr, out_ptr, tokens, num_out, stride_x, first, held,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, TOP: tl.constexpr, OF_PAIRS: tl.constexpr,
    WEIGHTED: tl.constexpr, IN_PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the end compute the last one again and store nothing.
    at = tl.minimum(row, num_out - 1).to(tl.int64)
    k = tl.arange(0, BLOCK)
    if PDL:
        follow()
    expert = tl.load(chosen_ptr + pair) - first
    if (expert < 0) | (expert >= held):
        return
    of_expert = weight_ptr + expert.to(tl.int64) * num_out * (WIDTH * 2 if GATED else WIDTH)
    weight = load_weight_rows(of_expert, at, k, WIDTH, BLOCK)
    gate = weight
    if GATED:
        weight = load_weight_rows(of_expert, at + num_out, k, WIDTH, BLOCK)
    source = pair if OF_PAIRS else pair // TOP
    x = tl.load(x_ptr + source.to(tl.int64) * stride_x + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    g = y
    if GATED:
        g = tl.sum(gate.to(tl.float32) * x[None, :], 1)
    if HAS_BIAS:
        bias_ptr += expert.to(tl.int64) * num_out * (2 if GATED else 1) + at
        if GATED:
            g += tl.load(bias_ptr).to(tl.float32)
            bias_ptr += num_out
        y += tl.load(bias_ptr).to(tl.float32)
    if GATED:
        y = gate_of(g, y, alpha, limit, CLAMPED)
    if WEIGHTED:
        y *= tl.load(weights_ptr + pair)
    to = (pair % TOP) * tokens + pair // TOP if IN_PARTS else pair
    tl.store(out_ptr + to.to(tl.int64) * num_out + row, y.to(out_ptr.dtype.element_ty), mask=row < num_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTile:
    """How one program works.

    tokens  pairs of a tile, a power of 2
    cols    rows of the weight (gated: half of them of each half)
    depth   columns a step
    turned  weight times tokens (64 rows of weight are one tensor-core tile) or tokens times weight
    bulk    the weight comes by the tensor memory accelerator
    """

    tokens: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int
    turned: bool
    bulk: bool


def multiply_tiles(pairs: Pairs, tiles: ExpertTiles, weight: torch.Tensor, *, tile: ExpertTile, gated: bool = False) -> torch.Tensor:
    """As multiply_rows; rows of pairs that are not held stay undefined."""
    x, (_, num_rows, width) = pairs.x, weight.shape
    assert weight.is_contiguous()
    assert x.shape[1] == width
    assert tiles.tokens == tile.tokens
    num_out = num_rows // 2 if gated else num_rows
    out = pairs.out(num_out)
    if out.numel() and tiles.places:
        pdl, cols = overlaps(x.device), tile.cols // 2 if gated else tile.cols
        flat = weight.view(-1, width)
        _tiles_kernel[(triton.cdiv(num_out, cols) * tiles.places,)](
            x, TensorDescriptor.from_tensor(flat, [cols, tile.depth]) if tile.bulk else flat, *tiles.arguments,
            *pairs.ends, out, len(pairs.chosen), tiles.places, num_out, x.stride(0),
            WIDTH=width, TOKENS=tile.tokens, AMONG=tiles.among, COLS=cols, DEPTH=tile.depth, GATED=gated, TURNED=tile.turned,
            BULK=tile.bulk, **pairs.constants, PDL=pdl, IN_FLOAT32=not x.is_cuda, num_warps=tile.num_warps, num_stages=tile.num_stages,
            launch_pdl=pdl,
        )  # fmt: skip
    return out


# One program for every number of tokens of a tile: steps of all sizes are captured at start-up.
@triton.jit(do_not_specialize=["tokens", "places", "first_held"])
def _tiles_kernel(
    x_ptr, source, pairs_ptr, experts_ptr, first_held, bias_ptr, alpha, limit, weights_ptr, out_ptr, tokens, places, num_out, stride_x,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, AMONG: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr,
    TURNED: tl.constexpr, BULK: tl.constexpr, TOP: tl.constexpr, OF_PAIRS: tl.constexpr, WEIGHTED: tl.constexpr, IN_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, PDL: tl.constexpr, IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    place, first = expert_place(places, num_out, COLS)
    if PDL:
        follow()
    num_pairs = tokens * TOP
    expert, pair = pairs_of(place, pairs_ptr, experts_ptr, first_held, num_pairs, TOKENS, AMONG)
    if expert < 0:
        return
    there = pair < num_pairs
    x_row = x_ptr + (pair if OF_PAIRS else pair // TOP).to(tl.int64) * stride_x
    row = first + tl.arange(0, COLS)
    # Rows past the end compute the last one again and store nothing.
    at = tl.minimum(row, num_out - 1).to(tl.int64)
    of_expert = expert * num_out * (2 if GATED else 1)
    shape: tl.constexpr = [COLS, TOKENS] if TURNED else [TOKENS, COLS]
    acc = tl.zeros(shape, tl.float32)
    gate_acc = tl.zeros(shape, tl.float32)
    depth = tl.arange(0, DEPTH)
    for k in tl.range(0, WIDTH, DEPTH):
        inside = there[:, None]
        if WIDTH % DEPTH != 0:
            inside = inside & (k + depth < WIDTH)[None, :]
        x = tl.load(x_row[:, None] + k + depth[None, :], mask=inside, other=0.0)
        if GATED:
            gate = load_weight_tile(source, of_expert + first, of_expert + at, k, WIDTH, DEPTH, BULK)
            weight = load_weight_tile(source, of_expert + first + num_out, of_expert + at + num_out, k, WIDTH, DEPTH, BULK)
            gate_acc = multiply_tile(x, gate, gate_acc, TURNED, IN_FLOAT32)
        else:
            weight = load_weight_tile(source, of_expert + first, of_expert + at, k, WIDTH, DEPTH, BULK)
        acc = multiply_tile(x, weight, acc, TURNED, IN_FLOAT32)
    store_pairs(
        acc, gate_acc, bias_ptr + of_expert, alpha, limit, weights_ptr, out_ptr, pair, there, row, tokens, num_out,
        GATED, TURNED, TOP, WEIGHTED, IN_PARTS, HAS_BIAS, CLAMPED,
    )  # fmt: skip


@triton.jit
def expert_place(places, num_out, COLS: tl.constexpr):
    """This program's tile of pairs, and its first row of the weight."""
    i = tl.program_id(0)
    num_rows = tl.cdiv(num_out, COLS)
    first = i // (_TILES_TOGETHER * num_rows) * _TILES_TOGETHER
    together = tl.minimum(places - first, _TILES_TOGETHER)
    i = i % (_TILES_TOGETHER * num_rows)
    return first + i % together, i // together * COLS


@triton.jit
def store_pairs(
    acc, gate_acc, bias_ptr, alpha, limit, weights_ptr, out_ptr, pair, there, row, tokens, num_out,
    GATED: tl.constexpr, TURNED: tl.constexpr, TOP: tl.constexpr, WEIGHTED: tl.constexpr, IN_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """Stores a tile's results where its pairs' go. `bias_ptr`: the expert's."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + (num_out if GATED else 0) + row, mask=row < num_out, other=0.0).to(tl.float32)
        acc += bias[:, None] if TURNED else bias[None, :]
        if GATED:
            bias = tl.load(bias_ptr + row, mask=row < num_out, other=0.0).to(tl.float32)
            gate_acc += bias[:, None] if TURNED else bias[None, :]
    if GATED:
        acc = gate_of(gate_acc, acc, alpha, limit, CLAMPED)
    if WEIGHTED:
        weight = tl.load(weights_ptr + pair, mask=there, other=0.0)
        acc *= weight[None, :] if TURNED else weight[:, None]
    to = ((pair % TOP) * tokens + pair // TOP if IN_PARTS else pair).to(tl.int64) * num_out
    if TURNED:
        place = to[None, :] + row[:, None]
        mask = there[None, :] & (row < num_out)[:, None]
    else:
        place = to[:, None] + row[None, :]
        mask = there[:, None] & (row < num_out)[None, :]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_of(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        return gate * tl.sigmoid(gate * alpha) * up
    else:
        return gate * tl.sigmoid(gate) * up
