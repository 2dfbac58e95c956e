"""Decode attention's inner loop over quantized blocks (layout in twostep/model/step/kv_quantization.py).

Queries stand in columns: scores [keys, queries] = K @ q', values [head_dim, queries] = V' @ weights. The bytes are then the left operand
of both products, whose 16 rows they fill, where few queries would leave rows of padding: half the products and half the
accumulators. Bytes become float16, which holds all of either format; nothing else is done to a tile, since

    scores   take the keys' scales, and the queries', which are brought below 2 by a power of 2 before they become float16: nothing is
             lost of a bfloat16's digits
    weights  take the values' scales before they become float16: the running maximum is that of score + exponent of the value's scale,
             so that they are below 2, whatever the scales. Sum and values shrink by the same maximum, so parts merge as elsewhere
"""

from __future__ import annotations

import triton
import triton.language as tl

from twostep.model.kernels.triton_decode_plan import load_blocks, sum_first
from twostep.model.kernels.triton_quantized_kv import number_of_e4m3
from twostep.model.kernels.triton_scores import capped

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
    matrix = tl.arange(0, MATRICES)
    head = first_head + matrix % P.heads
    head_at = head.to(tl.int64) * stride_head
    d = tl.arange(0, P.block_d)[None, None, :]
    k_inside = tl.arange(0, P.keys)[None, :, None] * P.head_dim + d
    # Four keys of one dimension beside each other.
    quad_d = tl.arange(0, 4 * P.block_d)[None, None, :]
    v_inside = tl.arange(0, P.keys // 4)[None, :, None] * (4 * P.head_dim) + quad_d
    peak = (tl.max(tl.abs(q.to(tl.float32)), 2).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    peak = tl.where(peak > 0, peak, 1.0)
    columns = tl.permute((q.to(tl.float32) / peak[:, :, None]).to(tl.float16), (0, 2, 1))
    if P.in_float32:
        columns = columns.to(tl.float32)
    row_scale = peak * scale_log2
    best = tl.full([MATRICES, P.rows], -1e38, tl.float32)
    total = tl.full([MATRICES, P.keys, P.rows], 0.0, tl.float32)
    acc = tl.full([MATRICES, P.block_d, P.rows], 0.0, tl.float32)
    key = tile * TILE + matrix // P.heads * P.keys
    for i in tl.range(0, num_tiles):
        next_block = load_blocks(tables_ptr, stride_table, seq, tile + i + 1, length, i + 1 < num_tiles, P)
        inside = key % P.block_size
        at = block.to(tl.int64) * stride_block + head_at + inside * P.head_dim
        each_key = key[:, None] + tl.arange(0, P.keys)[None, :]
        seen = each_key < length
        if P.window > 0:
            seen = seen & (each_key >= length - P.window)
        words = tl.load(
            scales_ptr + (block.to(tl.int64) * stride_scales + head * P.block_size + inside)[:, None] + tl.arange(0, P.keys)[None, :],
            mask=seen,
            other=_ONES,
        )
        # Whatever bytes a slot not yet written holds, their weight is 0 and they are finite.
        there = (key < length)[:, None, None]
        k = tl.load(pool_ptr + at[:, None, None] + k_inside, mask=there & (d < P.head_dim), other=0)
        v = tl.load(pool_ptr + (at + stride_kv)[:, None, None] + v_inside, mask=there & (quad_d < 4 * P.head_dim), other=0)
        k_scale = (words << 16).to(tl.float32, bitcast=True)
        v_scale = (words & -65536).to(tl.float32, bitcast=True)
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
        values = tl.reshape(tl.permute(tl.reshape(v, [MATRICES, P.keys // 4, P.block_d, 4]), (0, 2, 1, 3)), [MATRICES, P.block_d, P.keys])
        acc = tl.dot(_numbers(values, P), weight, acc * shrink[:, None, :], input_precision="ieee")
        best = new_best
        key += TILE
        block = next_block
    sums = tl.sum(total, 1)
    acc = tl.permute(acc, (0, 2, 1))
    if P.lanes > 1:
        lanes_best = tl.reshape(best, [P.lanes, P.heads, P.rows])
        best = tl.max(lanes_best, 0)
        shrink = tl.exp2(lanes_best - best[None, :, :])
        sums = tl.sum(tl.reshape(sums, [P.lanes, P.heads, P.rows]) * shrink, 0)
        acc = sum_first(tl.reshape(acc, [P.lanes, P.heads, P.rows, P.block_d]) * shrink[:, :, :, None])
    return best, sums, acc


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
