"""Attention over a prefix that many sequences of a decode batch share: its blocks are read once for all of them.

1. find_groups and pack list what is shared, on the host                twostep/model/kernels/shared_prefix.py
2. A program takes one item of the list: a stretch of keys for the queries of many sequences, rows of one matrix product; it leaves
   a running maximum, sum and weighted value for each
3. Decode attention begins behind the prefix, and folds those in where it meets a sequence's first own tile (triton_decode.py)

    rows of a tile   sequence 0: the query heads of the KV head, sequence 1: the same, ...

Softmax over parts of the keys is merged exactly (Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes", 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostep.engine.batch import KvShape
from twostep.model.kernels.shared_prefix import GRANULE, ITEM_COLUMNS, OWN_COLUMNS, SharedLayout, find_groups, pack, room_for_items
from twostep.model.kernels.triton_launch import DecodeWorkspace, num_sms_of, overlaps
from twostep.model.kernels.triton_quantized_kv import converts_fp8, load_quantized, words_of_slot
from twostep.model.kernels.triton_scores import capped
from twostep.model.step.kv_cache import KvCache


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTile:
    """How one program works. `num_rows` (a power of 2) query rows, `num_keys` (one that divides GRANULE) keys at once."""

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def shared_tile(shape: KvShape, *, num_heads: int, num_seqs: int) -> SharedTile:
    """The tile for steps of `num_seqs` sequences: 128 rows where there are so many, as each tile reads the keys anew."""
    wide, share = triton.next_power_of_2(shape.head_dim), num_heads // shape.num_kv_heads
    if shape.dtype == "float32" or wide > 128:
        return SharedTile(num_rows=max(64, triton.next_power_of_2(share)), num_keys=32, num_warps=4, num_stages=2, programs_per_sm=1)
    if share * num_seqs > 64:
        return SharedTile(num_rows=max(128, triton.next_power_of_2(share)), num_keys=64, num_warps=8, num_stages=3, programs_per_sm=1)
    return SharedTile(num_rows=64, num_keys=64, num_warps=4, num_stages=3, programs_per_sm=1)


def serves_shared(shape: KvShape, *, num_heads: int, windows: Sequence[int]) -> bool:
    """Whether SharedPrefix serves this pool, and a layer of these windows (0: none). Blocks in a window, and latents, are read by each
    sequence for itself."""
    return 0 in windows and shape.num_planes == 2 and shape.block_size % 16 == 0 and num_heads // shape.num_kv_heads <= 128


class SharedPrefix:
    """The shared pass of steps of `num_seqs` sequences: its list on the device, which may change between replays of a captured step, and
    the memory for states."""

    def __init__(
        self,
        shape: KvShape,
        *,
        num_heads: int,
        num_seqs: int,
        device: torch.device | str,
        workspace: DecodeWorkspace | None = None,
        tile: SharedTile | None = None,
        num_sms: int | None = None,
    ) -> None:
        """`workspace` is of shared passes only: decode attention uses its own at the same time."""
        self.shape = shape
        self.num_heads = num_heads
        self.tile = tile or shared_tile(shape, num_heads=num_heads, num_seqs=num_seqs)
        assert GRANULE % self.tile.num_keys == 0
        seqs_per_tile = self.tile.num_rows // (num_heads // shape.num_kv_heads)
        assert seqs_per_tile
        sms = num_sms or num_sms_of(torch.device(device))
        num_splits = max(1, sms * self.tile.programs_per_sm // shape.num_kv_heads)
        self.layout = SharedLayout(
            num_seqs=num_seqs,
            seqs_per_tile=seqs_per_tile,
            num_splits=num_splits,
            max_items=room_for_items(num_seqs, seqs_per_tile, num_splits),
            key_bytes=shape.block_bytes // (shape.num_layers * shape.block_size),
        )
        # As `listing` makes it. All zeros: nothing is shared.
        self.listed = torch.zeros(self.layout.list_size, dtype=torch.int32, device=device)
        workspace = workspace or DecodeWorkspace(device)
        # Row (item * num_kv_heads + KV head) * num_rows + place in the item * query heads of a KV head + query head.
        num_rows = self.layout.max_items * shape.num_kv_heads * self.tile.num_rows
        workspace.reserve(num_parts=num_rows, head_dim=shape.head_dim, num_counters=0)
        self.parts, self.scales = workspace.parts, workspace.scales

    def listing(self, block_tables: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """Returns what a step shares, to be copied to `listed`; None where it is not worth the pass. For at most `num_seqs` sequences, on
        the host (see shared_prefix.find_groups)."""
        groups = find_groups(block_tables, seq_lens, block_size=self.shape.block_size, layout=self.layout)
        return pack(groups, self.layout) if groups else None

    def attend(
        self, q: torch.Tensor, cache: KvCache, layer: int, block_tables: torch.Tensor, *, scale_log2: float, softcap: float = 0.0
    ) -> None:
        """Leaves the states of the listed items; arguments as decode_attention has them, `scale_log2` as triton_scores makes it."""
        shape, pool, tile, quantized = cache.shape, cache.tensor, self.tile, cache.quantized
        words = None if quantized is None else quantized.words[:, layer]
        pdl = overlaps(pool.device)
        own_end = self.layout.num_seqs * OWN_COLUMNS
        items = self.listed[own_end:]
        # The interpreter multiplies bfloat16 wrongly.
        _shared_kernel[(shape.num_kv_heads, self.layout.max_items)](
            q, pool[:, layer], block_tables, items, items[self.layout.max_items * ITEM_COLUMNS :], self.parts, self.scales,
            scale_log2, q.stride(0), block_tables.stride(0), pool.stride(0),
            *(pool.stride()[2:5] if quantized is None else quantized.strides), words, 0 if words is None else words.stride(0),
            COLUMNS=ITEM_COLUMNS, SHARE=self.num_heads // shape.num_kv_heads, ROWS=tile.num_rows, KEYS=tile.num_keys,
            HEAD_DIM=shape.head_dim, BLOCK_D=max(16, triton.next_power_of_2(shape.head_dim)), BLOCK_SIZE=shape.block_size,
            SOFTCAP=softcap, FORMAT=shape.quantization, CONVERTS=converts_fp8(pool.device), IN_FLOAT32=not pool.is_cuda, PDL=pdl,
            num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=pdl,
        )  # fmt: skip


@triton.jit
def _shared_kernel(
    q_ptr, pool_ptr, tables_ptr, items_ptr, members_ptr, parts_ptr, scales_ptr,
    scale_log2, stride_q, stride_table, stride_block, stride_kv, stride_head, stride_slot, words_ptr, stride_words,
    COLUMNS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SOFTCAP: tl.constexpr, FORMAT: tl.constexpr, CONVERTS: tl.constexpr, IN_FLOAT32: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        # In this order: decode attention, which starts beside this, may then read what came before without waiting.
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0)
    item = tl.program_id(1)
    listed = items_ptr + item * COLUMNS
    first, count, table_row = tl.load(listed), tl.load(listed + 1), tl.load(listed + 2)
    start, end = tl.load(listed + 3), tl.load(listed + 4)
    if start < end:
        row = tl.arange(0, ROWS)
        valid = row // SHARE < count
        seq = tl.load(members_ptr + first + row // SHARE, mask=valid, other=0).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        d_mask = (d < HEAD_DIM)[None, :]
        q_at = seq[:, None] * stride_q + ((head * SHARE + row % SHARE) * HEAD_DIM)[:, None] + d[None, :]
        q = tl.load(q_ptr + q_at, mask=valid[:, None] & d_mask, other=0.0)
        if IN_FLOAT32:
            q = q.to(tl.float32)
        table_ptr = tables_ptr + table_row.to(tl.int64) * stride_table
        k_ptr = pool_ptr + head.to(tl.int64) * stride_head
        best = tl.full([ROWS], -1e38, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        inside = tl.arange(0, KEYS)
        # Stretches are full tiles of full blocks: no key is masked.
        block = tl.load(table_ptr + (start + inside) // BLOCK_SIZE)
        for key_start in tl.range(start, end, KEYS):
            next_key = key_start + KEYS + inside
            next_block = tl.load(table_ptr + next_key // BLOCK_SIZE, mask=next_key < end, other=0)
            at = (block.to(tl.int64) * stride_block + (key_start + inside) % BLOCK_SIZE * stride_slot)[:, None] + d[None, :]
            if FORMAT != "none":
                k, v = load_quantized(
                    k_ptr, k_ptr + stride_kv, words_ptr + head * BLOCK_SIZE * words_of_slot(FORMAT, HEAD_DIM), table_ptr,
                    key_start, end, stride_block, stride_words, HEAD_DIM, BLOCK_D, BLOCK_SIZE, KEYS, FORMAT, CONVERTS, q.dtype,
                )  # fmt: skip
            elif BLOCK_D == HEAD_DIM:
                k = tl.load(k_ptr + at)
                v = tl.load(k_ptr + stride_kv + at)
            else:
                k = tl.load(k_ptr + at, mask=d_mask, other=0.0)
                v = tl.load(k_ptr + stride_kv + at, mask=d_mask, other=0.0)
            if IN_FLOAT32:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
            if SOFTCAP > 0:
                score = capped(score, SOFTCAP)
            new_best = tl.maximum(best, tl.max(score, 1))
            weight = tl.exp2(score - new_best[:, None])
            shrink = tl.exp2(best - new_best)
            total = total * shrink + tl.sum(weight, 1)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            best = new_best
            block = next_block
        state = (item * tl.num_programs(0) + head).to(tl.int64) * ROWS
        tl.store(parts_ptr + (state + row)[:, None] * HEAD_DIM + d[None, :], acc, mask=valid[:, None] & d_mask)
        tl.store(scales_ptr + (state + row) * 2, best, mask=valid)
        tl.store(scales_ptr + (state + row) * 2 + 1, total, mask=valid)


@triton.jit
def fold_states(
    best, total, acc, parts_ptr, scales_ptr, first_item, num_items, place, first_head, num_kv_heads,
    SHARE: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merges a sequence's states of the shared pass into its own: best and total [heads, rows], acc [heads, rows, BLOCK_D], rows of which
    the first SHARE are queries of a head."""
    head = first_head + tl.arange(0, acc.shape[0])[:, None]
    query = tl.arange(0, acc.shape[1])[None, :]
    d = tl.arange(0, acc.shape[2])[None, None, :]
    for i in tl.range(0, num_items, AT_ONCE, num_stages=1):
        # Unrolled, so that several states are asked for before the first is used.
        for j in tl.static_range(AT_ONCE):
            there = (i + j < num_items) & (query < SHARE) & (head >= 0)
            state = ((first_item + i + j) * num_kv_heads + head).to(tl.int64) * ROWS + place * SHARE + query
            part_best = tl.load(scales_ptr + state * 2, mask=there, other=-1e38)
            part_total = tl.load(scales_ptr + state * 2 + 1, mask=there, other=0.0)
            part_acc = tl.load(parts_ptr + state[:, :, None] * HEAD_DIM + d, mask=there[:, :, None] & (d < HEAD_DIM), other=0.0)
            new_best = tl.maximum(best, part_best)
            shrink, weight = tl.exp2(best - new_best), tl.exp2(part_best - new_best)
            total = total * shrink + part_total * weight
            acc = acc * shrink[:, :, None] + part_acc * weight[:, :, None]
            best = new_best
    return best, total, acc
