"""Linear layers of quantized weights on CPUs, through torch's own products of whole numbers.

    rows       int8 for each channel                             rows       int4 in groups
    1          small weights: a sum of the weight's columns      to 63      torch's kernel for few rows, in bfloat16
    to 255     oneDNN's product of 8-bit numbers                 from 64    unpacked
    from 256   unpacked, for inputs of 16 bits

Unpacked is some of a weight at a time, multiplied in x's dtype. oneDNN takes a token's numbers in parts of 8 bits, 256 · high + low, two
for 16 bits and three for float32, so that nothing is lost; where the format rounds them to 8 bits, one is enough. A token's result
depends on no other's then.

A small weight's product takes less time than what prepares it. For one row, where that is most of a step, int8 keeps such a weight once
more, by its columns; nothing else is kept twice. The operators are torch's own but not public: where they are missing, have changed, or
compute something else on this CPU, and for all other formats, weights are unpacked once and for all (Ops.prepare_quantized).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from twostep.checkpoint.held import KEPT_TWICE, PER_TOKEN
from twostep.model.kernels.quantized_weight import QuantizedWeight

Packed = torch.Tensor

# Of int4: what torch's kernel takes, the largest first. The scales are those of fewer groups then.
_GROUPS = (256, 128, 64, 32)
# Rows that int8 takes at a time: what comes between stays in the cache.
_ROWS_AT_ONCE = 64
# From so many rows on, unpacking a weight takes less time than doing without (one core with AMX), and of so many numbers at a time; int8
# for inputs of 16 bits alone, since three products of 8 bits take less than one of 32.
_UNPACK_INT4_FROM = 64
_UNPACK_INT8_FROM = 256
_UNPACKED_AT_ONCE = 1 << 19
_ROWS_TOGETHER = 64  # of an int4 weight's layout, with AVX-512; else half of it
_PACKED_AT_ONCE = 1 << 22  # bytes
_LOW_HALVES = 0x0F0F0F0F0F0F0F0F
_BASE = 256  # of parts that follow each other
_HALF = _BASE // 2  # what parts have more than the numbers they stand for


def pack(weight: QuantizedWeight, bias: torch.Tensor | None) -> Int8Linear | Int4Linear | None:
    """Returns the layer x -> x @ weight.T + bias for x [M, K]; None where none of these takes the weight."""
    rows, columns = weight.shape
    if not rows or weight.values.dtype == torch.float8_e4m3fn or weight.float4 or weight.block_rows > 1:
        return None
    if weight.bits == 8:
        takes = weight.zeros is None and weight.group >= columns and int8_works()
        return Int8Linear(weight, bias) if takes else None
    takes = _group_of(weight) > 0 and weight.activations is None and int4_rows_together() > 0
    return Int4Linear(weight, bias) if takes else None


class Int8Linear:
    """A callable x [M, K] -> [M, N], in x's dtype."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        self._packed = _pack_int8(weight.values)
        self._scales = weight.scales.flatten().contiguous()
        self._zeros = torch.zeros_like(self._scales, dtype=torch.int32)
        self._bias = bias
        self._activations = weight.activations
        self._in_one = weight.activations is not None and weight.activations.how == PER_TOKEN
        # Of bags of one row each torch's operator computes the first only.
        kept = weight.shape[1] > 1 and weight.values.numel() <= KEPT_TWICE and not self._in_one and columns_work()
        self._columns = WeightColumns(weight.values, torch.get_num_threads()) if kept else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._activations is not None and not self._in_one:
            x = self._activations(x)
        if self._in_one:
            y = self._in_8_bits(x)
        elif len(x) == 1 and self._columns is not None:
            y = self._columns(x).mul_(self._scales)
        elif len(x) <= _ROWS_AT_ONCE:
            y = self._in_parts(x)
        elif len(x) < _UNPACK_INT8_FROM or x.dtype == torch.float32:
            y = torch.cat([self._in_parts(rows) for rows in x.split(_ROWS_AT_ONCE)])
        else:
            y = self._unpacked_product(x)
        y = y.to(x.dtype)
        return y if self._bias is None else y.add_(self._bias)

    def _in_8_bits(self, x: torch.Tensor) -> torch.Tensor:
        scale = _scale(x, 127)
        return self._multiply((x / scale).round_().add_(_HALF).to(torch.uint8)).mul_(scale)

    def _in_parts(self, x: torch.Tensor) -> torch.Tensor:
        parts, scale = split(x)
        *lower, highest = self._multiply(parts).view(-1, len(x), len(self._scales))
        y: torch.Tensor = highest
        for part in reversed(lower):
            y = torch.add(part, y, alpha=_BASE)
        return y.mul_(scale)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x uint8 [M, K], _HALF more than the numbers. Returns float32 [M, N]."""
        return _multiply_int8(x, self._packed, self._scales, self._zeros)

    def _unpacked_product(self, x: torch.Tensor) -> torch.Tensor:
        columns: torch.Tensor = self._packed.to_dense()  # int8 [K, N]
        y = x.new_empty(len(x), columns.shape[1])
        at_once = max(1, _UNPACKED_AT_ONCE // len(columns))
        for start in range(0, columns.shape[1], at_once):
            rows = slice(start, start + at_once)
            y[:, rows] = x @ columns[:, rows].float().mul_(self._scales[rows]).to(x.dtype)
        return y


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uint8 [parts · M, K], the lowest parts of all rows first, and float32 [M, 1], such that x [M, K] is the parts' number to the
    base of 256 times that, each part less 128: three of float32, to one part in 2^24 of a row's largest number, two of others, to one in
    2^16."""
    parts = 3 if x.dtype == torch.float32 else 2
    # In numpy: of few numbers each of torch's operators takes several times as long.
    wide = x.float().numpy()
    scale = np.maximum(np.abs(wide).max(-1, keepdims=True) / np.float32(127 * _BASE ** (parts - 1)), np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore"):  # of a row with NaN or infinity, whose scale says so
        numbers = np.rint(wide / scale).astype("<i4")
    # With half of a part more in each place no part is negative, and the highest is rounded.
    numbers += sum(_HALF * _BASE**place for place in range(parts))
    places = numbers.view(np.uint8).reshape(*x.shape, 4)[..., :parts]
    return torch.from_numpy(np.ascontiguousarray(places.transpose(2, 0, 1))).flatten(0, 1), torch.from_numpy(scale)


def _scale(x: torch.Tensor, largest: int) -> torch.Tensor:
    """Returns float32 [M, 1], by which the largest of a row's numbers becomes `largest`; a row of zeros stays one."""
    most: torch.Tensor = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32)
    return most.div_(largest).clamp_min_(torch.finfo(torch.float32).tiny)


class WeightColumns:
    """The product with one row as the sum of an int8 weight's columns, each times a number of the row. A callable x [1, K] -> float32
    [1, N].

    The operator is that of embeddings, which adds up rows of a table in 8 bits. A row of it is a part of a column, uint8 [N / parts], then
    a scale and what is added to the scaled numbers, float32 each. Parts are computed by a thread each.
    """

    def __init__(self, values: torch.Tensor, num_threads: int) -> None:
        rows, columns = values.shape
        self._parts = parts = num_threads if rows % num_threads == 0 else 1
        numbers = (values.t().contiguous() ^ -_HALF).view(torch.uint8).view(columns * parts, rows // parts)
        ends = torch.tensor([1.0, -_HALF]).view(torch.uint8).expand(columns * parts, -1)
        self._table = torch.cat((numbers, ends), -1)
        self._index = torch.arange(columns * parts, dtype=torch.int32).view(columns, parts).t().flatten()
        self._starts = torch.arange(parts, dtype=torch.int32) * columns
        self._run = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        factors = x.float().flatten() if self._parts == 1 else x.float().expand(self._parts, -1).flatten()
        y: torch.Tensor = self._run(self._table, self._index, self._starts, False, 0, False, factors, None, False)
        return y.view(1, -1)


class Int4Linear:
    """A callable x [M, K] -> [M, N] in x's dtype; the product is in bfloat16 whatever that is."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        rows, columns = weight.shape
        self._rows = rows
        self._group = _group_of(weight)
        padding = -rows % _ROWS_TOGETHER
        # The shape in which torch takes it.
        self._packed = pack_int4(weight.values, int4_rows_together()).view(rows + padding, columns // 2)
        scales = weight.scales
        middle = torch.full_like(scales, 8.0) if weight.zeros is None else weight.zeros.float()
        # torch has w = (q - 8) · scale + zero.
        both = torch.stack((scales, (8 - middle) * scales), -1)
        both = both.repeat_interleave(weight.group // self._group, 1)[:, : columns // self._group]
        self._scales_and_zeros = F.pad(both, (0, 0, 0, 0, 0, padding)).transpose(0, 1).to(torch.bfloat16).contiguous()
        self._symmetric = weight.zeros is None
        self._bias = bias
        self._padded = padding > 0
        self._multiply = _int4_product()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= _UNPACK_INT4_FROM:
            y = self._unpacked_product(x)
        else:
            y = self._multiply(x.to(torch.bfloat16), self._packed, self._group, self._scales_and_zeros).to(x.dtype)
        if self._padded:
            y = y[:, : self._rows].contiguous()
        return y if self._bias is None else y + self._bias

    def _unpacked_product(self, x: torch.Tensor) -> torch.Tensor:
        columns, together = x.shape[1], int4_rows_together()
        blocks = self._packed.view(-1, columns, together // 2)
        y = x.new_empty(len(x), len(blocks) * together)
        at_once = max(1, _UNPACKED_AT_ONCE // (columns * together))
        for start in range(0, len(blocks), at_once):
            rows = slice(start * together, (start + at_once) * together)
            y[:, rows] = x @ self._dense(blocks[start : start + at_once], rows).to(x.dtype)
        return y

    def _dense(self, blocks: torch.Tensor, rows: slice) -> torch.Tensor:
        """These rows of the weight, uint8 [blocks, K, rows of a block / 2], as float32 [K, rows], in which torch multiplies faster."""
        scales, zeros = self._scales_and_zeros[:, rows].float().unbind(-1)
        numbers = unpack_int4(blocks).view(torch.int8).sub_(8).float()
        dense = numbers.view(len(scales), self._group, -1).mul_(scales.unsqueeze(1))
        return (dense if self._symmetric else dense.add_(zeros.unsqueeze(1))).flatten(0, 1)


def unpack_int4(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, K, n / 2], torch's layout of n rows to a block. Returns uint8 [K, blocks · n]: the weight's columns."""
    count, columns, half = blocks.shape
    numbers = torch.empty(columns, count, 2 * half, dtype=torch.uint8)
    words = blocks.view(torch.int32)  # four bytes at a time
    for place, shift in ((slice(0, half), 0), (slice(half, None), 4)):
        part = (words >> shift).bitwise_and_(0x0F0F0F0F)
        numbers[..., place].copy_(part.view(torch.uint8).permute(1, 0, 2))
    return numbers.flatten(1)


def pack_int4(values: torch.Tensor, together: int) -> torch.Tensor:
    """uint8 [N, K / 2], a QuantizedWeight's values, K a multiple of 16. Returns uint8 [blocks, K, together / 2] as unpack_int4 reads it,
    with rows of zeros up to a multiple of 64. Torch's own conversion takes six times as long, and numbers of four bytes each."""
    rows, width = values.shape
    half = together // 2
    packed = torch.empty(-(-rows // _ROWS_TOGETHER) * _ROWS_TOGETHER // together, width, 2, half, dtype=torch.uint8)
    at_once = max(1, _PACKED_AT_ONCE // (width * together))
    for start in range(0, len(packed), at_once):
        blocks = packed[start : start + at_once]
        chunk = values[start * together : (start + len(blocks)) * together]
        chunk = F.pad(chunk, (0, 0, 0, len(blocks) * together - len(chunk)))
        # Eight bytes at a time: rows of the first half in the low halves of bytes, those of the second in the high ones.
        low, high = chunk.view(torch.int64).view(len(blocks), 2, half, -1).unbind(1)
        even = (low & _LOW_HALVES) | (high & _LOW_HALVES) << 4
        odd = (low >> 4 & _LOW_HALVES) | (high & ~_LOW_HALVES)
        for place, columns in enumerate((even, odd)):
            blocks[:, :, place].copy_(columns.view(torch.uint8).transpose(1, 2))
    return packed.view(len(packed), 2 * width, half)


def _group_of(weight: QuantizedWeight) -> int:
    """Columns of a scale as torch's kernel takes them; 0: none that it takes."""
    columns = weight.shape[1]
    return next((group for group in _GROUPS if not columns % group and not weight.group % group), 0)


# ---- torch's operators ------------------------------------------------------------------------------------------------------


def _pack_int8(values: torch.Tensor) -> Packed:
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(values, None)
    return packed


def _multiply_int8(x: torch.Tensor, packed: Packed, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """x uint8 [M, K], _HALF more than the numbers. Returns float32 [M, N]."""
    run = torch.ops.onednn.qlinear_pointwise.default
    y: torch.Tensor = run(x, 1.0, _HALF, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return y


def _pack_int4(numbers: torch.Tensor) -> Packed:
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return packed


def _int4_product() -> Callable[[torch.Tensor, Packed, int, torch.Tensor], torch.Tensor]:
    product: Callable[[torch.Tensor, Packed, int, torch.Tensor], torch.Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return product


@functools.cache
def int8_works() -> bool:
    """Returns whether this build and CPU multiply whole numbers exactly. CPUs without such instructions (VNNI) may add up pairs of products
    in 16 bits, where the largest do not fit."""
    try:
        x = torch.full((3, 70), -128, dtype=torch.int8)
        x[1], x[2] = 127, torch.arange(70) - 35
        weight = torch.full((33, 70), 127, dtype=torch.int8)
        weight[1::3], weight[2::3] = -127, torch.arange(70) * 3 - 100
        packed = _pack_int8(weight.clone())
        y = _multiply_int8((x.short() + _HALF).to(torch.uint8), packed, torch.ones(33), torch.zeros(33, dtype=torch.int32))
        return torch.equal(y.long(), x.long() @ weight.long().T) and torch.equal(packed.to_dense(), weight.t())
    except (AttributeError, RuntimeError, TypeError):
        return False


@functools.cache
def columns_work() -> bool:
    """Returns whether this build adds up a table's rows as WeightColumns wants them."""
    try:
        weight = (torch.arange(66 * 40) % 256 - _HALF).to(torch.int8).view(66, 40)
        x = torch.arange(40.0).view(1, 40) - 13
        return all(torch.equal(WeightColumns(weight, threads)(x), x @ weight.float().T) for threads in (1, 2))
    except (AttributeError, RuntimeError, TypeError):
        return False


@functools.cache
def int4_rows_together() -> int:
    """Returns how many rows of a weight this build's layout of int4 has together; 0: it has another layout, or computes something else."""
    try:
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randint(0, 16, (128, 64), generator=generator, dtype=torch.int32)
        packed = _pack_int4(numbers)
        scales = torch.stack((torch.full((2, 128), 0.25), torch.full((2, 128), 0.5)), -1).to(torch.bfloat16)
        y = _int4_product()(torch.eye(64, dtype=torch.bfloat16), packed, 32, scales)
        if not torch.equal(y.float(), ((numbers - 8) * 0.25 + 0.5).T):
            return 0
        for together in (_ROWS_TOGETHER, _ROWS_TOGETHER // 2):
            if torch.equal(unpack_int4(packed.view(-1, 64, together // 2)), numbers.T):
                values = (numbers[:, ::2] | numbers[:, 1::2] << 4).to(torch.uint8)
                return together if torch.equal(pack_int4(values, together).flatten(), packed.flatten()) else 0
    except (AttributeError, RuntimeError, TypeError):
        pass
    return 0
