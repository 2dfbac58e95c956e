"""Linear layers of 16-bit weights on GPUs: this project's kernels while tokens are few and the weight's bytes are the floor, cuBLAS beyond.

    tokens      1 … 2              3 … 64 (gated: 128)           more
    kernel      rows               tiles                         cuBLAS
                of the weight      of it stream to the tensor    the best where arithmetic counts, but for weights
                in registers       cores; parts of K where       of so few rows that hardly a multiprocessor would
                                   its rows are few              have some: tiles in parts up to 256 (a router's)

Which one, and its layout, follow from the shape alone, so a captured step always takes the same, and a result is the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twostep.model.kernels.linear_trial import try_linear
from twostep.model.kernels.ops import LinearInParts
from twostep.model.kernels.triton_elementwise import silu_mul
from twostep.model.kernels.triton_launch import follow, num_sms_of, overlaps, shared_bytes_of, start_next, wait_for_previous
from twostep.model.kernels.triton_weight_tiles import load_weight_rows, load_weight_tile, multiply_tile

_DTYPES = (torch.bfloat16, torch.float16)
# Weights come in pieces of 16 bytes.
_ALIGNMENT = 8
# Tokens up to which rows in registers are faster than tiles through tensor cores, tiles than cuBLAS, and gated tiles than cuBLAS.
_ROWS_UP_TO = 2
_TILES_UP_TO = 64
_GATED_TILES_UP_TO = 128
# Rows of a weight whose parts cost next to nothing to add up, and tokens up to which they are tiles.
_FEW_ROWS = 512
_FEW_ROWS_UP_TO = 256
_WIDEST_ROW = 16384
_MOST_PARTS = 8
# Shared memory of a program beside its tiles: barriers, and what threads exchange.
_SHARED_SLACK = 4096
# On both sides of every change of kernel or layout. Both results are rounded to 16 bits, which makes some thousandths.
_TRIAL_TOKENS = (1, 2, 3, 16, 17, 32, 33, 64, 65, 128, 256)


class StreamedLinear(LinearInParts):
    """x @ weight.T + bias; or, gated, silu of its first half times the second."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> None:
        """weight [N, K], gated [2 * N, K] with the gates first; bias [N] or [2 * N]"""
        self._weight = weight
        self._bias = bias
        self._gated = gated

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, in_parts=False)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, in_parts=not self._gated)

    def trial(self) -> str:
        """Runs every kernel that steps of this layer will take, beside cuBLAS. Empty, or what went wrong."""

        def right(x: torch.Tensor) -> torch.Tensor:
            y = F.linear(x, self._weight, self._bias)
            return silu_mul(y) if self._gated else y

        weight = self._weight
        return try_linear(self, right, num_tokens=_TRIAL_TOKENS, width=weight.shape[1], dtype=weight.dtype, device=weight.device)

    def _run(self, x: torch.Tensor, *, in_parts: bool) -> torch.Tensor:
        num_out, width = self._weight.shape
        chip = {"num_sms": num_sms_of(x.device), "shared_bytes": _shared_bytes(x.device)}
        tile = choose_tile(len(x), num_out, width, gated=self._gated, in_parts=in_parts, **chip)
        if isinstance(tile, RowTile):
            return linear_rows(x, self._weight, self._bias, tile=tile, gated=self._gated)
        if isinstance(tile, LinearTile):
            return linear_tiles(x, self._weight, self._bias, tile=tile, gated=self._gated)
        y = F.linear(x, self._weight, self._bias)
        return silu_mul(y) if self._gated else y


def exact_linear(x: torch.Tensor, *, weight: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in float32, [T, N] or [parts, T, N], whose sum it is. weight [N, K] float32; narrow: the same in x's dtype, in which it
    has the same numbers."""
    chip = {"num_sms": num_sms_of(x.device), "shared_bytes": _shared_bytes(x.device)}
    # Rows of the weight in registers give 16 bits, tiles in parts do not.
    tile = choose_tile(max(len(x), _ROWS_UP_TO + 1), *narrow.shape, gated=False, in_parts=True, **chip)
    if isinstance(tile, LinearTile) and tile.parts > 1:
        y = linear_tiles(x, narrow, tile=tile)
        if y.dtype == torch.float32:
            return y
    return F.linear(x.float(), weight)


def can_stream(weight: torch.Tensor) -> bool:
    """Returns whether StreamedLinear takes this weight."""
    return weight.dtype in _DTYPES and weight.is_contiguous() and weight.shape[1] % _ALIGNMENT == 0


def _shared_bytes(device: torch.device) -> int:
    # What overlaps its neighbours has the tensor memory accelerator: both came with Hopper.
    return shared_bytes_of(device) if device.type != "cuda" or overlaps(device) else 0


def choose_tile(
    tokens: int, num_out: int, width: int, *, gated: bool, in_parts: bool, num_sms: int, shared_bytes: int
) -> RowTile | LinearTile | None:
    """Which kernel multiplies `tokens` rows with a weight [num_out, width] (gated: num_out counts both halves); None: cuBLAS.

    in_parts      whether the result may come as several terms of a sum
    num_sms       multiprocessors of the device
    shared_bytes  shared memory that a program may take; 0: the device has no tensor memory accelerator, and tiles are not for it

    Measured on an H200 with the shapes of an 8B model (benchmarks/gpu_linear.py --sweep; the table is in benchmarks/RESULTS.md).
    """
    if tokens <= _ROWS_UP_TO and width * (1 + gated) <= _WIDEST_ROW:
        # At least 64 numbers of the weight to a thread, gated twice that.
        return RowTile(rows=max(2, 8192 // triton.next_power_of_2(width)), num_warps=4)
    few_rows = in_parts and num_out <= _FEW_ROWS
    if tokens > (_GATED_TILES_UP_TO if gated else _FEW_ROWS_UP_TO if few_rows else _TILES_UP_TO):
        return None
    tile = _tile(tokens, num_out, width, gated=gated, in_parts=in_parts, num_sms=num_sms)
    if tile is None or _bytes_on_their_way(tile, tokens) + _SHARED_SLACK > shared_bytes:
        return None
    return tile


def _tile(tokens: int, num_out: int, width: int, *, gated: bool, in_parts: bool, num_sms: int) -> LinearTile | None:
    if gated and tokens > 64:
        return LinearTile(cols=256, depth=64, parts=1, num_warps=8, num_stages=4, turned=True, bulk=True)
    stages = 5 if tokens <= 32 else 4
    wide = LinearTile(cols=128, depth=128, parts=1, num_warps=4, num_stages=stages, turned=True, bulk=True)
    if gated or num_out >= wide.cols * num_sms:
        return wide
    # Few rows: not every multiprocessor would have some. Parts of them reach all, at the price of adding up more numbers than cuBLAS
    # has to write, so that longer rows pay for more tokens.
    parts = min(_MOST_PARTS, max(1, num_sms * wide.cols // num_out))
    if in_parts and parts > 1 and (tokens <= 32 or width >= 8192):
        if tokens <= 16:
            return LinearTile(cols=64, depth=128, parts=parts, num_warps=4, num_stages=5, turned=False, bulk=True)
        return replace(wide, parts=parts, num_warps=8)
    if in_parts and parts > 1 and num_out <= _FEW_ROWS:
        return LinearTile(cols=64, depth=128 if tokens <= 64 else 64, parts=parts, num_warps=4, num_stages=4, turned=True, bulk=True)
    if tokens <= 32:
        return LinearTile(cols=64, depth=128, parts=1, num_warps=4, num_stages=5, turned=True, bulk=False)
    return None


def _bytes_on_their_way(tile: LinearTile, tokens: int) -> int:
    """Returns the bytes of weight and tokens in the shared memory of one program."""
    padded = max(16, 1 << (tokens - 1).bit_length())
    return (tile.cols + padded) * tile.depth * 2 * tile.num_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTile:
    """rows: of the weight in one program, a power of 2 (gated: as many of each half)."""

    rows: int
    num_warps: int


def linear_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, tile: RowTile, gated: bool = False
) -> torch.Tensor:
    """x @ weight.T + bias, float32 inside, for one to a few tokens: each program keeps whole rows of the weight in registers, all of them
    asked for before the kernel ahead has ended, and meets every token with them. Nothing is shared between programs, so a token's
    result depends neither on its neighbours nor on the run.

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
        x, weight, weight if bias is None else bias, out, num_out, x.stride(0),
        TOKENS=tokens, WIDTH=width, BLOCK=triton.next_power_of_2(width), ROWS=tile.rows, HAS_BIAS=bias is not None, GATED=gated,
        PDL=pdl, num_warps=tile.num_warps, launch_pdl=pdl,
    )  # fmt: skip
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
    weight = load_weight_rows(weight_ptr, at, k, WIDTH, BLOCK)
    gate = weight
    if GATED:
        weight = load_weight_rows(weight_ptr, at + num_out, k, WIDTH, BLOCK)
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
    """x @ weight.T + bias, float32 inside, for some tokens: tiles of the weight stream through tensor cores, each read once.

    grid    (N / COLS, parts): every multiprocessor has a part of the bytes; parts of K leave float32 sums, which the kernel after adds
            up in order (`add_rms_norm`): no atomics, the same bits every run
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
        x, source, weight if bias is None else bias, out, tokens, num_out, x.stride(0),
        WIDTH=width, PART=part, TOKENS=max(16, triton.next_power_of_2(tokens)), COLS=cols, DEPTH=tile.depth,
        HAS_BIAS=bias is not None, GATED=gated, TURNED=tile.turned, BULK=tile.bulk, PDL=pdl, IN_FLOAT32=not x.is_cuda,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
    )  # fmt: skip
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
            gate = load_weight_tile(source, first, at, k, WIDTH, DEPTH, BULK)
            weight = load_weight_tile(source, first + num_out, at + num_out, k, WIDTH, DEPTH, BULK)
            gate_acc = multiply_tile(x, gate, gate_acc, TURNED, IN_FLOAT32)
        else:
            weight = load_weight_tile(source, first, at, k, WIDTH, DEPTH, BULK)
        acc = multiply_tile(x, weight, acc, TURNED, IN_FLOAT32)
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
def _spread(values, TURNED: tl.constexpr):
    if TURNED:
        return values[:, None]
    else:
        return values[None, :]
