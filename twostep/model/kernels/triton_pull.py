"""Blocks out of a peer's pool into this one, and checksums of blocks (kv_transfer/checksums.py), on a GPU.

    source pool (a peer's, over NVLink)      target pool
    block 7   [ piece 0 | piece 1 | … ]  ──▶  block 2        a program copies every num_programs-th piece; while one is summed and
    block 3   [ piece 0 | piece 1 | … ]  ──▶  block 9        stored, the next is on its way

A launch takes few programs, each wide: enough bytes on the way for the link, and most multiprocessors left to the model's steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostep.model.kernels.triton_sum64 import mix


@dataclass(frozen=True, slots=True)
class PullShape:
    """How a pull is cut: `num_programs` at once, each taking `tile_words` 64-bit words (a power of 2) at a time. So few of so wide ones
    fill the link between two H200 to within 1 % of the best, and cost a neighbour least (benchmarks/gpu_transfer.py)."""

    num_programs: int = 16
    tile_words: int = 8192
    num_warps: int = 32


def pull_blocks(
    source: int, target: int, ids: torch.Tensor, sums: torch.Tensor | None, *, block_bytes: int, first_byte: int, num_bytes: int,
    shape: PullShape,
) -> None:  # fmt: skip
    """Copies bytes [first_byte, first_byte + num_bytes) of n blocks from one pool into another, on the current stream.

    source, target  addresses of the pools, aligned to 8 bytes, as the current device sees them
    ids             int32 [2, n], dense: blocks of the source, then of the target
    sums            int64 [n], to which the blocks' sums are added: zeros before; None: no sums
    """
    assert ids.is_contiguous()
    _launch(source, target, ids, sums, block_bytes, first_byte, num_bytes, shape, copy=True)


def sum_blocks(
    source: int, ids: torch.Tensor, sums: torch.Tensor, *, block_bytes: int, first_byte: int, num_bytes: int, shape: PullShape
) -> None:
    """Adds the sums of the same bytes of blocks `ids`, int32 [n], to `sums`, int64 [n]."""
    _launch(source, source, ids, sums, block_bytes, first_byte, num_bytes, shape, copy=False)


def _launch(
    source: int, target: int, ids: torch.Tensor, sums: torch.Tensor | None, block_bytes: int, first_byte: int, num_bytes: int,
    shape: PullShape, *, copy: bool,
) -> None:  # fmt: skip
    assert block_bytes % 8 == first_byte % 8 == num_bytes % 8 == 0
    num_blocks = ids.shape[-1]
    pieces = triton.cdiv(num_bytes // 8, shape.tile_words)
    if not num_blocks * pieces:
        return
    num_programs = min(shape.num_programs, num_blocks * pieces)
    _pull_kernel[(num_programs,)](
        source, target, ids, ids if sums is None else sums, num_blocks, pieces, block_bytes // 8, first_byte // 8, num_bytes // 8,
        num_programs, TILE=shape.tile_words, ALIGNED=8 if (source | target | block_bytes | first_byte) % 16 else 16,
        COPY=copy, SUM=sums is not None, num_warps=shape.num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks", "pieces", "stride", "num_programs"])
def _pull_kernel(
    source, target, ids_ptr, sums_ptr, num_blocks, pieces, stride, first, num_words, num_programs,
    TILE: tl.constexpr, ALIGNED: tl.constexpr, COPY: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, TILE)
    last = num_blocks * pieces - 1
    item = tl.program_id(0)
    words = _load(source, ids_ptr, item, pieces, stride, first, num_words, lane, ALIGNED)
    while item <= last:
        following = item + num_programs
        # Past the end it is the last piece again: a wasted read at most, and none of the loop's loads waits for a condition.
        ahead = _load(source, ids_ptr, tl.minimum(following, last), pieces, stride, first, num_words, lane, ALIGNED)
        block = item // pieces
        place = item % pieces * TILE + lane
        if COPY:
            to = tl.load(ids_ptr + num_blocks + block).to(tl.int64) * stride + first
            tl.store(_words_at(target, to, ALIGNED) + place, words, mask=place < num_words)
        if SUM:
            total = tl.sum(tl.where(place < num_words, mix(words, first + place), 0))
            tl.atomic_add(sums_ptr + block, total.to(tl.int64, bitcast=True), sem="relaxed")
        words = ahead
        item = following


@triton.jit
def _load(source, ids_ptr, item, pieces, stride, first, num_words, lane, ALIGNED: tl.constexpr):
    start = tl.load(ids_ptr + item // pieces).to(tl.int64) * stride + first
    place = item % pieces * lane.shape[0] + lane
    return tl.load(_words_at(source, start, ALIGNED) + place, mask=place < num_words, other=0)


@triton.jit
def _words_at(address, word, ALIGNED: tl.constexpr):
    """Where a pool's word lies."""
    return tl.multiple_of((address + word * 8).to(tl.pointer_type(tl.uint64)), ALIGNED)


def slot_sums(pool: torch.Tensor, ids: torch.Tensor, sums: torch.Tensor, *, num_slots: int, num_rows: int) -> None:
    """Computes the sums of blocks of numbers anew, slot by slot.

    pool  [num_blocks, num_layers, 2, num_kv_heads, num_slots, head_dim], dense, of `num_rows` = 2 * num_kv_heads vectors to a slot
    ids   int32 [n]
    sums  int64 [num_blocks, num_layers, num_slots, parts], dense; the first part gets the whole sum
    """
    num_layers, parts = sums.shape[1], sums.shape[3]
    width = pool.shape[-1] * pool.element_size() // 8
    if not len(ids):
        return
    _slot_sums_kernel[(len(ids), num_layers)](
        pool.view(torch.int64), ids, sums, num_layers, num_slots, width,
        ROWS=num_rows, SLOTS=triton.next_power_of_2(num_slots), WIDTH=triton.next_power_of_2(width), PARTS=parts, num_warps=4,
    )  # fmt: skip


@triton.jit
def _slot_sums_kernel(
    pool_ptr, ids_ptr, sums_ptr, num_layers, num_slots, width,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    block = tl.load(ids_ptr + tl.program_id(0)).to(tl.int64)
    layer = tl.program_id(1)
    slot = tl.arange(0, SLOTS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (slot[:, None] < num_slots) & (column < width)
    layer_words = ROWS * num_slots * width
    total = tl.zeros((SLOTS,), tl.uint64)
    for row in range(ROWS):
        place = layer * layer_words + (row * num_slots + slot[:, None]) * width + column
        words = tl.load(pool_ptr + block * num_layers * layer_words + place, mask=inside, other=0).to(tl.uint64, bitcast=True)
        total += tl.sum(tl.where(inside, mix(words, place), 0), axis=1)
    at = sums_ptr + ((block * num_layers + layer) * num_slots + slot) * PARTS
    for part in tl.static_range(PARTS):
        tl.store(at + part, total.to(tl.int64, bitcast=True) if part == 0 else tl.zeros((SLOTS,), tl.int64), mask=slot < num_slots)


def add_slot_sums(sums: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, *, first_layer: int, num_layers: int) -> None:
    """out, int64 [n]: the sums of layers [first_layer, first_layer + num_layers) of blocks `ids`, int32 [n], out of those of their slots,
    int64 [num_blocks, num_layers, num_slots, parts], dense."""
    if len(ids):
        per_layer = sums.stride(1)
        _add_kernel[(len(ids),)](
            sums, ids, out, sums.stride(0), first_layer * per_layer, num_layers * per_layer, TILE=1024, num_warps=4
        )  # fmt: skip


@triton.jit
def _add_kernel(sums_ptr, ids_ptr, out_ptr, stride, first, count, TILE: tl.constexpr):
    row = tl.program_id(0)
    at = sums_ptr + tl.load(ids_ptr + row).to(tl.int64) * stride + first
    total = tl.zeros((TILE,), tl.int64)
    start = count * 0
    while start < count:
        place = start + tl.arange(0, TILE)
        total += tl.load(at + place, mask=place < count, other=0)
        start += TILE
    tl.store(out_ptr + row, tl.sum(total))


def clear_sums(sums: torch.Tensor, of_zeros: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor) -> None:
    """Sums of slots that are zeroed because they lie past their sequence's end in its last block.

    sums          int64 [num_blocks, num_layers, num_slots, parts], dense
    of_zeros      int64 [num_layers, num_slots, parts], dense: a block of zeros has these
    seq_lens      int32 [S]
    block_tables  int32 [S, B], rows dense
    """
    _clear_sums_kernel[(len(seq_lens), sums.shape[1])](
        sums, of_zeros, seq_lens, block_tables, block_tables.stride(0), sums.shape[2], sums.shape[3],
        TILE=triton.next_power_of_2(sums.shape[2] * sums.shape[3]), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["seq_lens_ptr", "tables_ptr"])
def _clear_sums_kernel(sums_ptr, zeros_ptr, seq_lens_ptr, tables_ptr, stride_table, num_slots, parts, TILE: tl.constexpr):
    seq = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    used = seq_len % num_slots
    if used > 0:
        block = tl.load(tables_ptr + seq * stride_table + seq_len // num_slots).to(tl.int64)
        place = tl.arange(0, TILE)
        unwritten = (place >= used * parts) & (place < num_slots * parts)
        row = layer * num_slots * parts + place
        sum_of_zeros = tl.load(zeros_ptr + row, mask=unwritten, other=0)
        tl.store(sums_ptr + block * (tl.num_programs(1) * num_slots * parts) + row, sum_of_zeros, mask=unwritten)
