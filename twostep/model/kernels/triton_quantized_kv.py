"""Into and out of quantized blocks (layout and formats: twostep/model/step/kv_quantization.py) on a GPU.

A step's new vectors are quantized where they are rotated (triton_elementwise.py, by the functions here). Prompt chunks attend to a
dense copy of their sequences' blocks, one layer at a time: a chunk has so many queries for each key that the copy costs nothing
beside them, and their kernel may be any. Decode reads the bytes themselves (triton_decode_quantized.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from twostep.model.kernels.triton_launch import follow, overlaps
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.kv_quantization import FP8_SCALES, LEAST_SCALE

_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
NUM_SCALES = tl.constexpr(FP8_SCALES)
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)


@triton.jit
def store_quantized(
    block_ptr, low, high, rest, kv_head, slot, kept,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Quantizes vectors, in the pieces that RoPE leaves them in, to a slot of the block (of one layer) at `block_ptr`.

    low, high  [rows, BLOCK_HALF]: dimensions from 0 and from HALF on, HALF of each; zeros after them
    rest       [rows, BLOCK_TAIL]: TAIL more, where there are any
    kv_head    [rows, 1]: keys' heads, then values'
    kept       [rows, 1]: whether a row is stored
    """
    low, high, rest = low.to(tl.float32), high.to(tl.float32), rest.to(tl.float32)
    peak = tl.maximum(peak_of(low), peak_of(high), propagate_nan=tl.PropagateNan.ALL)
    if TAIL > 0:
        peak = tl.maximum(peak, peak_of(rest), propagate_nan=tl.PropagateNan.ALL)
    low, high, rest = _finite(low), _finite(high), _finite(rest)
    scale = _scale(peak, FP8)
    if FP8:
        finite = tl.where(peak < float("inf"), peak, 1.0)
        first = _scale(finite, FP8)
        least, best = tl.zeros_like(first), first
        for i in tl.static_range(NUM_SCALES):
            other = _scale(finite * 2.0 ** (i / NUM_SCALES), FP8)
            inverse = 1.0 / other
            error = _squared_error(low * inverse) + _squared_error(high * inverse)
            if TAIL > 0:
                error += _squared_error(rest * inverse)
            error *= (other / first) * (other / first)
            if i == 0:
                least = error
            else:
                best = tl.where(error < least, other, best)
                least = tl.minimum(error, least)
        scale = tl.where(peak < float("inf"), best, scale)
    scales = (block_ptr + 2 * HEADS * BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.int16))
    bits = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(scales + (kv_head % HEADS * BLOCK_SIZE + slot) * 2 + kv_head // HEADS, bits, mask=kept)
    d = tl.arange(0, BLOCK_HALF)[None, :]
    _store_bytes(block_ptr, low, scale, kv_head, slot, d, kept & (d < HALF), HEADS, HEAD_DIM, BLOCK_SIZE, FP8)
    _store_bytes(block_ptr, high, scale, kv_head, slot, HALF + d, kept & (d < HALF), HEADS, HEAD_DIM, BLOCK_SIZE, FP8)
    if TAIL > 0:
        d = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, :]
        _store_bytes(block_ptr, rest, scale, kv_head, slot, d, kept & (d < HEAD_DIM), HEADS, HEAD_DIM, BLOCK_SIZE, FP8)


@triton.jit
def peak_of(x):
    """Largest magnitude of each row, [rows, 1]; NaN where there is one."""
    any_nan = tl.max((x != x).to(tl.int32), 1)
    return tl.where(any_nan > 0, float("nan"), tl.max(tl.abs(x), 1))[:, None]


@triton.jit
def _finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _scale(peak, FP8: tl.constexpr):
    """Least scales of vectors whose largest magnitude is `peak`: bfloat16 numbers, in float32."""
    LIMIT: tl.constexpr = 448.0 if FP8 else 127.0
    bits = tl.maximum(tl.div_rn(peak, tl.full(peak.shape, LIMIT, tl.float32)), _LEAST_SCALE).to(tl.int32, bitcast=True)
    bits = tl.where(peak == peak, (bits + 0xFFFF) & -0x10000, _NOT_A_NUMBER)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store_bytes(
    block_ptr, x, scale, kv_head, slot, d, mask, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr
):
    """Finite numbers x [rows, N] of dimensions d [1, N]."""
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    if FP8:
        byte = e4m3_bytes(tl.clamp(scaled, -448.0, 448.0))
    else:
        # The nearest integer, ties to even, is left in the low digits.
        byte = ((tl.clamp(scaled, -127.0, 127.0) + (12582912.0 + 128.0)).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)
    inside = tl.where(kv_head < HEADS, slot * HEAD_DIM + d, slot // 4 * (4 * HEAD_DIM) + 4 * d + slot % 4)
    tl.store(block_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM) + inside, byte, mask=mask)


@triton.jit
def _rounded(x):
    """The nearest of the numbers that e4m3 has, ties to even; 448 at most goes in."""
    exponent = tl.maximum(tl.abs(x), 2.0**-6).to(tl.int32, bitcast=True) & 0x7F800000
    # What is added leaves room for three digits after the leading one.
    rounder = exponent.to(tl.float32, bitcast=True) * 1572864.0
    return (x + rounder) - rounder


@triton.jit
def _squared_error(x):
    error = _rounded(x) - x
    return tl.sum(error * error, 1)[:, None]


@triton.jit
def e4m3_bytes(x):
    """Bytes of numbers of 448 at most, by arithmetic that any GPU has."""
    magnitude = tl.abs(_rounded(x))
    normal = (magnitude.to(tl.int32, bitcast=True) >> 20) - 120 * 8
    small = (magnitude * 512.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(magnitude < 2.0**-6, small, normal) | sign).to(tl.uint8)


@triton.jit
def number_of_e4m3(byte):
    """Float16 of bytes that are no NaN: with the same digits in its own places they would be 256 times smaller."""
    wide = byte.to(tl.int16)
    return ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0


@dataclass(frozen=True, slots=True)
class DenseCopy:
    """One layer's blocks of some sequences as numbers. `cache` has a single layer; the blocks of sequence s are block_tables[s], in
    order. Slots past a sequence's end are zeros."""

    cache: KvCache
    block_tables: torch.Tensor

    @staticmethod
    def reserve(cache: KvCache, seq_lens: torch.Tensor, *, num_blocks: int, num_columns: int) -> DenseCopy:
        """Room for sequences with int32 lengths [S] that have `num_blocks` blocks together and `num_columns` at most."""
        shape = replace(cache.shape, num_blocks=max(1, num_blocks), num_layers=1, quantization="none")
        sizes = (shape.num_blocks, 1, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        memory = torch.empty(sizes, dtype=cache.dtype, device=cache.tensor.device)
        counts = (seq_lens + (shape.block_size - 1)) // shape.block_size
        starts = torch.cumsum(counts, 0, dtype=torch.int32) - counts
        tables = starts[:, None] + torch.arange(num_columns, dtype=torch.int32, device=memory.device)
        return DenseCopy(KvCache(shape, tensor=memory), tables)

    def fill(self, source: KvCache, layer: int, seq_lens: torch.Tensor, block_tables: torch.Tensor) -> None:
        """Copies the sequences' blocks of a layer of `source`; entries of int32 block_tables [S, B] that are no blocks are left out."""
        shape, quantized = source.shape, source.quantized
        assert quantized is not None
        assert block_tables.stride(1) == 1
        columns = min(block_tables.shape[1], self.block_tables.shape[1])
        target, pdl = self.cache.tensor, overlaps(source.tensor.device)
        _dequantize_kernel[(columns, 2 * shape.num_kv_heads, len(seq_lens))](
            source.tensor[:, layer], target, seq_lens, block_tables, self.block_tables, shape.num_blocks,
            block_tables.stride(0), self.block_tables.stride(0), source.tensor.stride(0), target.stride(0),
            HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim, BLOCK_D=triton.next_power_of_2(shape.head_dim),
            BLOCK_SIZE=shape.block_size, SLOTS=triton.next_power_of_2(shape.block_size), FP8=shape.quantization == "fp8",
            PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


@triton.jit
def _dequantize_kernel(
    source_ptr, target_ptr, lens_ptr, tables_ptr, target_tables_ptr, num_blocks,
    stride_table, stride_target_table, stride_source, stride_target,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        follow()
    column = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    length = tl.load(lens_ptr + seq)
    if column * BLOCK_SIZE < length:
        block = tl.load(tables_ptr + seq * stride_table + column).to(tl.int64)
        if (block >= 0) & (block < num_blocks):
            target = tl.load(target_tables_ptr + seq * stride_target_table + column).to(tl.int64)
            slot = tl.arange(0, SLOTS)[:, None]
            d = tl.arange(0, BLOCK_D)[None, :]
            base = source_ptr + block * stride_source
            is_value = kv_head >= HEADS
            inside = tl.where(is_value, slot // 4 * (4 * HEAD_DIM) + 4 * d + slot % 4, slot * HEAD_DIM + d)
            there = (slot < BLOCK_SIZE) & (column * BLOCK_SIZE + slot < length)
            byte = tl.load(base + kv_head * (BLOCK_SIZE * HEAD_DIM) + inside, mask=there & (d < HEAD_DIM), other=0)
            scales = (base + 2 * HEADS * BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.bfloat16))
            scale = tl.load(scales + (kv_head % HEADS * BLOCK_SIZE + slot) * 2 + kv_head // HEADS, mask=there, other=0.0).to(tl.float32)
            numbers = number_of_e4m3(byte).to(tl.float32) if FP8 else byte.to(tl.float32) - 128.0
            numbers = tl.where(there, numbers * scale, 0.0).to(target_ptr.dtype.element_ty)
            out = target_ptr + target * stride_target + kv_head * (BLOCK_SIZE * HEAD_DIM)
            tl.store(out + slot * HEAD_DIM + d, numbers, mask=(slot < BLOCK_SIZE) & (d < HEAD_DIM))
