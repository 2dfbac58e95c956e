"""Latent attention of prompt chunks with keys and values made (latent.py, "expanded"): a third of the multiplications of the absorbed way.

1. the chunks' latents, those of their whole context, gathered out of the pool        kept [K, latent │ rope]
2. one product with W_UK over W_UV                                                    made [K, head, nope │ value]
3. one program = a tile of a sequence's queries x a head, online softmax over the head's keys

Both are scratch of a fixed size, which layers use one after the other; chunks with more keys in all attend absorbed. Not for captured
steps, whose numbers of keys are not known when they are captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from twostep.model.kernels.latent import LatentDims, LatentWeights, expands
from twostep.model.kernels.step_upload import StepUpload
from twostep.model.kernels.triton_launch import shared_bytes_of
from twostep.model.kernels.triton_prefill import TileShape, plan_tiles
from twostep.model.kernels.triton_quantized_kv import converts_fp8, numbers_of
from twostep.model.kernels.triton_scores import log2_scale
from twostep.model.step.kv_cache import KvCache

# Of the scratch: 28,000 keys of DeepSeek-V2-Lite.
_BYTES = 256 << 20
_GATHERED = 16


class ExpandedScratch:
    """Memory of one stream's steps, of `num_keys` keys."""

    def __init__(self, dims: LatentDims, num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        widths = dims.kept, num_heads * (dims.nope + dims.value)
        self.num_keys = _BYTES // (sum(widths) * dtype.itemsize)
        self.kept, self.made = (torch.empty(self.num_keys, width, dtype=dtype, device=device) for width in widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedChunks:
    """One step's.

    num_keys   of all chunks
    tile       of the queries of a head
    tiles      int32 [1 + n, 2], by plan_tiles with `tile.num_rows` tokens a tile
    key_tiles  the same of all keys, _GATHERED a tile
    key_start  int32 [S + 1], rows of the scratch of each sequence; those that decode have none
    """

    scratch: ExpandedScratch
    num_keys: int
    tile: TileShape
    tiles: torch.Tensor
    key_tiles: torch.Tensor
    key_start: torch.Tensor


def expanded_chunks(
    num_queries: npt.NDArray[np.int64],
    seq_lens: npt.NDArray[np.int64],
    *,
    dims: LatentDims,
    scratch: ExpandedScratch,
    dtype: torch.dtype,
    upload: StepUpload,
) -> ExpandedChunks | None:
    """Returns how chunks of so many queries (0: none, it decodes) are attended so; None: they are too long for it, or too short to pay,
    or of numbers that tensor cores do not multiply."""
    device = scratch.kept.device
    if device.type == "cuda" and dtype == torch.float32:
        return None
    num_keys = np.where(num_queries > 0, seq_lens, 0)
    total = int(num_keys.sum())
    if not 0 < total <= scratch.num_keys or not expands(num_queries, num_keys, dims):
        return None
    tile = _tile(dims, dtype, shared_bytes_of(device))
    key_start = np.concatenate(([0], np.cumsum(num_keys))).astype(np.int32)
    tiles = plan_tiles(num_queries, seq_lens, tile.num_rows), plan_tiles(num_keys, num_keys, _GATHERED)
    sent = upload.send((*tiles, key_start))
    return ExpandedChunks(scratch=scratch, num_keys=total, tile=tile, tiles=sent[0], key_tiles=sent[1], key_start=sent[2])


def attend_expanded(
    query: torch.Tensor,
    turned: torch.Tensor,
    out: torch.Tensor,
    cache: KvCache,
    layer: int,
    *,
    chunks: ExpandedChunks,
    weights: LatentWeights,
    dims: LatentDims,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> None:
    """Causal attention of chunks whose own latents are in the pool already. Writes the rows of `out` that tiles cover.

    query         [T, num_heads * dims.query], rows dense, not rotated
    turned        [T, num_heads, dims.rope], dense in the last dimension: the queries' rotated parts
    out           [T, num_heads * dims.value], dense
    query_start   int32 [S + 1]; seq_lens int32 [S]; block_tables int32 [S, B], rows dense
    """
    assert query.stride(1) == turned.stride(2) == block_tables.stride(1) == 1
    assert out.is_contiguous()
    shape, quantized, num_heads = cache.shape, cache.quantized, turned.shape[1]
    pool = cache.tensor[:, layer]
    scales = pool if quantized is None else quantized.scales[:, layer]
    kept, made = chunks.scratch.kept[: chunks.num_keys], chunks.scratch.made[: chunks.num_keys]
    _gather_kernel[(len(chunks.key_tiles) - 1,)](
        pool, scales, kept, chunks.key_tiles, chunks.key_start, seq_lens, block_tables, block_tables.stride(0), pool.stride(0),
        scales.stride(0), KEPT=dims.kept, BLOCK_KEPT=triton.next_power_of_2(dims.kept), KEYS=_GATHERED, BLOCK_SIZE=shape.block_size,
        FORMAT=shape.quantization, CONVERTS=converts_fp8(pool.device), num_warps=4,
    )  # fmt: skip
    torch.mm(kept[:, : dims.latent], weights.up.view(-1, dims.latent).T, out=made)
    _attend_kernel[((len(chunks.tiles) - 1) * num_heads,)](
        query, turned, kept, made, out, chunks.tiles, query_start, seq_lens, chunks.key_start, query.stride(0), turned.stride(0),
        turned.stride(1), log2_scale(1, scale), NUM_HEADS=num_heads, NOPE=dims.nope, ROPE=dims.rope, VALUE=dims.value, LATENT=dims.latent,
        BLOCK_NOPE=_block(dims.nope), BLOCK_ROPE=_block(dims.rope), BLOCK_VALUE=_block(dims.value),
        ROWS=chunks.tile.num_rows, KEYS=chunks.tile.num_keys, IN_FLOAT32=not query.is_cuda, num_warps=chunks.tile.num_warps,
        num_stages=chunks.tile.num_stages,
    )  # fmt: skip


def _tile(dims: LatentDims, dtype: torch.dtype, shared_bytes: int) -> TileShape:
    """The largest whose queries and tiles on their way fit the shared memory."""
    query, key = _block(dims.nope) + _block(dims.rope), _block(dims.nope) + _block(dims.rope) + _block(dims.value)
    shapes = [
        TileShape(num_rows=rows, num_keys=64, num_warps=8, num_stages=stages) for rows, stages in ((128, 3), (128, 2), (64, 2), (64, 1))
    ]
    fitting = (
        shape for shape in shapes if (shape.num_rows * query + shape.num_stages * shape.num_keys * key) * dtype.itemsize <= shared_bytes
    )
    return next(fitting, shapes[-1])


def _block(width: int) -> int:
    wide: int = triton.next_power_of_2(width)
    return max(16, wide)


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["tiles_ptr", "start_ptr", "lens_ptr", "tables_ptr"])
def _gather_kernel(
    pool_ptr, scales_ptr, kept_ptr, tiles_ptr, start_ptr, lens_ptr, tables_ptr, stride_table, stride_block, stride_scales,
    KEPT: tl.constexpr, BLOCK_KEPT: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    seq = tl.load(tiles_ptr + 2 + tile * 2)
    key = tl.load(tiles_ptr + 2 + tile * 2 + 1) + tl.arange(0, KEYS)
    there = key < tl.load(lens_ptr + seq)
    block = tl.load(tables_ptr + seq.to(tl.int64) * stride_table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    d = tl.arange(0, BLOCK_KEPT)[None, :]
    mask = there[:, None] & (d < KEPT)
    x = tl.load(pool_ptr + (block * stride_block + key % BLOCK_SIZE * KEPT)[:, None] + d, mask=mask, other=0)
    if FORMAT != "none":
        scale = tl.load(scales_ptr + block * stride_scales + key % BLOCK_SIZE, mask=there, other=0.0).to(tl.float32)
        x = numbers_of(x, FORMAT, CONVERTS) * scale[:, None]
    row = (tl.load(start_ptr + seq) + key).to(tl.int64)
    tl.store(kept_ptr + row[:, None] * KEPT + d, x.to(kept_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr", "query_start_ptr", "lens_ptr", "key_start_ptr"])
def _attend_kernel(
    query_ptr, turned_ptr, kept_ptr, made_ptr, out_ptr, tiles_ptr, query_start_ptr, lens_ptr, key_start_ptr, stride_query, stride_turned,
    stride_head, scale_log2, NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    seq = tl.load(tiles_ptr + 2 + tile * 2)
    first = tl.load(tiles_ptr + 2 + tile * 2 + 1)
    row_start = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - row_start
    seq_len = tl.load(lens_ptr + seq)
    context = seq_len - num_queries
    token = first + tl.arange(0, ROWS)
    valid = token < num_queries
    position = context + token
    row = (row_start + token).to(tl.int64)
    d, e, v = tl.arange(0, BLOCK_NOPE), tl.arange(0, BLOCK_ROPE), tl.arange(0, BLOCK_VALUE)
    q_at = query_ptr + row[:, None] * stride_query + head * (NOPE + ROPE)
    q_nope = tl.load(q_at + d[None, :], mask=valid[:, None] & (d < NOPE)[None, :], other=0.0)
    turned_at = turned_ptr + row[:, None] * stride_turned + head * stride_head
    q_rope = tl.load(turned_at + e[None, :], mask=valid[:, None] & (e < ROPE)[None, :], other=0.0)
    if IN_FLOAT32:
        q_nope, q_rope = q_nope.to(tl.float32), q_rope.to(tl.float32)
    key_start = tl.load(key_start_ptr + seq).to(tl.int64)
    made_ptr += key_start * (NUM_HEADS * (NOPE + VALUE)) + head * (NOPE + VALUE)
    kept_ptr += key_start * (LATENT + ROPE) + LATENT
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, BLOCK_VALUE], 0.0, tl.float32)
    # Every row sees all keys up to the first token's own.
    seen_by_all = (context + first + 1) // KEYS * KEYS
    end = tl.minimum(context + first + ROWS, seq_len)
    best, total, acc = _fold_keys(
        best, total, acc, q_nope, q_rope, position, made_ptr, kept_ptr, 0, seen_by_all, end, scale_log2, NUM_HEADS, NOPE, ROPE, VALUE,
        LATENT, BLOCK_NOPE, BLOCK_ROPE, BLOCK_VALUE, KEYS, IN_FLOAT32, False,
    )  # fmt: skip
    best, total, acc = _fold_keys(
        best, total, acc, q_nope, q_rope, position, made_ptr, kept_ptr, seen_by_all, end, end, scale_log2, NUM_HEADS, NOPE, ROPE, VALUE,
        LATENT, BLOCK_NOPE, BLOCK_ROPE, BLOCK_VALUE, KEYS, IN_FLOAT32, True,
    )  # fmt: skip
    acc = acc / tl.where(valid, total, 1.0)[:, None]
    out_at = out_ptr + (row * NUM_HEADS + head)[:, None] * VALUE + v[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (v < VALUE)[None, :])


@triton.jit
def _fold_keys(
    best, total, acc, q_nope, q_rope, position, made_ptr, kept_ptr, start, stop, end, scale_log2,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr, KEYS: tl.constexpr, IN_FLOAT32: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Folds keys [start, stop) into the running maximum, sum and weighted values of each row, which sees keys up to its position."""
    d, e, v = tl.arange(0, BLOCK_NOPE)[None, :], tl.arange(0, BLOCK_ROPE)[None, :], tl.arange(0, BLOCK_VALUE)[None, :]
    for key_base in tl.range(start, stop, KEYS):
        key = (key_base + tl.arange(0, KEYS))[:, None]
        # Behind the end lie other sequences' keys, or what was left there.
        there = key < end
        made_at = made_ptr + key.to(tl.int64) * (NUM_HEADS * (NOPE + VALUE))
        nope = tl.load(made_at + d, mask=there & (d < NOPE), other=0.0)
        rope = tl.load(kept_ptr + key.to(tl.int64) * (LATENT + ROPE) + e, mask=there & (e < ROPE), other=0.0)
        value = tl.load(made_at + NOPE + v, mask=there & (v < VALUE), other=0.0)
        if IN_FLOAT32:
            nope, rope, value = nope.to(tl.float32), rope.to(tl.float32), value.to(tl.float32)
        score = tl.dot(q_nope, tl.trans(nope), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(rope), score, input_precision="ieee") * scale_log2
        if MASKED:
            score = tl.where((key_base + tl.arange(0, KEYS))[None, :] <= position[:, None], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        best = new_best
    return best, total, acc
