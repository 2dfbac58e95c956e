"""Products with quantized weights, as Triton kernels: tiles of the weight stream through tensor cores, each read once.

    eight   8-bit numbers on both sides (fp8 or int8): they are multiplied as they are, and sums are scaled
    unpack  weights of 4 or 8 bits, inputs of 16: numbers go from shared memory to registers in the order in which the tensor cores ask for
            them, become 16-bit floats there by two or three instructions a pair (exactly: small whole numbers), and sums are scaled

    unpack's layout   int16 [K blocks * N, SLICE]; a block is SLICES * SLICE columns (SLICES = 16 / bits), and column p * SLICE + i of it is
                      number p, from the lowest bits up, of word i. So the words of a tile lie together, a word's neighbour holds the next
                      column, and a mask and a shift give whole slices.

Both:
    grid   tiles of rows of the weight (and of tokens) x parts of K, so that every multiprocessor has a part of the bytes. The sums of parts
           are left to the kernel that comes next, or the program that is last adds them up; in order, without atomics: the same bits
           every run.
    gated  the first half of the weight's rows are gates: silu of their result times the other half's
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twostep.model.kernels.triton_launch import overlaps, start_next, wait_for_previous
from twostep.model.kernels.triton_quantized_input import INPUT_GROUP, RoundedInput
from twostep.model.kernels.triton_quantized_kv import number_of_e4m3

# Token tiles whose weight tiles run together, so that both come from the second-level cache.
_TILES_TOGETHER = tl.constexpr(8)
_WHOLE_ROWS = 0  # in place of a group's columns


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTile:
    """How one program works.

    tokens  of a tile, a power of 2
    cols    rows of the weight (gated: half of them of each half)
    depth   columns a step, of 8-bit numbers on both sides; unpacked weights have their blocks
    parts   of K, each a program's
    turned  weight times tokens (64 rows of the weight are one tensor-core tile) or tokens times weight; unpacked weights are always so
    exact   sums of fp8 products go to float32 after every step; else the tensor cores keep them, in fewer bits
    ahead   steps whose bytes are asked for before the kernel ahead has ended
    bulk    the weight comes by the tensor memory accelerator, as the tokens of large tiles do: fewer instructions, but every tile that
            comes so takes the program's threads some barriers a step
    """

    tokens: int
    cols: int
    depth: int = 128
    parts: int = 1
    num_warps: int
    num_stages: int
    turned: bool = True
    exact: bool = True
    ahead: int = 0
    bulk: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A weight as a kernel reads it.

    values     [N, K] float8_e4m3fn or int8; for `unpack` int16 (above)
    scales     float32 [groups, ⌈N / block_rows⌉]
    zeros      float32 [groups, N], what stands for zero; None: what the format means by it
    group      columns that share a scale; 0: all
    bits       4 or 8, is_float: of the numbers
    counters   int32, all zero between calls: how many parts of a tile have come
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group: int
    block_rows: int
    num_out: int
    width: int
    bits: int
    is_float: bool
    counters: torch.Tensor

    @property
    def slice(self) -> int:
        return self.values.shape[1]

    @property
    def num_slices(self) -> int:
        return 16 // self.bits

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.scales, self.zeros) if part is not None)


@dataclass(frozen=True, slots=True)
class _Output:
    """Where the results of a product go: to `out` [T, N], or in parts to float32 [parts, T, N]."""

    parts: int
    part: int  # columns, whole steps
    merged: bool
    out: torch.Tensor
    sums: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, packed: Packed, tile: QuantizedTile, step: int, dtype: torch.dtype, *, gated: bool, in_parts: bool) -> _Output:
        assert tile.parts == 1 or not gated
        tokens, num_out = len(x), packed.num_out // 2 if gated else packed.num_out
        # There may be fewer parts than asked for, but none is empty.
        part = triton.cdiv(triton.cdiv(packed.width, tile.parts), step) * step
        parts = triton.cdiv(packed.width, part)
        if parts > 1 and in_parts:
            out = torch.empty(parts, tokens, num_out, dtype=torch.float32, device=x.device)
            return _Output(parts, part, False, out, out)
        out = torch.empty(tokens, num_out, dtype=dtype, device=x.device)
        sums = torch.empty(parts, tokens, num_out, dtype=torch.float32, device=x.device) if parts > 1 else out
        return _Output(parts, part, parts > 1, out, sums)


def multiply_eight(
    x: RoundedInput,
    packed: Packed,
    bias: torch.Tensor | None,
    *,
    tile: QuantizedTile,
    dtype: torch.dtype,
    gated: bool = False,
    in_parts: bool = False,
) -> torch.Tensor:
    """x @ weight.T + bias, [T, N] in `dtype`; with `in_parts` float32 [parts, T, N] where there are several, whose sum it is."""
    values, tokens = x.values, len(x.values)
    assert values.dtype == packed.values.dtype
    assert values.shape[1] == packed.width
    grouped = bool(packed.group) or x.scales.dim() == 2
    assert not grouped or (tile.depth == INPUT_GROUP and packed.group in (_WHOLE_ROWS, INPUT_GROUP) and packed.is_float)
    output = _Output.of(values, packed, tile, tile.depth, dtype, gated=gated, in_parts=in_parts)
    if not tokens:
        return output.out
    pdl, cols = overlaps(values.device), tile.cols // 2 if gated else tile.cols
    _eight_kernel[(triton.cdiv(packed.num_out // (1 + gated), cols) * triton.cdiv(tokens, tile.tokens), output.parts)](
        *_sources(values, packed.values, tile, cols, tile.depth), values.stride(0), x.scales, packed.values,
        packed.scales, packed.scales.stride(0),
        packed.scales if bias is None else bias, output.out, output.sums, packed.counters, tokens, packed.num_out // (1 + gated),
        packed.width, output.part, output.parts, TOKENS=tile.tokens, COLS=cols, DEPTH=tile.depth, BLOCK_ROWS=packed.block_rows,
        X_GROUPS=x.scales.dim() == 2, W_GROUPS=bool(packed.group), IN_INT=not packed.is_float, EXACT=tile.exact and packed.is_float,
        HAS_BIAS=bias is not None, GATED=gated, TURNED=tile.turned, MERGED=output.merged, STAGES=tile.num_stages,
        AHEAD=tile.ahead if packed.width % tile.depth == 0 else 0, BULK_X=_bulk_tokens(tile), BULK=tile.bulk,
        EVEN=packed.width % tile.depth == 0, PDL=pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return output.out


def multiply_unpacked(
    x: torch.Tensor, packed: Packed, bias: torch.Tensor | None, *, tile: QuantizedTile, gated: bool = False, in_parts: bool = False
) -> torch.Tensor:
    """The same of x [T, K], rows dense, in 16 bits."""
    tokens, block = len(x), packed.num_slices * packed.slice
    assert x.shape[1] == packed.width
    assert tile.turned
    output = _Output.of(x, packed, tile, block, x.dtype, gated=gated, in_parts=in_parts)
    if not tokens:
        return output.out
    pdl, cols = overlaps(x.device), tile.cols // 2 if gated else tile.cols
    _unpack_kernel[(triton.cdiv(packed.num_out // (1 + gated), cols) * triton.cdiv(tokens, tile.tokens), output.parts)](
        *_sources(x, packed.values, tile, cols, packed.slice), x.stride(0), packed.values,
        packed.scales, packed.scales if packed.zeros is None else packed.zeros, packed.scales.stride(0),
        packed.scales if bias is None else bias, output.out, output.sums, packed.counters, tokens,
        packed.num_out // (1 + gated), packed.num_out, packed.width, output.part, output.parts,
        TOKENS=tile.tokens, COLS=cols, SLICE=packed.slice, BITS=packed.bits,
        IS_FLOAT=packed.is_float, GROUP=packed.group, BLOCK_ROWS=packed.block_rows, HAS_ZEROS=packed.zeros is not None,
        HAS_BIAS=bias is not None, GATED=gated, MERGED=output.merged, STAGES=tile.num_stages,
        AHEAD=tile.ahead, BULK_X=_bulk_tokens(tile), BULK=tile.bulk, EVEN=packed.width % block == 0, PDL=pdl, ON_GPU=x.is_cuda,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    return output.out


def _bulk_tokens(tile: QuantizedTile) -> bool:
    return tile.bulk and tile.tokens > 64


def _sources(
    x: torch.Tensor, weight: torch.Tensor, tile: QuantizedTile, cols: int, depth: int
) -> tuple[torch.Tensor | TensorDescriptor, torch.Tensor | TensorDescriptor]:
    """What a kernel loads tiles of tokens and of the weight from."""
    return (
        TensorDescriptor.from_tensor(x, [tile.tokens, depth]) if _bulk_tokens(tile) else x,
        TensorDescriptor.from_tensor(weight, [cols, depth]) if tile.bulk else weight,
    )


def unpack_dense(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The weight of `multiply_unpacked` as [N, K] in `dtype`, each number rounded once."""
    dense = torch.empty(packed.num_out, packed.width, dtype=dtype, device=packed.values.device)
    pdl, rows = overlaps(dense.device), 64
    _dense_kernel[(len(packed.values) // packed.num_out, triton.cdiv(packed.num_out, rows))](
        packed.values, packed.scales, packed.scales if packed.zeros is None else packed.zeros, packed.scales.stride(0), dense,
        packed.num_out, packed.width, ROWS=rows, SLICE=packed.slice, BITS=packed.bits, IS_FLOAT=packed.is_float, GROUP=packed.group,
        BLOCK_ROWS=packed.block_rows, HAS_ZEROS=packed.zeros is not None, ON_GPU=dense.is_cuda, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return dense


# One program for all shapes of weights and every number of tokens of a tile: steps of all sizes are captured at start-up.
@triton.jit(do_not_specialize=["tokens", "parts"])
def _eight_kernel(
    x_source, source, stride_x, x_scales_ptr, weight_ptr, scales_ptr, stride_scales, bias_ptr, out_ptr, sums_ptr, counters_ptr, tokens,
    num_out, width, columns, parts,
    TOKENS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    X_GROUPS: tl.constexpr, W_GROUPS: tl.constexpr, IN_INT: tl.constexpr, EXACT: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, TURNED: tl.constexpr, MERGED: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    BULK_X: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first_token, first = _place(tokens, num_out, TOKENS, COLS)
    part = tl.program_id(1)
    start = part * columns
    end = tl.minimum(start + columns, width)
    row = first + tl.arange(0, COLS)
    t = first_token + tl.arange(0, TOKENS)
    # Rows and tokens past the end are scaled as the last one is, and not stored.
    at = tl.minimum(row, num_out - 1)
    token = tl.minimum(t, tokens - 1)
    if PDL:
        start_next()
        for j in tl.static_range(AHEAD):
            _ask_for(weight_ptr + at.to(tl.int64) * width + start + j * DEPTH, start + j * DEPTH < end)
            if GATED:
                _ask_for(weight_ptr + (at + num_out).to(tl.int64) * width + start + j * DEPTH, start + j * DEPTH < end)
        wait_for_previous()
    shape: tl.constexpr = [COLS, TOKENS] if TURNED else [TOKENS, COLS]
    SUM: tl.constexpr = tl.int32 if IN_INT else tl.float32
    acc = tl.zeros(shape, SUM)
    gate_acc = tl.zeros(shape, SUM)
    for k in tl.range(start, end, DEPTH, num_stages=STAGES):
        x = _load_tokens(x_source, stride_x, first_token, k, tokens, width, TOKENS, DEPTH, BULK_X, EVEN)
        if GATED:
            gate = load_rows(source, first, at, k, width, width, DEPTH, BULK, EVEN)
            weight = load_rows(source, first + num_out, at + num_out, k, width, width, DEPTH, BULK, EVEN)
        else:
            weight = load_rows(source, first, at, k, width, width, DEPTH, BULK, EVEN)
        if X_GROUPS or W_GROUPS or EXACT:
            # Sums of one step each.
            group = k // DEPTH
            if GATED:
                d = dot(x, gate, tl.zeros(shape, SUM), TURNED)
                if W_GROUPS:
                    d *= of_rows(tl.load(scales_ptr + group * stride_scales + at // BLOCK_ROWS), TURNED)
                if X_GROUPS:
                    d *= of_tokens(tl.load(x_scales_ptr + group * tokens + token), TURNED)
                gate_acc += d
            d = dot(x, weight, tl.zeros(shape, SUM), TURNED)
            if W_GROUPS:
                d *= of_rows(tl.load(scales_ptr + group * stride_scales + (at + num_out * GATED) // BLOCK_ROWS), TURNED)
            if X_GROUPS:
                d *= of_tokens(tl.load(x_scales_ptr + group * tokens + token), TURNED)
            acc += d
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
    _finish(
        acc, gate_acc, bias_ptr, out_ptr, sums_ptr, counters_ptr, tokens, num_out, t, row, at, part, parts, HAS_BIAS, GATED, TURNED, MERGED
    )


@triton.jit(do_not_specialize=["tokens", "parts"])
def _unpack_kernel(
    x_source, source, stride_x, words_ptr, scales_ptr, zeros_ptr, stride_scales, bias_ptr, out_ptr, sums_ptr, counters_ptr, tokens,
    num_out, num_rows, width, columns, parts,
    TOKENS: tl.constexpr, COLS: tl.constexpr, SLICE: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, MERGED: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    BULK_X: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = 16 // BITS * SLICE
    first_token, first = _place(tokens, num_out, TOKENS, COLS)
    part = tl.program_id(1)
    start = part * (columns // BLOCK)
    end = tl.minimum(start + columns // BLOCK, tl.cdiv(width, BLOCK))
    row = first + tl.arange(0, COLS)
    t = first_token + tl.arange(0, TOKENS)
    at = tl.minimum(row, num_out - 1)
    if PDL:
        start_next()
        for j in tl.static_range(AHEAD):
            ahead = words_ptr + ((start + j) * num_rows + at).to(tl.int64) * SLICE
            _ask_for(ahead, start + j < end)
            if GATED:
                _ask_for(ahead + num_out.to(tl.int64) * SLICE, start + j < end)
        wait_for_previous()
    acc = tl.zeros([COLS, TOKENS], tl.float32)
    gate_acc = tl.zeros([COLS, TOKENS], tl.float32)
    for b in tl.range(start, end, num_stages=STAGES):
        if GATED:
            gate = load_rows(source, b * num_rows + first, b * num_rows + at, 0, SLICE, SLICE, SLICE, BULK, True)
            gate_acc = _add_block(
                gate, x_source, scales_ptr + at // BLOCK_ROWS, zeros_ptr + at, stride_scales, gate_acc, first_token, b, stride_x, tokens,
                width, TOKENS, COLS, SLICE, BITS, IS_FLOAT, GROUP, HAS_ZEROS, BULK_X, EVEN, ON_GPU,
            )  # fmt: skip
            words = load_rows(source, b * num_rows + first + num_out, b * num_rows + at + num_out, 0, SLICE, SLICE, SLICE, BULK, True)
        else:
            words = load_rows(source, b * num_rows + first, b * num_rows + at, 0, SLICE, SLICE, SLICE, BULK, True)
        acc = _add_block(
            words, x_source, scales_ptr + (at + num_out * GATED) // BLOCK_ROWS, zeros_ptr + at + num_out * GATED, stride_scales, acc,
            first_token, b, stride_x, tokens, width, TOKENS, COLS, SLICE, BITS, IS_FLOAT, GROUP, HAS_ZEROS, BULK_X, EVEN, ON_GPU,
        )  # fmt: skip
    if GROUP == 0:
        acc *= tl.load(scales_ptr + (at + num_out * GATED) // BLOCK_ROWS)[:, None]
        if GATED:
            gate_acc *= tl.load(scales_ptr + at // BLOCK_ROWS)[:, None]
    _finish(
        acc, gate_acc, bias_ptr, out_ptr, sums_ptr, counters_ptr, tokens, num_out, t, row, at, part, parts, HAS_BIAS, GATED, True, MERGED
    )


@triton.jit
def _dense_kernel(
    words_ptr, scales_ptr, zeros_ptr, stride_scales, dense_ptr, num_rows, width,
    ROWS: tl.constexpr, SLICE: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, ON_GPU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = 16 // BITS
    b = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = tl.minimum(row, num_rows - 1)
    i = tl.arange(0, SLICE)
    words = tl.load(words_ptr + (b * num_rows + at).to(tl.int64)[:, None] * SLICE + i[None, :])
    if PDL:
        start_next()
        wait_for_previous()
    zero = tl.full([ROWS], 8.0, tl.float32)
    for p in tl.static_range(SLICES):
        group = (b * SLICES + p) * SLICE // GROUP if GROUP > 0 else 0
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + group * stride_scales + at)
        numbers = unpack(words, zero, dense_ptr.dtype.element_ty, p, BITS, IS_FLOAT, HAS_ZEROS, ON_GPU).to(tl.float32)
        numbers *= tl.load(scales_ptr + group * stride_scales + at // BLOCK_ROWS)[:, None]
        column = (b * SLICES + p) * SLICE + i
        mask = (row < num_rows)[:, None] & (column < width)[None, :]
        tl.store(dense_ptr + row[:, None].to(tl.int64) * width + column[None, :], numbers.to(dense_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_block(
    words, x_source, scales_ptr, zeros_ptr, stride, acc, first_token, b, stride_x, tokens, width,
    TOKENS: tl.constexpr, COLS: tl.constexpr, SLICE: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, BULK_X: tl.constexpr, EVEN: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Adds a block of columns to acc [COLS, TOKENS]."""
    SLICES: tl.constexpr = 16 // BITS
    # Slices that share a scale, of a block at most.
    TOGETHER: tl.constexpr = SLICES if (GROUP == 0 or GROUP >= SLICES * SLICE) else GROUP // SLICE
    # (Sums that came from the block ahead would make the compiler wait after every instruction.)
    d = tl.zeros([COLS, TOKENS], tl.float32)
    zero = tl.full([COLS], 8.0, tl.float32)
    for p in tl.static_range(SLICES):
        x = _load_tokens(x_source, stride_x, first_token, (b * SLICES + p) * SLICE, tokens, width, TOKENS, SLICE, BULK_X, EVEN)
        group = (b * SLICES + p) * SLICE // GROUP if GROUP > 0 else 0
        if p % TOGETHER == 0:
            if GROUP > 0:
                d = tl.zeros([COLS, TOKENS], tl.float32)
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + group * stride)
        numbers = unpack(words, zero, x.dtype, p, BITS, IS_FLOAT, HAS_ZEROS, ON_GPU)
        if ON_GPU:
            d = tl.dot(numbers, tl.trans(x), d)
        else:
            d = tl.dot(numbers.to(tl.float32), tl.trans(x.to(tl.float32)), d, input_precision="ieee")
        if GROUP > 0 and p % TOGETHER == TOGETHER - 1:
            acc += d * tl.load(scales_ptr + group * stride)[:, None]
    return acc if GROUP > 0 else acc + d


@triton.jit
def _load_tokens(
    source, stride, first, k, tokens, width, TOKENS: tl.constexpr, DEPTH: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr
):
    """[TOKENS, DEPTH] of the input, zeros past what is there."""
    if BULK:
        return source.load([first, k])
    else:
        t = first + tl.arange(0, TOKENS)
        depth = k + tl.arange(0, DEPTH)
        inside = (t < tokens)[:, None] if EVEN else (t < tokens)[:, None] & (depth < width)[None, :]
        return tl.load(source + t[:, None].to(tl.int64) * stride + depth[None, :], mask=inside, other=0.0)


@triton.jit
def load_rows(source, first, row, k, width, stride, DEPTH: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr):
    """[COLS, DEPTH] of the weight, zeros past its width; rows from `first` on, `row` where there are some."""
    if BULK:
        return source.load([first, k])
    else:
        depth = k + tl.arange(0, DEPTH)
        at = source + row.to(tl.int64)[:, None] * stride + depth[None, :]
        if EVEN:
            return tl.load(at)
        else:
            return tl.load(at, mask=(depth < width)[None, :], other=0.0)


@triton.jit
def dot(x, weight, acc, TURNED: tl.constexpr):
    return tl.dot(weight, tl.trans(x), acc, out_dtype=acc.dtype) if TURNED else tl.dot(x, tl.trans(weight), acc, out_dtype=acc.dtype)


@triton.jit
def _place(tokens, num_out, TOKENS: tl.constexpr, COLS: tl.constexpr):
    """First token and row of the weight of this program's tile."""
    i = tl.program_id(0)
    num_rows = tl.cdiv(num_out, COLS)
    num_tokens = tl.cdiv(tokens, TOKENS)
    first = i // (_TILES_TOGETHER * num_rows) * _TILES_TOGETHER
    together = tl.minimum(num_tokens - first, _TILES_TOGETHER)
    i = i % (_TILES_TOGETHER * num_rows)
    return (first + i % together) * TOKENS, i // together * COLS


@triton.jit
def of_rows(values, TURNED: tl.constexpr):
    return values[:, None] if TURNED else values[None, :]


@triton.jit
def of_tokens(values, TURNED: tl.constexpr):
    return values[None, :] if TURNED else values[:, None]


@triton.jit
def _finish(
    acc, gate_acc, bias_ptr, out_ptr, sums_ptr, counters_ptr, tokens, num_out, t, row, at, part, parts,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, TURNED: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Stores a tile's sums, or one part's; of merged parts the one that comes last adds up all."""
    place = of_tokens(t, TURNED).to(tl.int64) * num_out + of_rows(row, TURNED)
    mask = of_tokens(t < tokens, TURNED) & of_rows(row < num_out, TURNED)
    if MERGED:
        size = tokens * num_out.to(tl.int64)
        tl.store(sums_ptr + part * size + place, acc, mask=mask)
        # All threads' numbers are there before one of them says so.
        tl.debug_barrier()
        counter = counters_ptr + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            total = tl.load(sums_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
            for other in range(1, parts):
                total += tl.load(sums_ptr + other * size + place, mask=mask, other=0.0, cache_modifier=".cg")
            if HAS_BIAS:
                total += of_rows(tl.load(bias_ptr + at).to(tl.float32), TURNED)
            tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(counter, 0)
    else:
        if HAS_BIAS and part == 0:
            acc += of_rows(tl.load(bias_ptr + at + num_out * GATED).to(tl.float32), TURNED)
            if GATED:
                gate_acc += of_rows(tl.load(bias_ptr + at).to(tl.float32), TURNED)
        if GATED:
            acc = gate_acc * tl.sigmoid(gate_acc) * acc
        tl.store(out_ptr + part * tokens * num_out.to(tl.int64) + place, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _ask_for(pointers, there):
    """Brings 128 bytes at each of `pointers` to the second-level cache."""
    tl.inline_asm_elementwise(
        _ASK, "=r,l,r", [pointers.to(tl.int64, bitcast=True), tl.broadcast_to(there.to(tl.int32), pointers.shape)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


_ASK = tl.constexpr("""{
    .reg .pred p;
    setp.ne.s32 p, $2, 0;
    @p cp.async.bulk.prefetch.L2.global [$1], 128;
    mov.b32 $0, 0;
}""")


@triton.jit
def unpack(
    words, zero, dtype: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, HAS_ZEROS: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """Slice P of words [COLS, SLICE] as numbers of `dtype` less zero [COLS]."""
    if not ON_GPU:
        number = (words >> (P * BITS)) & (15 if BITS == 4 else 255)
        if IS_FLOAT and BITS == 4:
            digits = (number & 7).to(tl.int32)
            size = tl.where(digits < 2, digits * 0.5, (2 + (digits & 1)) * 0.25 * (1 << (digits >> 1)).to(tl.float32))
            number = tl.where(number > 7, -size, size)
        elif IS_FLOAT:
            number = number_of_e4m3(number.to(tl.uint8)).to(tl.float32)
        elif BITS == 4:
            number = number.to(tl.float32) - zero[:, None]
        else:
            number = ((number ^ 128) - 128).to(tl.float32)
            if HAS_ZEROS:
                number -= zero[:, None]
        return number.to(dtype)
    BRAIN: tl.constexpr = dtype == tl.bfloat16
    ASM: tl.constexpr = _take_out(P, BRAIN, BITS, IS_FLOAT, HAS_ZEROS)
    # What is subtracted: with 4 bits beside the number that is or-ed in.
    if BITS == 4:
        zero += 128.0 if BRAIN else 1024.0
    zero = zero.to(dtype)[:, None]
    if BRAIN:
        return tl.inline_asm_elementwise(ASM, "=r,r,r", [words, zero], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(ASM, "=r,r,r", [words, zero], dtype=tl.float16, is_pure=True, pack=2)


@triton.constexpr_function
def _take_out(p, brain, bits, is_float, has_zeros):
    if is_float:
        return _float4(p, brain) if bits == 4 else _float8(p, brain)
    return _int4(p, brain) if bits == 4 else _int8(p, brain, has_zeros)


@triton.constexpr_function
def _int4(p, brain):
    # With the digits of 128 or 1024 around them, numbers from 0 to 15 are those of 128 or 1024 more.
    digits, kind = ("0x43004300", "bf16x2") if brain else ("0x64006400", "f16x2")
    return f"""{{
        .reg .b32 t;
        shr.b32 t, $1, {4 * p};
        lop3.b32 t, t, 0x000F000F, {digits}, 0xEA;
        sub.rn.{kind} $0, t, $2;
    }}"""


@triton.constexpr_function
def _int8(p, brain, has_zeros):
    minus = "" if not has_zeros else f"sub.rn.{'bf16x2' if brain else 'f16x2'} $0, $0, $2;"
    if brain:
        # The sign makes 128 or 256, which is less than the other seven digits with 128 by the number.
        return f"""{{
            .reg .b32 t, u;
            shr.b32 t, $1, {8 * p};
            lop3.b32 u, t, 0x00800080, 0x43004300, 0xEA;
            lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA;
            sub.rn.bf16x2 $0, t, u;
            {minus}
        }}"""
    return f"""{{
        .reg .b32 t, u;
        shr.b32 t, $1, {8 * p};
        lop3.b32 t, t, 0x00FF00FF, 0x64806480, 0x6A;
        mov.b32 u, 0x64806480;
        sub.rn.f16x2 $0, t, u;
        {minus}
    }}"""


@triton.constexpr_function
def _float4(p, brain):
    # As below: a sign, two bits of exponent, one of mantissa.
    mask, kind, factor, to = ("0x01C001C0", "bf16x2", "0x7E807E80", 6) if brain else ("0x0E000E00", "f16x2", "0x74007400", 9)
    left = to - 4 * p
    return f"""{{
        .reg .b32 s, t, u;
        {"shl" if left >= 0 else "shr"}.b32 t, $1, {abs(left)};
        and.b32 t, t, {mask};
        shl.b32 s, $1, {12 - 4 * p};
        lop3.b32 t, s, 0x80008000, t, 0xEA;
        mov.b32 u, {factor};
        mul.rn.{kind} $0, t, u;
    }}"""


@triton.constexpr_function
def _float8(p, brain):
    # The same digits in the places of the wider format, whose exponents count from elsewhere.
    mask, kind, factor = ("0x07F007F0", "bf16x2", "0x7B807B80") if brain else ("0x3F803F80", "f16x2", "0x5C005C00")
    to_digits = f"shl.b32 t, $1, {4 if brain else 7};" if p == 0 else f"shr.b32 t, $1, {4 if brain else 1};"
    return f"""{{
        .reg .b32 s, t, u;
        {to_digits}
        and.b32 t, t, {mask};
        {"shl.b32 s, $1, 8;" if p == 0 else "mov.b32 s, $1;"}
        lop3.b32 t, s, 0x80008000, t, 0xEA;
        mov.b32 u, {factor};
        mul.rn.{kind} $0, t, u;
    }}"""
