"""Into and out of quantized blocks (layout and formats: twostep/model/step/kv_quantization.py) on a GPU.

A step's new vectors are quantized where they are rotated (triton_elementwise.py), and prompt chunks and shared prefixes read tiles of
keys as numbers of the model's type (triton_prefill.py, triton_shared_prefix.py), by the functions here. Decode has a way of its own
(triton_decode_quantized.py), and so has Hopper's kernel for chunks (hopper_prefill_quantized.py).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from twostep.model.kernels.triton_launch import overlaps, start_next, wait_for_previous
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.kv_quantization import FP8_SCALES, LEAST_SCALE
from twostep.quantized_vector import SLOTS_TOGETHER

_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
NUM_SCALES = tl.constexpr(FP8_SCALES)
# Value heads of a program of write_values.
_VALUE_HEADS = 4
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Returns whether the device has an instruction for it; the interpreter does it too."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def store_quantized(
    block_ptr, low, high, rest, kv_head, slot, kept, static_ptr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FP8: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Quantizes vectors, in the pieces that RoPE leaves them in, to a slot of the block (of one layer) at `block_ptr`.

    low, high  [rows, BLOCK_HALF]: dimensions from 0 and from HALF on, HALF of each; zeros after them
    rest       [rows, BLOCK_TAIL]: TAIL more, where there are any
    kv_head    [rows, 1]: keys' heads, then values'
    kept       [rows, 1]: whether a row is stored
    static_ptr with STATIC: scales of the layer's heads, in their order; else each vector gets its own
    """
    low, high, rest = low.to(tl.float32), high.to(tl.float32), rest.to(tl.float32)
    peak = tl.maximum(peak_of(low), peak_of(high), propagate_nan=tl.PropagateNan.ALL)
    if TAIL > 0:
        peak = tl.maximum(peak, peak_of(rest), propagate_nan=tl.PropagateNan.ALL)
    low, high, rest = finite(low), finite(high), finite(rest)
    static = peak
    if STATIC:
        static = tl.load(static_ptr + kv_head, mask=kept, other=1.0)
    scale = chosen_scale(low, high, rest, peak, static, 3 if TAIL > 0 else 2, FP8, STATIC)
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
def store_int4(
    block_ptr, vector_ptr, kv_head, slot, kept,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The same in int4, of vectors that lie in memory: `vector_ptr` [rows, 1]. Its groups are not the pieces that RoPE leaves."""
    ROWS: tl.constexpr = vector_ptr.shape[0]
    BYTES: tl.constexpr = HEAD_DIM // 2
    WORDS: tl.constexpr = words_of_slot("int4", HEAD_DIM)
    kv_head, kept = kv_head[:, :, None], kept[:, :, None]
    # Sixteen bytes hold two groups each.
    unit = tl.arange(0, BLOCK_D // 32)[None, :, None]
    byte = unit * 16 + tl.arange(0, 16)[None, None, :]
    at = vector_ptr[:, :, None] + unit * 32 + tl.arange(0, 16)[None, None, :]
    there = kept & (byte < BYTES)
    low, high = tl.load(at, mask=there, other=0.0).to(tl.float32), tl.load(at + 16, mask=there, other=0.0).to(tl.float32)
    peak = tl.maximum(
        peak_of(tl.reshape(low, [ROWS, BLOCK_D // 2])), peak_of(tl.reshape(high, [ROWS, BLOCK_D // 2])), propagate_nan=tl.PropagateNan.ALL
    )
    scale = _scale(peak, False)[:, :, None]
    low, first = _grouped(finite(low), scale)
    high, second = _grouped(finite(high), scale)
    inside = tl.where(kv_head < HEADS, slot * BYTES + byte, slot // 4 * (4 * BYTES) + 4 * byte + slot % 4)
    tl.store(block_ptr + kv_head * (BLOCK_SIZE * BYTES) + inside, (low | high << 4).to(tl.uint8), mask=there)
    behind = (block_ptr + 2 * HEADS * BLOCK_SIZE * BYTES).to(tl.pointer_type(tl.int16))
    behind += (kv_head % HEADS * BLOCK_SIZE + slot) * (2 * WORDS) + kv_head // HEADS
    tl.store(behind, (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=kept)
    there = kept & (unit * 16 < BYTES)
    tl.store(behind + 2 + 4 * unit, first.to(tl.int16), mask=there)
    tl.store(behind + 4 + 4 * unit, second.to(tl.int16), mask=there)


@triton.jit
def _grouped(x, scale):
    """Numbers of 0 to 15 of each group of finite x [rows, units, 16], int32, and its two bytes [rows, units, 1]."""
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    scaled = tl.clamp(tl.where(scaled == scaled, scaled, 0.0), -127.0, 127.0)
    offset = _nearest(tl.min(scaled, 2)[:, :, None])
    spanned = (tl.max(scaled, 2)[:, :, None] - offset) * 8.0
    # A product would become one with the sum that rounds it.
    step = tl.maximum(_nearest(tl.div_rn(spanned, tl.full(spanned.shape, 15.0, tl.float32))), 1.0)
    number = tl.div_rn((scaled - offset) * 8.0, tl.broadcast_to(step, x.shape))
    return _nearest(tl.clamp(number, 0.0, 15.0)).to(tl.int32), step.to(tl.int32) | (offset + 128.0).to(tl.int32) << 8


@triton.jit
def _nearest(x):
    """The nearest integer, ties to even, of magnitudes below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def chosen_scale(low, high, rest, peak, static, PARTS: tl.constexpr, FP8: tl.constexpr, STATIC: tl.constexpr):
    """Scales [rows, 1] of vectors in so many parts, finite but for `peak`, their largest magnitudes: those given, or the best."""
    scale = _scale(peak, FP8)
    if STATIC:
        scale = tl.where(peak < float("inf"), static, scale)
    elif FP8:
        finite = tl.where(peak < float("inf"), peak, 1.0)
        first = _scale(finite, FP8)
        least, best = tl.full(first.shape, float("inf"), tl.float32), first
        # A loop: unrolled it is 40 KB of code, which every layer of a step has to fetch anew.
        for i in tl.range(0, NUM_SCALES):
            factor = 1.0
            for j in tl.static_range(1, NUM_SCALES):
                factor = tl.where(i == j, 2.0 ** (j / NUM_SCALES), factor)
            other = _scale(finite * factor, FP8)
            inverse = 1.0 / other
            error = _squared_error(low * inverse)
            if PARTS > 1:
                error += _squared_error(high * inverse)
            if PARTS > 2:
                error += _squared_error(rest * inverse)
            error *= (other / first) * (other / first)
            best = tl.where(error < least, other, best)
            least = tl.minimum(error, least)
        scale = tl.where(peak < float("inf"), best, scale)
    return scale


@triton.jit
def peak_of(x):
    """Largest magnitude of each row of float32, [rows, 1]; NaN where there is one: without their sign, the bits of numbers lie in the
    numbers' order, and those of a NaN behind all others."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def finite(x):
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
    byte = bytes_of(x, scale, FP8)
    inside = tl.where(kv_head < HEADS, slot * HEAD_DIM + d, slot // 4 * (4 * HEAD_DIM) + 4 * d + slot % 4)
    tl.store(block_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM) + inside, byte, mask=mask)


@triton.jit
def bytes_of(x, scale, FP8: tl.constexpr):
    """Bytes of finite numbers [rows, N] by the scale of their row."""
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    if FP8:
        return e4m3_bytes(tl.clamp(scaled, -448.0, 448.0))
    else:
        # The nearest integer, ties to even, is left in the low digits.
        return ((tl.clamp(scaled, -127.0, 127.0) + (12582912.0 + 128.0)).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


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


def write_values(qkv: torch.Tensor, slots: torch.Tensor, cache: KvCache, layer: int, num_heads: int) -> None:
    """Quantizes the value heads of many rows, the same as store_quantized does: where four rows are four slots that lie together, by whole
    words, which takes a prompt a fraction of the time of single bytes.

    qkv    [T, (num_heads + 2 * num_kv_heads) * D], dense
    slots  int32 or int64 [T]; negative: the row is not stored
    """
    shape, quantized, pool = cache.shape, cache.quantized, cache.tensor
    assert quantized is not None
    assert qkv.is_contiguous()
    static, pdl = None if quantized.static is None else quantized.static[layer], overlaps(pool.device)
    _values_kernel[(triton.cdiv(len(qkv), SLOTS_TOGETHER), triton.cdiv(shape.num_kv_heads, _VALUE_HEADS))](
        qkv, slots, pool[:, layer], static, len(qkv), pool.stride(0), num_heads,
        HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim, BLOCK_D=triton.next_power_of_2(shape.head_dim), BLOCK_SIZE=shape.block_size,
        AT_ONCE=min(_VALUE_HEADS, triton.next_power_of_2(shape.num_kv_heads)), FP8=shape.quantization == "fp8",
        STATIC=static is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr", "static_ptr"])
def _values_kernel(
    qkv_ptr, slots_ptr, pool_ptr, static_ptr, num_rows, stride_block, num_heads,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
    FP8: tl.constexpr, STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Takes four rows, and with each that is the first of its four slots, or begins a run of slots, those of the four that follow."""
    if PDL:
        # In this order, as in the kernel that rotates.
        wait_for_previous()
        start_next()
    for i in tl.range(0, 4):
        row = tl.program_id(0) * 4 + i
        slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
        before = tl.load(slots_ptr + row - 1, mask=(row > 0) & (row < num_rows), other=-2).to(tl.int64)
        if (slot >= 0) & ((slot % 4 == 0) | (before != slot - 1)):
            head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
            d = tl.arange(0, BLOCK_D)[None, :]
            real = (head < HEADS) & (d < HEAD_DIM)
            block_ptr = pool_ptr + slot // BLOCK_SIZE * stride_block
            scales = (block_ptr + 2 * HEADS * BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.int16))
            first = slot - slot % 4
            word = tl.zeros([AT_ONCE, BLOCK_D], tl.int32)
            count = num_rows * 0
            for t in tl.static_range(4):
                other = row + (first + t - slot)
                there = (first + t >= slot) & (other < num_rows)
                there = there & (tl.load(slots_ptr + other, mask=there, other=-2).to(tl.int64) == first + t)
                count += there.to(tl.int32)
                at = (other * (num_heads + 2 * HEADS) + num_heads + HEADS + head) * HEAD_DIM + d
                x = tl.load(qkv_ptr + at, mask=real & there, other=0.0).to(tl.float32)
                peak = peak_of(x)
                x = finite(x)
                static = peak
                if STATIC:
                    static = tl.load(static_ptr + HEADS + head, mask=head < HEADS, other=1.0)
                scale = chosen_scale(x, x, x, peak, static, 1, FP8, STATIC)
                bits = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
                slot_scales = scales + (head * BLOCK_SIZE + (first + t) % BLOCK_SIZE) * 2 + 1
                tl.store(slot_scales, bits, mask=(head < HEADS) & there)
                word |= bytes_of(x, scale, FP8).to(tl.int32) << (8 * t)
            inside = (HEADS + head) * (BLOCK_SIZE * HEAD_DIM) + first % BLOCK_SIZE * HEAD_DIM + 4 * d
            if count == 4:
                tl.store((block_ptr + inside).to(tl.pointer_type(tl.int32)), word, mask=real)
            else:
                for t in tl.static_range(4):
                    other = row + (first + t - slot)
                    there = (first + t >= slot) & (other < num_rows)
                    there = there & (tl.load(slots_ptr + other, mask=there, other=-2).to(tl.int64) == first + t)
                    tl.store(block_ptr + inside + t, ((word >> (8 * t)) & 0xFF).to(tl.uint8), mask=real & there)


@triton.constexpr_function
def words_of_slot(format, head_dim):
    """Returns the words behind a pool's numbers that a slot of a head has: its two scales, and those of its groups."""
    return 1 + head_dim // 16 if format == "int4" else 1


@triton.jit
def load_quantized(
    k_ptr, v_ptr, words_ptr, table_ptr, start, end, stride_block, stride_words,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
    CONVERTS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK_N, BLOCK_D] from key `start` on, a multiple of 4, as numbers of `dtype`; zeros from `end` on.

    k_ptr, v_ptr, words_ptr  of a head, in the first block of the layer: bytes, and both scales of a slot
    table_ptr                blocks of the sequence
    FORMAT                   fp8, int8 or int4; CONVERTS: the device has an instruction for fp8
    """
    if FORMAT == "int4":
        return _load_int4(
            k_ptr, v_ptr, words_ptr, table_ptr, start, end, stride_block, stride_words, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, dtype
        )
    else:
        return _load_bytes(
            k_ptr, v_ptr, words_ptr, table_ptr, start, end, stride_block, stride_words,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_N, FORMAT, CONVERTS, dtype,
        )  # fmt: skip


@triton.jit
def _load_bytes(
    k_ptr, v_ptr, words_ptr, table_ptr, start, end, stride_block, stride_words,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
    CONVERTS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    key = start + tl.arange(0, BLOCK_N)
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    words = tl.load(words_ptr + block * stride_words + key % BLOCK_SIZE, mask=key < end, other=0)
    d = tl.arange(0, BLOCK_D)[None, :]
    k_at = block * stride_block + key % BLOCK_SIZE * HEAD_DIM
    k = tl.load(k_ptr + k_at[:, None] + d, mask=(key < end)[:, None] & (d < HEAD_DIM), other=0)
    # Four values of one dimension lie beside each other.
    four = start + 4 * tl.arange(0, BLOCK_N // 4)
    block = tl.load(table_ptr + four // BLOCK_SIZE, mask=four < end, other=0).to(tl.int64)
    v_at = block * stride_block + four % BLOCK_SIZE * HEAD_DIM
    d = tl.arange(0, 4 * BLOCK_D)[None, :]
    v = tl.load(v_ptr + v_at[:, None] + d, mask=(four < end)[:, None] & (d < 4 * HEAD_DIM), other=0)
    v = tl.reshape(tl.permute(tl.reshape(v, [BLOCK_N // 4, BLOCK_D, 4]), (0, 2, 1)), [BLOCK_N, BLOCK_D])
    k_scale = (words << 16).to(tl.float32, bitcast=True)[:, None]
    v_scale = (words & -65536).to(tl.float32, bitcast=True)[:, None]
    return (numbers_of(k, FORMAT, CONVERTS) * k_scale).to(dtype), (numbers_of(v, FORMAT, CONVERTS) * v_scale).to(dtype)


@triton.jit
def _load_int4(
    k_ptr, v_ptr, words_ptr, table_ptr, start, end, stride_block, stride_words,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = HEAD_DIM // 2
    UNITS: tl.constexpr = BLOCK_D // 32
    key = start + tl.arange(0, BLOCK_N)
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    words_ptr += block * stride_words + key % BLOCK_SIZE * words_of_slot("int4", HEAD_DIM)
    words = tl.load(words_ptr, mask=key < end, other=0)
    unit = tl.arange(0, UNITS)[None, :]
    there = (key < end)[:, None] & (unit * 16 < BYTES)
    first = tl.load(words_ptr[:, None] + 1 + 2 * unit, mask=there, other=0)
    second = tl.load(words_ptr[:, None] + 2 + 2 * unit, mask=there, other=0)
    byte = tl.arange(0, BLOCK_D // 2)[None, :]
    k_at = block * stride_block + key % BLOCK_SIZE * BYTES
    k = tl.load(k_ptr + k_at[:, None] + byte, mask=(key < end)[:, None] & (byte < BYTES), other=0)
    k = tl.reshape(k, [BLOCK_N, UNITS, 16])
    four = start + 4 * tl.arange(0, BLOCK_N // 4)
    block = tl.load(table_ptr + four // BLOCK_SIZE, mask=four < end, other=0).to(tl.int64)
    byte = tl.arange(0, 2 * BLOCK_D)[None, :]
    v_at = block * stride_block + four % BLOCK_SIZE * BYTES
    v = tl.load(v_ptr + v_at[:, None] + byte, mask=(four < end)[:, None] & (byte < 4 * BYTES), other=0)
    v = tl.reshape(tl.permute(tl.reshape(v, [BLOCK_N // 4, UNITS, 16, 4]), (0, 3, 1, 2)), [BLOCK_N, UNITS, 16])
    k_scale = (words << 16).to(tl.float32, bitcast=True)[:, None]
    v_scale = (words & -65536).to(tl.float32, bitcast=True)[:, None]
    k = _numbers_of_units(k, first, second) * k_scale
    return k.to(dtype), (_numbers_of_units(v, first >> 16, second >> 16) * v_scale).to(dtype)


@triton.jit
def _numbers_of_units(byte, first, second):
    """Float32 [keys, dimensions] of bytes [keys, units, 16] by the groups [keys, units] of their low and their high halves."""
    low = (byte & 15).to(tl.float32) * step_of(first)[:, :, None] + offset_of(first)[:, :, None]
    high = (byte >> 4).to(tl.float32) * step_of(second)[:, :, None] + offset_of(second)[:, :, None]
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), [byte.shape[0], byte.shape[1] * 32])


@triton.jit
def step_of(group):
    """Float32 of groups that lie in the low halves of words."""
    return (group & 0xFF).to(tl.float32) * 0.125


@triton.jit
def offset_of(group):
    return ((group >> 8) & 0xFF).to(tl.float32) - 128.0


@triton.jit
def numbers_of(byte, FORMAT: tl.constexpr, CONVERTS: tl.constexpr):
    """Float32 of bytes, without their scales."""
    if FORMAT == "int8":
        return byte.to(tl.float32) - 128.0
    elif CONVERTS:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return number_of_e4m3(byte).to(tl.float32)
