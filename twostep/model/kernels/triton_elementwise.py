"""The operations between matrix products, as Triton kernels: norms, activation, RoPE with the KV write.

All of it is bound by memory: each kernel reads its inputs once, computes in float32, and writes its outputs once. The oracle of each
is the method of the same name in Ops.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.ops import Activation
from twostep.model.kernels.triton_launch import follow, num_sms_of, overlaps, start_next, wait_for_previous
from twostep.model.kernels.triton_progress import store_progress
from twostep.model.kernels.triton_quantized_input import INPUT_GROUP, RoundedInput, round_arguments, round_constants, store_rounded
from twostep.model.kernels.triton_quantized_kv import store_int4, store_quantized, write_values
from twostep.model.kernels.triton_sum64 import mix_vectors
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.kv_sums import HEADS_PER_PROGRAM

# Elements of a program's tile: enough independent loads per thread to keep memory busy, few enough to fill the chip with rows.
_TILE = 4096
_NORM_WARPS = 8
_ROTATE_WARPS = 4
# Of quantized vectors, which take longer than the memory does: one a warp.
_QUANTIZED_HEADS = 4
# Rows from which on quantized values are written by a kernel of their own: prompts, whose rows lie together.
_VALUES_APART = 512
_GATE_TILE = 1024
_GATE_WARPS = 4


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, float32 inside. x [T, N] or [T, H, N] with a dense last dimension (others are copied
    first), weight [N], here and below perhaps float32 where x is not. Returns a new dense tensor."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.contiguous().view(-1, x.shape[-1])
    _launch_norm(x, x, weight, out, eps, has_residual=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, first_weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds x to `residual` in place, rounded to its dtype, and returns rms_norm(residual). x, residual [T, N], dense; weight [N].
    x may also be float32 [parts, T, N]: their sum is added. With `first_weight` [N] what is added is rms_norm(x, first_weight)."""
    out = torch.empty_like(residual)
    _launch_norm(_checked(x, residual), residual, weight, out, eps, has_residual=True, first_weight=first_weight)
    return out


def add_rms_norm_rounded(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    how: InputQuantizer,
    *,
    first_weight: torch.Tensor | None = None,
) -> RoundedInput:
    """The same, rounded for the product that comes next; its result in 16 bits is never written."""
    out = RoundedInput.empty(len(residual), residual.shape[1], how, residual.device)
    _launch_norm(_checked(x, residual), residual, weight, out, eps, has_residual=True, how=how, first_weight=first_weight)
    return out


def add_rms_norm_beside(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    how: InputQuantizer,
    *,
    first_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, RoundedInput]:
    """Both of them, for two products of which one rounds its input."""
    kept, out = torch.empty_like(residual), RoundedInput.empty(len(residual), residual.shape[1], how, residual.device)
    _launch_norm(_checked(x, residual), residual, weight, out, eps, has_residual=True, how=how, first_weight=first_weight, kept=kept)
    return kept, out


def _checked(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    assert residual.is_contiguous()
    assert x.shape[-2:] == residual.shape[-2:]
    assert x.shape == residual.shape or (x.dim() == 3 and x.dtype == torch.float32)
    return x.contiguous()


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return gate(gate_up, "silu")


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up, rounded once. gate_up [T, 2 * N], dense, gate first. Returns [T, N]."""
    assert gate_up.is_contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    if out.numel():
        rows = out.numel() // width
        pdl = overlaps(out.device)
        _gate_kernel[(rows, triton.cdiv(width, _GATE_TILE))](
            gate_up, out, width, ACTIVATION=activation, BLOCK=_GATE_TILE, PDL=pdl, num_warps=_GATE_WARPS, launch_pdl=pdl
        )
    return out


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each head of the queries and of the keys: weights [D], dense."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float


def rotate_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: KvCache,
    layer: int,
    num_heads: int,
    progress: tuple[torch.Tensor, torch.Tensor] | None = None,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Rotates the query and key heads of `qkv` in place, writes the rotated keys and the values to the pool, and returns qkv. Where the
    pool keeps checksums, those of the slots written are kept right. `progress`: the word and the step's number (triton_progress.py), to say
    that the layers before this one are done. `norms`: each head is normed first, and rounded, as Ops.norm_heads does it.

    qkv       [T, (num_heads + 2 * num_kv_heads) * D], dense
    positions integer [T]: rows of the tables
    slots     int64 [T]: block * block_size + slot in block; a negative one writes nothing (padding of a captured step)
    cos, sin  float32 [max_model_len, R / 2], R <= D even (or 0): the first R of a head's D numbers turn in pairs (i, i + R / 2)
    """
    shape, pool = cache.shape, cache.tensor
    total_heads = num_heads + 2 * shape.num_kv_heads
    half = cos.shape[1]
    assert qkv.is_contiguous()
    assert qkv.shape[1] == total_heads * shape.head_dim
    assert pool.stride(-1) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert norms is None or norms.queries.shape == norms.keys.shape == (shape.head_dim,)
    if not len(qkv):
        return qkv
    tail = shape.head_dim - 2 * half
    pdl = overlaps(qkv.device)
    sums = cache.sums
    static = None if cache.quantized is None or cache.quantized.static is None else cache.quantized.static[layer]
    assert sums is None or sums.kept_by_steps(num_heads, 2 * half)
    apart = cache.quantized is not None and shape.quantization != "int4" and len(qkv) >= _VALUES_APART
    written_heads = total_heads - shape.num_kv_heads if apart else total_heads
    heads = HEADS_PER_PROGRAM if cache.quantized is None else _QUANTIZED_HEADS
    _rotate_and_write_kernel[(len(qkv), triton.cdiv(written_heads, heads))](
        qkv, positions, slots, cos, sin, pool[:, layer], pool.stride(0),
        *(pool.stride()[2:5] if cache.quantized is None else cache.quantized.strides),
        *((pool, 0, 0) if sums is None else (sums.tensor[:, layer], sums.tensor.stride(0), layer * sums.layer_words)),
        *((positions, positions) if progress is None else progress), layer, static,
        *((qkv, qkv, 0.0) if norms is None else (norms.queries, norms.keys, norms.eps)),
        NUM_HEADS=num_heads, NUM_KV_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim, BLOCK_SIZE=shape.block_size,
        QUANTIZATION=shape.quantization, HALF=half, BLOCK_HALF=triton.next_power_of_2(max(half, 1)), TAIL=tail,
        BLOCK_TAIL=triton.next_power_of_2(max(tail, 1)), BLOCK_D=triton.next_power_of_2(shape.head_dim), HEADS=heads,
        SUM_PARTS=0 if sums is None else sums.num_parts, TELLS=progress is not None, STATIC=static is not None, VALUES_APART=apart,
        NORMED=norms is not None, PDL=pdl, num_warps=_ROTATE_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    if apart:
        write_values(qkv, slots, cache, layer, num_heads)
    return qkv


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | RoundedInput,
    eps: float,
    *,
    has_residual: bool,
    how: InputQuantizer | None = None,
    first_weight: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> None:
    """`kept`: where the result goes as it is, too, if `out` is rounded."""
    width = x.shape[-1]
    for each in (weight, weight if first_weight is None else first_weight):
        assert each.shape == (width,)
        assert each.is_contiguous()
    if not x.numel():
        return
    values = out.values if isinstance(out, RoundedInput) else out
    rounding = (values, values, values) if how is None or not isinstance(out, RoundedInput) else round_arguments(out, how)
    constants = {"STATIC": False, "GROUPS": False, "HARDWARE": False} if how is None else round_constants(how)
    rows = values.numel() // width
    parts = x.numel() // values.numel()
    # Row r starts at (r // inner) * stride_outer + (r % inner) * stride_inner: heads of a fused projection need no copy.
    heads = x.dim() == 3 and parts == 1
    inner = x.shape[1] if heads else 1
    block = triton.next_power_of_2(width if how is None else max(width, INPUT_GROUP))
    # Few rows: one to a program, so that each waits for few loads.
    rows_at_once = max(1, min(_TILE // block, rows // num_sms_of(x.device)))
    rows_at_once = 1 << rows_at_once.bit_length() - 1
    pdl = overlaps(x.device)
    _norm_kernel[(triton.cdiv(rows, rows_at_once),)](
        x, residual, first_weight, weight, *rounding, kept, rows, inner, x.stride(0 if heads else -2) if x.dim() > 1 else 0,
        x.stride(1) if heads else 0, eps, values.numel(), PARTS=parts, WIDTH=width, BLOCK=block, ROWS=rows_at_once,
        HAS_RESIDUAL=has_residual, NORMS_FIRST=first_weight is not None, ROUNDS=how is not None, KEEPS=kept is not None,
        **constants, PDL=pdl,
        num_warps=_NORM_WARPS if block >= 4096 else 4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _norm_kernel(
    x_ptr, residual_ptr, first_ptr, weight_ptr, out_ptr, scales_ptr, static_ptr, kept_ptr, rows, inner, stride_outer, stride_inner,
    eps, numel,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    NORMS_FIRST: tl.constexpr, ROUNDS: tl.constexpr, KEEPS: tl.constexpr, STATIC: tl.constexpr, GROUPS: tl.constexpr,
    HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (col < WIDTH)
    dense = row * WIDTH + col
    start = (row // inner) * stride_outer + (row % inner) * stride_inner
    weight = tl.load(weight_ptr + col, mask=col < WIDTH, other=0.0)
    if NORMS_FIRST:
        first_weight = tl.load(first_ptr + col, mask=col < WIDTH, other=0.0)
    if PDL:
        follow()
    x = sum_parts(x_ptr + start + col, mask, numel, PARTS)
    if NORMS_FIRST:
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None] * first_weight.to(tl.float32)
    if HAS_RESIDUAL:
        total = (x + tl.load(residual_ptr + dense, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + dense, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    y = x * scale[:, None] * weight.to(tl.float32)
    if ROUNDS:
        y = y.to(residual_ptr.dtype.element_ty)
        if KEEPS:
            tl.store(kept_ptr + dense, y, mask=mask)
        store_rounded(y, out_ptr, scales_ptr, static_ptr, row, col, rows, WIDTH, BLOCK, ROWS, STATIC, GROUPS, HARDWARE)
    else:
        tl.store(out_ptr + dense, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_kernel(gate_up_ptr, out_ptr, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        follow()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    gate = tl.load(gate_up_ptr + row * 2 * width + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + col, (_activated(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """Of float32, as Ops.activate has it."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 u).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "relu")
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["static_ptr"])
def _rotate_and_write_kernel(
    qkv_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, pool_ptr, stride_block, stride_kv, stride_head, stride_slot,
    sums_ptr, stride_sums, layer_place, word_ptr, number_ptr, layer, static_ptr, q_norm_ptr, k_norm_ptr, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANTIZATION: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, TAIL: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr, SUM_PARTS: tl.constexpr, TELLS: tl.constexpr, STATIC: tl.constexpr, VALUES_APART: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK_HALF)[None, :]
    j = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, :]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    if NORMED:
        low_weight = _norm_weights(q_norm_ptr, k_norm_ptr, i, i < HALF, head < NUM_HEADS)
        high_weight = _norm_weights(q_norm_ptr, k_norm_ptr, HALF + i, i < HALF, head < NUM_HEADS)
        if TAIL > 0:
            rest_weight = _norm_weights(q_norm_ptr, k_norm_ptr, j, j < HEAD_DIM, head < NUM_HEADS)
    if PDL:
        # In this order: attention, which comes next, reads its plan and the block tables before it waits. It must not start before
        # the kernel that made them has ended.
        wait_for_previous()
        start_next()
    if TELLS and (tl.program_id(0) + tl.program_id(1) == 0):
        store_progress(word_ptr, number_ptr, layer)
    token = tl.program_id(0).to(tl.int64)
    exists = head < NUM_HEADS + (1 if VALUES_APART else 2) * NUM_KV_HEADS
    turns = head < NUM_HEADS + NUM_KV_HEADS
    row = (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM

    # Both halves of a pair lie in one thread, which stores to where it alone has loaded: in place without a barrier. They are asked
    # for before the position and the slot, whose users have to wait.
    mask = exists & (i < HALF)
    tail_mask = exists & (j < HEAD_DIM)
    low = tl.load(qkv_ptr + row + i, mask=mask, other=0.0)
    high = tl.load(qkv_ptr + row + HALF + i, mask=mask, other=0.0)
    rest = low
    if TAIL > 0:
        rest = tl.load(qkv_ptr + row + j, mask=tail_mask, other=0.0)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    kept = exists & (head >= NUM_HEADS) & (slot >= 0)
    kv_head = head - NUM_HEADS  # keys, then values
    to_pool = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    to_pool += (kv_head // NUM_KV_HEADS).to(tl.int64) * stride_kv + (kv_head % NUM_KV_HEADS).to(tl.int64) * stride_head
    cos = tl.load(cos_ptr + position * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + i, mask=i < HALF, other=0.0)
    if NORMED:
        squares = _squares(low) + _squares(high)
        if TAIL > 0:
            squares += _squares(rest)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low = tl.where(turns, (low.to(tl.float32) * scale * low_weight).to(low.dtype), low)
        high = tl.where(turns, (high.to(tl.float32) * scale * high_weight).to(low.dtype), high)
        if TAIL > 0:
            rest = tl.where(turns, (rest.to(tl.float32) * scale * rest_weight).to(low.dtype), rest)
            tl.store(qkv_ptr + row + j, rest, mask=tail_mask & turns)
    turned_low = tl.where(turns, low.to(tl.float32) * cos - high.to(tl.float32) * sin, low.to(tl.float32)).to(low.dtype)
    turned_high = tl.where(turns, high.to(tl.float32) * cos + low.to(tl.float32) * sin, high.to(tl.float32)).to(low.dtype)
    tl.store(qkv_ptr + row + i, turned_low, mask=mask & turns)
    tl.store(qkv_ptr + row + HALF + i, turned_high, mask=mask & turns)
    if QUANTIZATION == "none":
        tl.store(pool_ptr + to_pool + i, turned_low, mask=mask & kept)
        tl.store(pool_ptr + to_pool + HALF + i, turned_high, mask=mask & kept)
    if TAIL > 0:
        if QUANTIZATION == "none":
            tl.store(pool_ptr + to_pool + j, rest, mask=kept & (j < HEAD_DIM))
    else:
        rest = turned_low
    # A program of query heads alone has nothing to keep.
    if SUM_PARTS > 0 and (tl.program_id(1) * HEADS + HEADS > NUM_HEADS):
        IN_WORD: tl.constexpr = 64 // low.dtype.primitive_bitwidth
        place = layer_place + (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * (HEAD_DIM // IN_WORD)
        total = tl.zeros((), tl.uint64)
        if HALF > 0:
            w = tl.arange(0, BLOCK_HALF // IN_WORD)[None, :]
            summed = kept & (w < HALF // IN_WORD)
            both = mix_vectors(turned_low, place, summed) + mix_vectors(turned_high, place + HALF // IN_WORD, summed)
            total += tl.sum(both)
        if TAIL > 0:
            w = tl.arange(0, BLOCK_TAIL // IN_WORD)[None, :]
            total += tl.sum(mix_vectors(rest, place + 2 * HALF // IN_WORD, kept & (w < TAIL // IN_WORD)))
        part = tl.program_id(1) - NUM_HEADS // HEADS
        to_sums = sums_ptr + (slot // BLOCK_SIZE) * stride_sums + (slot % BLOCK_SIZE) * SUM_PARTS + part
        tl.store(to_sums, total.to(tl.int64, bitcast=True), mask=slot >= 0)
    if (QUANTIZATION != "none") and (tl.program_id(1) * HEADS + HEADS > NUM_HEADS):
        block_ptr = pool_ptr + (slot // BLOCK_SIZE) * stride_block
        if QUANTIZATION == "int4":
            # Other threads have rotated what is read here.
            tl.debug_barrier()
            store_int4(block_ptr, qkv_ptr + row, kv_head, slot % BLOCK_SIZE, kept, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE)
        else:
            store_quantized(
                block_ptr, turned_low, turned_high, rest, kv_head, slot % BLOCK_SIZE, kept, static_ptr,
                HALF, BLOCK_HALF, TAIL, BLOCK_TAIL, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, QUANTIZATION == "fp8", STATIC,
            )  # fmt: skip


@triton.jit
def _norm_weights(q_ptr, k_ptr, at, mask, is_query):
    of_queries = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    of_keys = tl.load(k_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_query, of_queries, of_keys)


@triton.jit
def _squares(x):
    x = x.to(tl.float32)
    return tl.sum(x * x, axis=1)


@triton.jit
def sum_parts(at, mask, numel, PARTS: tl.constexpr):
    """Float32 sum of what lies at `at` in each of the parts, in order."""
    total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * numel.to(tl.int64), mask=mask, other=0.0)
    return total
