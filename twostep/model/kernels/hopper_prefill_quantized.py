"""Prefill attention for Hopper over quantized blocks (layout in twostep/model/step/kv_quantization.py): hopper_prefill.py's two warp groups
of queries, and in place of the loading warp a group that makes numbers of bytes.

    four warps    pool ─cp.async→ bytes of a tile ─registers→ numbers × scales, bfloat16 ─→ the tiles of keys and values

    bytes of keys     [head_dim / 64][key, 64]       four dimensions a word ─→ [key, 64] twice as wide
    bytes of values   [key / 4, head_dim, 4]         four keys a word ─→ turned: [dimension, key], which the tensor cores take as well

While the bytes of one tile's keys become numbers those of its values are on their way, and the other way round. What is behind a sequence's
end has zeros for scales.

Written in Gluon: under test on a Hopper GPU only, as hopper_prefill.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from twostep.model.kernels.hopper_prefill import attend, item_of, program_of, tile_of
from twostep.model.kernels.triton_scores import log2_scale
from twostep.model.step.kv_cache import KvCache

# Four bytes of e4m3 as two words of two bfloat16 each, times words of two scales. Sign, exponent and digits come to the places that
# bfloat16 has for them, which makes numbers 2^120 times too small.
_FP8 = gl.constexpr("""{
    .reg .b32 a, b, s, t, c;
    mov.b32 c, 0x7b807b80;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    and.b32 s, a, 0x80008000;
    and.b32 t, b, 0x80008000;
    shr.b32 a, a, 4;
    shr.b32 b, b, 4;
    lop3.b32 a, a, 0x07f007f0, s, 0xEA;
    lop3.b32 b, b, 0x07f007f0, t, 0xEA;
    mul.rn.bf16x2 a, a, c;
    mul.rn.bf16x2 b, b, c;
    mul.rn.bf16x2 $0, a, $3;
    mul.rn.bf16x2 $1, b, $4;
}""")
# Bytes 128 + an integer: 128 + the lower seven bits, less 128 or 256 by the highest one.
_INT8 = gl.constexpr("""{
    .reg .b32 a, b, s, t;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 s, a, 0x00800080, 0x43004300, 0xAE;
    lop3.b32 t, b, 0x00800080, 0x43004300, 0xAE;
    lop3.b32 a, a, 0x007f007f, 0x43004300, 0xEA;
    lop3.b32 b, b, 0x007f007f, 0x43004300, 0xEA;
    sub.rn.bf16x2 a, a, s;
    sub.rn.bf16x2 b, b, t;
    mul.rn.bf16x2 $0, a, $3;
    mul.rn.bf16x2 $1, b, $4;
}""")


def hopper_quantized_attention(
    qkv: torch.Tensor,
    out: torch.Tensor,
    cache: KvCache,
    layer: int,
    *,
    num_heads: int,
    tiles: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_programs: int,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """hopper_prefill.hopper_attention over quantized KV of a bfloat16 model. Nothing is read past a sequence's end."""
    kv, quantized = cache.shape, cache.quantized
    assert quantized is not None
    most_items = (len(tiles) - 1) * kv.num_kv_heads
    if not most_items:
        return
    assert qkv.stride(1) == 1
    assert out.is_contiguous()
    assert block_tables.stride(1) == 1
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous())
    # As words of four bytes; a layer's are a multiple of four words.
    pool, words = cache.tensor.view(torch.int32), quantized.words[:, layer]
    _attention_kernel[(min(most_items, num_programs),)](
        qkv, out, pool[:, layer], words, tiles, query_start, seq_lens, block_tables, qkv.stride(0), out.stride(0), block_tables.stride(0),
        pool.stride(0) // 4, words.stride(0), log2_scale(kv.head_dim, scale, softcap), sinks,
        P=program_of(kv, num_heads, window, softcap, sinks is not None), num_warps=4, maxnreg=168,
    )  # fmt: skip


@gluon.jit
def _copy_keys(
    staging, turn, pool_ptr, words_ptr, table_ptr, kv_head, start, end, stride_block, stride_words, P: gl.constexpr
):  # fmt: skip
    """Begins to copy the bytes of keys [start, start + P.num_keys) that are before `end`, and the scales of both, zeros from there on, to
    the places of this turn."""
    k_bytes, _, k_words, v_words = staging
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    COLUMNS: gl.constexpr = P.head_dim // 64
    NUM_KEYS: gl.constexpr = P.num_keys
    key = start + gl.arange(0, NUM_KEYS, layout=gl.SliceLayout(1, COPY))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, COPY))
    block = gl.load(table_ptr + key // P.block_size, mask=key < end, other=0).to(gl.int64)
    # In fours of words, which is what a thread copies at once.
    at = block * stride_block + (kv_head * P.block_size + key % P.block_size) * (P.head_dim // 16)
    for c in gl.static_range(COLUMNS):
        source = pool_ptr + (at * 4)[:, None] + (c * 16 + word)[None, :]
        async_copy.async_copy_global_to_shared(k_bytes.slice(c * NUM_KEYS, NUM_KEYS), source, mask=(key < end)[:, None])
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    key = start + gl.arange(0, NUM_KEYS, layout=EACH)
    source = _scales_at(words_ptr, table_ptr, kv_head, key, end, stride_words, P)
    async_copy.async_copy_global_to_shared(k_words.index(turn), source, mask=key < end)
    for place in gl.static_range(4):
        # Apart by the places among the four keys of a word of values.
        key = start + place + 4 * gl.arange(0, NUM_KEYS // 4, layout=EACH)
        source = _scales_at(words_ptr, table_ptr, kv_head, key, end, stride_words, P)
        async_copy.async_copy_global_to_shared(v_words.index(turn * 4 + place), source, mask=key < end)
    async_copy.commit_group()


@gluon.jit
def _copy_values(staging, pool_ptr, table_ptr, kv_head, start, end, stride_block, P: gl.constexpr):
    _, v_bytes, _, _ = staging
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [128 // P.head_dim, P.head_dim // 4], [4, 1], [1, 0])
    QUADS: gl.constexpr = P.num_keys // 4
    key = start + 4 * gl.arange(0, QUADS, layout=gl.SliceLayout(1, COPY))
    word = gl.arange(0, P.head_dim, layout=gl.SliceLayout(0, COPY))
    block = gl.load(table_ptr + key // P.block_size, mask=key < end, other=0).to(gl.int64)
    at = block * stride_block + ((P.num_kv_heads + kv_head) * P.block_size + key % P.block_size) * (P.head_dim // 16)
    async_copy.async_copy_global_to_shared(v_bytes, pool_ptr + (at * 4)[:, None] + word[None, :], mask=(key < end)[:, None])
    async_copy.commit_group()


@gluon.jit
def _scales_at(words_ptr, table_ptr, kv_head, key, end, stride_words, P: gl.constexpr):
    """Where both scales of each key before `end` lie in a word, that of K in its low half."""
    block = gl.load(table_ptr + key // P.block_size, mask=key < end, other=0).to(gl.int64)
    return words_ptr + block * stride_words + kv_head * P.block_size + key % P.block_size


@gluon.jit
def _scales_of(v_words, turn, place, half, LAYOUT: gl.constexpr):
    return v_words.index(turn * 4 + place).slice(half * 16, 16).load(gl.SliceLayout(1, LAYOUT))


@gluon.jit
def _convert(byte, low, high, P: gl.constexpr):
    """Words of four bytes as pairs of words of two bfloat16 [..., 2], times the scales of each word of the pair."""
    if P.fp8:
        first, second = gl.inline_asm_elementwise(_FP8, "=r,=r,r,r,r", [byte, low, high], (gl.int32, gl.int32), True, 1)
    else:
        first, second = gl.inline_asm_elementwise(_INT8, "=r,=r,r,r,r", [byte, low, high], (gl.int32, gl.int32), True, 1)
    return gl.join(first, second)


@gluon.jit
def _fill(pool_ptr, words_ptr, ring, staging, step, tables_ptr, stride_table, stride_block, stride_words, P: gl.constexpr):
    """The converting warps."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = ring
    k_bytes, v_bytes, k_words, v_words = staging
    num_items = gl.load(step[0]) * P.num_kv_heads
    COLUMNS: gl.constexpr = P.head_dim // 64
    NUM_KEYS: gl.constexpr = P.num_keys
    HEAD_DIM: gl.constexpr = P.head_dim
    HALVES: gl.constexpr = P.num_keys // 64
    # A thread takes a key, and of values some words of one dimension: what it writes then lies apart from its neighbours' by rows.
    KEYS: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [0, 1])
    VALUES: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [4, 1], [0, 1])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    count = 0
    for turn in range(0, (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)):
        item = item_of(turn)
        if item < num_items:
            kv_head, seq, _, _, _, seq_len, first_tile, num_tiles = tile_of(item, step, P)
            table_ptr = tables_ptr + seq.to(gl.int64) * stride_table
            start = (num_tiles - 1) * NUM_KEYS
            _copy_keys(
                staging, count % 2, pool_ptr, words_ptr, table_ptr, kv_head, start, seq_len, stride_block, stride_words, P
            )  # fmt: skip
            _copy_values(staging, pool_ptr, table_ptr, kv_head, start, seq_len, stride_block, P)
            for i in range(first_tile, num_tiles):
                # Past the last tile nothing is copied: before the first one, all keys are negative.
                next_end = gl.where(i + 1 < num_tiles, seq_len, -NUM_KEYS)
                stage = count % P.stages
                phase = (count // P.stages) & 1 ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                async_copy.wait_group(1)
                gl.thread_barrier()
                scale = k_words.index(count % 2).load(gl.SliceLayout(1, KEYS))
                scale = ((scale & 0xFFFF) | (scale << 16))[:, None]
                keys = k_smem.index(stage)._reinterpret(gl.int32, [COLUMNS * NUM_KEYS, 32], WORDS)
                for c in gl.static_range(COLUMNS):
                    byte = k_bytes.slice(c * NUM_KEYS, NUM_KEYS).load(KEYS)
                    keys.slice(c * NUM_KEYS, NUM_KEYS).store(_convert(byte, scale, scale, P).reshape([NUM_KEYS, 32]))
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(k_full.index(stage), count=1)
                _copy_keys(
                    staging, (count + 1) % 2, pool_ptr, words_ptr, table_ptr, kv_head, start - NUM_KEYS, next_end,
                    stride_block, stride_words, P,
                )  # fmt: skip

                mbarrier.wait(v_empty.index(stage), phase)
                async_copy.wait_group(1)
                gl.thread_barrier()
                values = v_smem.index(stage)._reinterpret(gl.int32, [HALVES * HEAD_DIM, 32], WORDS)
                for half in gl.static_range(HALVES):
                    first = _scales_of(v_words, count % 2, 0, half, VALUES)
                    second = _scales_of(v_words, count % 2, 1, half, VALUES)
                    low = (((first >> 16) & 0xFFFF) | (second & -65536))[:, None]
                    first = _scales_of(v_words, count % 2, 2, half, VALUES)
                    second = _scales_of(v_words, count % 2, 3, half, VALUES)
                    high = (((first >> 16) & 0xFFFF) | (second & -65536))[:, None]
                    byte = v_bytes.slice(half * 16, 16).load(VALUES)
                    numbers = _convert(byte, low, high, P).permute((1, 0, 2)).reshape([HEAD_DIM, 32])
                    values.slice(half * HEAD_DIM, HEAD_DIM).store(numbers)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(v_full.index(stage), count=1)
                _copy_values(staging, pool_ptr, table_ptr, kv_head, start - NUM_KEYS, next_end, stride_block, P)
                start -= NUM_KEYS
                count += 1
            # What was committed and never waited for.
            async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["stride_table"])
def _attention_kernel(
    q_ptr, out_ptr, pool_ptr, words_ptr, tiles_ptr, query_start_ptr, seq_lens_ptr, tables_ptr, stride_q, stride_out, stride_table,
    stride_block, stride_words, scale_log2, sinks_ptr, P: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = P.head_dim // 64
    STAGES: gl.constexpr = P.stages
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, 64, P.head_dim], TILE)
    k_smem = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [P.stages, COLUMNS * P.num_keys, 64], TILE)
    v_smem = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [P.stages, COLUMNS * P.num_keys, 64], TILE)
    k_bytes = gl.allocate_shared_memory(gl.int32, [COLUMNS * P.num_keys, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    v_bytes = gl.allocate_shared_memory(gl.int32, [P.num_keys // 4, P.head_dim], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    k_words = gl.allocate_shared_memory(gl.int32, [2, P.num_keys], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    v_words = gl.allocate_shared_memory(gl.int32, [8, P.num_keys // 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [P.stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    ring = (k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    staging = (k_bytes, v_bytes, k_words, v_words)
    step = (tiles_ptr, query_start_ptr, seq_lens_ptr)
    gl.warp_specialize(
        [
            (attend, (q_ptr, out_ptr, q_smem, ring, step, stride_q, stride_out, scale_log2, sinks_ptr, 0, P)),
            (attend, (q_ptr, out_ptr, q_smem, ring, step, stride_q, stride_out, scale_log2, sinks_ptr, 1, P)),
            (_fill, (pool_ptr, words_ptr, ring, staging, step, tables_ptr, stride_table, stride_block, stride_words, P)),
        ],
        [4, 4],
        [208, 88],
    )
