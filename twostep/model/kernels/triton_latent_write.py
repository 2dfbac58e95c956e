"""What latent attention (latent.py) does with a token before it attends, in one kernel: its latent normed, its rope part and the rope parts
of all query heads rotated, and both written, the one to the pool, quantized where that is, the others where attention reads them.

    program 0 of a token     kv [latent │ rope] ──norm, rotate──▶ its slot
    program 1, 2, … of it    query heads [nope │ rope] ──rotate──▶ [rope]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostep.model.kernels.latent import LatentDims, LatentWeights
from twostep.model.kernels.triton_launch import overlaps, start_next, wait_for_previous
from twostep.model.kernels.triton_progress import store_progress
from twostep.model.kernels.triton_quantized_kv import bytes_of, chosen_scale, finite, peak_of
from twostep.model.step.kv_cache import KvCache

_HEADS = 16


def write_latent(
    query: torch.Tensor,
    turned: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: KvCache,
    layer: int,
    *,
    weights: LatentWeights,
    dims: LatentDims,
    progress: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """
    query     [T, num_heads * dims.query], rows dense
    turned    [T, num_heads, dims.rope], rows dense: where the queries' rotated parts go, such as behind absorbed ones
    kv        [T, dims.kept], rows dense: as the layer's product gave it
    positions integer [T]: rows of the tables
    slots     int64 [T]: block * block_size + slot in block; a negative one writes nothing (padding of a captured step)
    cos, sin  float32 [max_model_len, dims.rope / 2]
    progress  the word and the step's number (triton_progress.py), to say that the layers before this one are done
    """
    pool, num_heads = cache.tensor, turned.shape[1]
    assert query.stride(1) == kv.stride(1) == turned.stride(2) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert pool.stride(-1) == 1
    if not len(kv):
        return
    half, pdl = dims.rope // 2, overlaps(kv.device)
    quantized = cache.quantized
    static = None if quantized is None or quantized.static is None else quantized.static[layer]
    scales = pool if quantized is None else quantized.scales[:, layer]
    _write_kernel[(len(kv), 1 + triton.cdiv(num_heads, _HEADS))](
        query, turned, kv, weights.norm, positions, slots, cos, sin, pool[:, layer], scales, static,
        *((positions, positions) if progress is None else progress), layer, query.stride(0), *turned.stride()[:2], kv.stride(0),
        pool.stride(0), scales.stride(0), weights.eps,
        NUM_HEADS=num_heads, NOPE=dims.nope, HALF=half, BLOCK_HALF=triton.next_power_of_2(half), LATENT=dims.latent,
        BLOCK_LATENT=triton.next_power_of_2(dims.latent), BLOCK_SIZE=cache.shape.block_size, HEADS=_HEADS, INTERLEAVED=dims.interleaved,
        QUANTIZATION=cache.shape.quantization, STATIC=static is not None, TELLS=progress is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["static_ptr"])
def _write_kernel(
    query_ptr, turned_ptr, kv_ptr, norm_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, pool_ptr, scales_ptr, static_ptr,
    word_ptr, number_ptr, layer, stride_query, stride_turned, stride_head, stride_kv, stride_block, stride_scales, eps,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_LATENT: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, QUANTIZATION: tl.constexpr,
    STATIC: tl.constexpr, TELLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        # In this order, as where other keys are written: attention must not start before the plan is made.
        wait_for_previous()
        start_next()
    if TELLS and (tl.program_id(0) + tl.program_id(1) == 0):
        store_progress(word_ptr, number_ptr, layer)
    KEPT: tl.constexpr = LATENT + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + i, mask=i < HALF, other=0.0)
    if tl.program_id(1) > 0:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (head < NUM_HEADS) & (i < HALF)
        at = query_ptr + token * stride_query + head * (NOPE + 2 * HALF) + NOPE
        low, high = _load_pairs(at, i, mask, HALF, INTERLEAVED)
        to = turned_ptr + token * stride_turned + head * stride_head
        tl.store(to + i, (low * cos - high * sin).to(turned_ptr.dtype.element_ty), mask=mask)
        tl.store(to + HALF + i, (high * cos + low * sin).to(turned_ptr.dtype.element_ty), mask=mask)
        return
    slot = tl.load(slots_ptr + token).to(tl.int64)
    d = tl.arange(0, BLOCK_LATENT)[None, :]
    x = tl.load(kv_ptr + token * stride_kv + d, mask=d < LATENT, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + d, mask=d < LATENT, other=0.0).to(tl.float32)
    rounded: tl.constexpr = kv_ptr.dtype.element_ty
    x = (x * tl.rsqrt(tl.sum(x * x, 1) / LATENT + eps)[:, None] * weight).to(rounded)
    low, high = _load_pairs(kv_ptr + token * stride_kv + LATENT, i, i < HALF, HALF, INTERLEAVED)
    turned_low, turned_high = (low * cos - high * sin).to(rounded), (high * cos + low * sin).to(rounded)
    kept = (slot >= 0) & (d < LATENT)
    kept_rope = (slot >= 0) & (i < HALF)
    to = pool_ptr + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * KEPT
    if QUANTIZATION == "none":
        tl.store(to + d, x, mask=kept)
        tl.store(to + LATENT + i, turned_low, mask=kept_rope)
        tl.store(to + LATENT + HALF + i, turned_high, mask=kept_rope)
    else:
        FP8: tl.constexpr = QUANTIZATION == "fp8"
        x, a, b = x.to(tl.float32), turned_low.to(tl.float32), turned_high.to(tl.float32)
        peak = tl.maximum(peak_of(x), peak_of(a), propagate_nan=tl.PropagateNan.ALL)
        peak = tl.maximum(peak, peak_of(b), propagate_nan=tl.PropagateNan.ALL)
        x, a, b = finite(x), finite(a), finite(b)
        static = peak
        if STATIC:
            static = tl.load(static_ptr) + tl.zeros_like(peak)
        scale = chosen_scale(x, a, b, peak, static, 3, FP8, STATIC)
        bits = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        to_scale = scales_ptr.to(tl.pointer_type(tl.int16)) + (slot // BLOCK_SIZE) * stride_scales + slot % BLOCK_SIZE
        tl.store(to_scale + tl.zeros_like(scale).to(tl.int32), bits, mask=(slot >= 0) & (scale != 0.0))
        tl.store(to + d, bytes_of(x, scale, FP8), mask=kept)
        tl.store(to + LATENT + i, bytes_of(a, scale, FP8), mask=kept_rope)
        tl.store(to + LATENT + HALF + i, bytes_of(b, scale, FP8), mask=kept_rope)


@triton.jit
def _load_pairs(at, i, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both numbers of pairs i, float32."""
    if INTERLEAVED:
        low, high = tl.load(at + 2 * i, mask=mask, other=0.0), tl.load(at + 2 * i + 1, mask=mask, other=0.0)
    else:
        low, high = tl.load(at + i, mask=mask, other=0.0), tl.load(at + HALF + i, mask=mask, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)
