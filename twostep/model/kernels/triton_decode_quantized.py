"""Decode attention's inner loop over quantized blocks (layout in twostep/model/step/kv_quantization.py).

Queries stand in columns: scores [keys, queries] = K @ q', values [head_dim, queries] = V' @ weights. The bytes are then the left operand
of both products, whose 16 rows they fill, where few queries would leave rows of padding: half the products and half the
accumulators. Bytes become float16, which holds all of either format; nothing else is done to a tile, since

    scores   take the keys' scales, and the queries', which are brought below 2 by a power of 2 before they become float16: nothing is
             lost of a bfloat16's digits
    weights  take the values' scales before they become float16: the running maximum is that of score + exponent of the value's scale,
             so that they are below 2, whatever the scales. Sum and values shrink by the same maximum, so parts merge as elsewhere

Of int4, sixteen bytes of a key (a unit: two groups of dimensions, one in the low and one in the high halves) make products of their
own, as a lane does: [units · lanes, keys, 16] @ [units · lanes, 16, queries], twice. Scores take the step of their group, and its offset
times the sum of the queries' numbers, and are summed over the units. Values take both before their products: float16 holds them exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twostep.model.kernels.triton_decode_plan import load_blocks, sum_first
from twostep.model.kernels.triton_quantized_kv import number_of_e4m3, offset_of, step_of, words_of_slot
from twostep.model.kernels.triton_scores import capped

# Four bytes as float16: 0x64 before a byte makes 1024 + the byte. Of their low or their high four bits.
_HALVES = """{
    .reg .b32 a, b, c;
    shr.b32 a, $2, SHIFT;
    and.b32 a, a, 0x0f0f0f0f;
    prmt.b32 b, a, 0x64646464, 0x4342;
    prmt.b32 a, a, 0x64646464, 0x4140;
    mov.b32 c, 0x64006400;
    sub.f16x2 $0, a, c;
    sub.f16x2 $1, b, c;
}"""
_LOW_HALVES, _HIGH_HALVES = tl.constexpr(_HALVES.replace("SHIFT", "0")), tl.constexpr(_HALVES.replace("SHIFT", "4"))
# Both scales of a key that is not there: 1 and 1 in bfloat16.
_ONES = tl.constexpr(0x3F803F80)


@triton.jit
def attend_quantized(
    q, pool_ptr, scales_ptr, tables_ptr, stride_table, seq, block, first_head, length, tile, num_tiles, scale_log2,
    stride_block, stride_kv, stride_head, stride_scales, P: tl.constexpr,
):  # fmt: skip
    """Running maximum [heads, rows] (in units of log2), sum, and weighted values [heads, rows, block_d] over `num_tiles` tiles, of
    which the first has the numbers `block`."""
    TILE: tl.constexpr = P.lanes * P.keys
    MATRICES: tl.constexpr = P.lanes * P.heads
    INT4: tl.constexpr = P.quantization == "int4"
    WORDS: tl.constexpr = words_of_slot(P.quantization, P.head_dim)
    # Bytes of a key, in units of so many.
    BYTES: tl.constexpr = P.head_dim // 2 if INT4 else P.head_dim
    UNIT: tl.constexpr = 16 if INT4 else P.block_d
    UNITS: tl.constexpr = P.block_d // 32 if INT4 else 1
    matrix = tl.arange(0, MATRICES)
    head = first_head + matrix % P.heads
    d = tl.arange(0, UNIT)[None, None, :]
    # Four keys of one dimension beside each other.
    quad_d = tl.arange(0, 4 * UNIT)[None, None, :]
    # The same of each unit.
    matrix_of, head_of = matrix, head
    if INT4:
        matrix_of = tl.arange(0, UNITS * MATRICES) % MATRICES
        head_of = first_head + matrix_of % P.heads
        unit = tl.arange(0, UNITS * MATRICES) // MATRICES
        d += (UNIT * unit)[:, None, None]
        quad_d += (4 * UNIT * unit)[:, None, None]
    head_at = head_of.to(tl.int64) * stride_head
    k_inside = tl.arange(0, P.keys)[None, :, None] * BYTES + d
    v_inside = tl.arange(0, P.keys // 4)[None, :, None] * (4 * BYTES) + quad_d
    peak = (tl.max(tl.abs(q.to(tl.float32)), 2).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    peak = tl.where(peak > 0, peak, 1.0)
    scaled = (q.to(tl.float32) / peak[:, :, None]).to(tl.float16)
    if P.in_float32:
        scaled = scaled.to(tl.float32)
    if INT4:
        # [units · lanes, 16, queries] of the dimensions in low halves, and in high ones, in the order that keys take below.
        scaled = tl.permute(tl.reshape(scaled, [MATRICES, P.rows, UNITS, 2, 2, 2, 4]), (2, 0, 5, 4, 6, 1, 3))
        columns, high_columns = tl.split(tl.reshape(scaled, [UNITS * MATRICES, 16, P.rows, 2]))
        sums_of, high_sums_of = tl.sum(columns.to(tl.float32), 1)[:, None, :], tl.sum(high_columns.to(tl.float32), 1)[:, None, :]
    else:
        columns = tl.permute(scaled, (0, 2, 1))
    row_scale = peak * scale_log2
    best = tl.full([MATRICES, P.rows], -1e38, tl.float32)
    total = tl.full([MATRICES, P.keys, P.rows], 0.0, tl.float32)
    acc = tl.full([UNITS * MATRICES, UNIT, P.rows], 0.0, tl.float32)
    high_acc = acc
    key = tile * TILE + matrix // P.heads * P.keys
    if INT4:
        unit_key = tile * TILE + matrix_of // P.heads * P.keys
    for i in tl.range(0, num_tiles):
        next_block = load_blocks(tables_ptr, stride_table, seq, tile + i + 1, length, i + 1 < num_tiles, P)
        inside = key % P.block_size
        key_of = unit_key if INT4 else key
        block_of = _for_units(block, UNITS).to(tl.int64)
        at = block_of * stride_block + head_at + key_of % P.block_size * BYTES
        each_key = key[:, None] + tl.arange(0, P.keys)[None, :]
        seen = each_key < length
        if P.window > 0:
            seen = seen & (each_key >= length - P.window)
        words_at = block.to(tl.int64) * stride_scales + head * (P.block_size * WORDS) + inside * WORDS
        words = tl.load(scales_ptr + words_at[:, None] + tl.arange(0, P.keys)[None, :] * WORDS, mask=seen, other=_ONES)
        # Whatever bytes a slot not yet written holds, their weight is 0 and they are finite.
        there = (key_of < length)[:, None, None]
        k = tl.load(pool_ptr + at[:, None, None] + k_inside, mask=there & (d < BYTES), other=0)
        v = tl.load(pool_ptr + (at + stride_kv)[:, None, None] + v_inside, mask=there & (quad_d < 4 * BYTES), other=0)
        k_scale = (words << 16).to(tl.float32, bitcast=True)
        v_scale = (words & -65536).to(tl.float32, bitcast=True)
        if INT4:
            groups_at = block_of * stride_scales + (head_of * P.block_size + key_of % P.block_size) * WORDS + 1 + 2 * unit
            groups_at = groups_at[:, None] + tl.arange(0, P.keys)[None, :] * WORDS
            grouped = (key_of < length)[:, None] & (unit * UNIT < BYTES)[:, None]
            first = tl.load(scales_ptr + groups_at, mask=grouped, other=0)
            second = tl.load(scales_ptr + groups_at + 1, mask=grouped, other=0)
            # In another order: without one, Triton 3.6 keeps tiles of keys in registers instead of copying them to shared memory ahead.
            k = tl.permute(tl.reshape(k, [UNITS * MATRICES, P.keys, 2, 2, 4]), (0, 1, 3, 2, 4))
            k = tl.reshape(k, [UNITS * MATRICES, P.keys, 16])
            score = tl.dot(_halves(k, False, P), columns, input_precision="ieee") * step_of(first)[:, :, None]
            score += tl.dot(_halves(k, True, P), high_columns, input_precision="ieee") * step_of(second)[:, :, None]
            score += offset_of(first)[:, :, None] * sums_of + offset_of(second)[:, :, None] * high_sums_of
            score = tl.sum(tl.reshape(score, [UNITS, MATRICES, P.keys, P.rows]), 0)
        else:
            score = tl.dot(_numbers(k, P), columns, input_precision="ieee")
        score = score * k_scale[:, :, None] * row_scale[:, None, :]
        if P.softcap > 0:
            score = capped(score, P.softcap)
        score = tl.where(seen[:, :, None], score, float("-inf"))
        exponent = ((words >> 23) & 0xFF) - 127
        new_best = tl.maximum(best, tl.max(score + exponent.to(tl.float32)[:, :, None], 1))
        weight = tl.exp2(score - new_best[:, None, :])
        shrink = tl.exp2(best - new_best)
        total = total * shrink[:, None, :] + weight
        weight = weight * v_scale[:, :, None]
        if not P.in_float32:
            weight = weight.to(tl.float16)
        shrink, weight = _for_units(shrink, UNITS), _for_units(weight, UNITS)
        values = tl.permute(tl.reshape(v, [UNITS * MATRICES, P.keys // 4, UNIT, 4]), (0, 2, 1, 3))
        values = tl.reshape(values, [UNITS * MATRICES, UNIT, P.keys])
        if INT4:
            low = _of_groups(_halves(values, False, P), first >> 16)
            high = _of_groups(_halves(values, True, P), second >> 16)
            acc = tl.dot(low, weight, acc * shrink[:, None, :], input_precision="ieee")
            high_acc = tl.dot(high, weight, high_acc * shrink[:, None, :], input_precision="ieee")
        else:
            acc = tl.dot(_numbers(values, P), weight, acc * shrink[:, None, :], input_precision="ieee")
        best = new_best
        key += TILE
        if INT4:
            unit_key += TILE
        block = next_block
    sums = tl.sum(total, 1)
    if INT4:
        acc = tl.reshape(tl.join(acc, high_acc), [UNITS, MATRICES, 16, P.rows, 2])
        acc = tl.reshape(tl.permute(acc, (1, 3, 0, 4, 2)), [MATRICES, P.rows, P.block_d])
    else:
        acc = tl.permute(acc, (0, 2, 1))
    if P.lanes > 1:
        lanes_best = tl.reshape(best, [P.lanes, P.heads, P.rows])
        best = tl.max(lanes_best, 0)
        shrink = tl.exp2(lanes_best - best[None, :, :])
        sums = tl.sum(tl.reshape(sums, [P.lanes, P.heads, P.rows]) * shrink, 0)
        acc = sum_first(tl.reshape(acc, [P.lanes, P.heads, P.rows, P.block_d]) * shrink[:, :, :, None])
    return best, sums, acc


@triton.jit
def _for_units(x, UNITS: tl.constexpr):
    """x [matrices, ...] once for each unit: [units · matrices, ...]."""
    if UNITS == 1:
        return x
    else:
        each: tl.constexpr = _of_each(x.shape, UNITS)
        together: tl.constexpr = _of_all(x.shape, UNITS)
        return tl.reshape(tl.broadcast_to(tl.expand_dims(x, 0), each), together)


@triton.constexpr_function
def _of_each(shape, units):
    return [units, *shape]


@triton.constexpr_function
def _of_all(shape, units):
    return [units * shape[0], *shape[1:]]


@triton.jit
def _of_groups(x, group):
    """Numbers of 0 to 15 [units · lanes, 16, keys] by the groups [units · lanes, keys] that they are of, in the low halves of words."""
    step, offset = step_of(group)[:, None, :], offset_of(group)[:, None, :]
    return x * step.to(x.dtype) + offset.to(x.dtype)


@triton.jit
def _halves(x, HIGH: tl.constexpr, P: tl.constexpr):
    """The low or the high four bits of bytes as numbers: float16 (float32 where that is asked for)."""
    if P.in_float32:
        return ((x >> 4 if HIGH else x) & 15).to(tl.float32)
    else:
        ASM: tl.constexpr = _HIGH_HALVES if HIGH else _LOW_HALVES
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def _numbers(x, P: tl.constexpr):
    """Bytes as numbers: float16 (float32 where that is asked for), e4m3 or 128 + an integer."""
    if P.quantization == "fp8" and P.converts_fp8:
        wide = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif P.quantization == "fp8":
        wide = number_of_e4m3(x)
    elif P.in_float32:
        wide = x.to(tl.float32) - 128.0
    else:
        # 0x64 before a byte makes 1024 + the byte, in float16.
        wide = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c;
            prmt.b32 a, $2, 0x64646464, 0x4140;
            prmt.b32 b, $2, 0x64646464, 0x4342;
            mov.b32 c, 0x64806480;
            sub.f16x2 $0, a, c;
            sub.f16x2 $1, b, c;
            }""",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return wide.to(tl.float32) if P.in_float32 else wide
