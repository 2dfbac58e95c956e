"""Tokens that stay on the device: those that rows may not become, the largest logit's, and those that one step hands to the next.

step n     logits ─ mask_rows ─ pick_greedy, or triton_sample.py ─▶ tokens [rows]
step n+1   token_ids ◀─ carry_tokens ─ tokens[row]          no host in between
           token_ids, positions, slots, lengths ◀─ go_on ─ tokens[rows] compared with the drafts of n

bits of a mask's row   |31 … 1 0|31 … 1 0|…      bit t % 32 of word t // 32: whether token t may come
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Programs that read a row side by side: enough to fill a chip with a few rows.
_PROGRAMS = 1024
_MAX_SPLITS = 64
_BLOCK = 2048
_CARRY_BLOCK = 256
_GO_ON_BLOCK = 64
# Drafts of a sequence in one step, at most.
MOST_DRAFTS = 7

# More than any step samples: the buffer keeps its address, which graphs have captured.
MAX_SAMPLED_ROWS = 1 << 16

# What pick_greedy and the sampler give for a row whose largest logit is not finite; the engine's NO_TOKEN.
NO_TOKEN = -1


def pick_greedy(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """tokens[r] = the first of the largest of logits[r], NO_TOKEN where that is infinite or any is NaN.

    logits  [R, V] in any float dtype, dense rows
    tokens  int64 [R]
    """
    num_rows, vocab_size = logits.shape
    assert tokens.shape == (num_rows,)
    assert tokens.dtype == torch.int64
    assert tokens.is_contiguous()
    assert logits.stride(1) == 1
    if not num_rows:
        return
    splits = min(
        _MAX_SPLITS, triton.next_power_of_2(triton.cdiv(_PROGRAMS, num_rows)), triton.next_power_of_2(triton.cdiv(vocab_size, _BLOCK))
    )
    per_split = triton.cdiv(triton.cdiv(vocab_size, splits), _BLOCK) * _BLOCK
    best = torch.empty(num_rows, splits, dtype=torch.int64, device=logits.device)
    _best_kernel[(num_rows, splits)](logits, best, vocab_size, logits.stride(0), per_split, BLOCK=_BLOCK, num_warps=8)
    _choose_kernel[(num_rows,)](best, tokens, SPLITS=splits, num_warps=1)


def carry_tokens(token_ids: torch.Tensor, carried: torch.Tensor, tokens: torch.Tensor) -> None:
    """token_ids[t] = tokens[carried[t]] where carried[t] is not negative; token 0 for NO_TOKEN (its sequence is over).

    token_ids  int32 or int64 [T], written in place
    carried    int32 [T]
    tokens     int64 [at least the largest row + 1]
    """
    count = token_ids.shape[0]
    assert token_ids.shape == carried.shape
    assert token_ids.is_contiguous()
    assert carried.is_contiguous()
    assert tokens.dtype == torch.int64
    if count:
        _carry_kernel[(triton.cdiv(count, _CARRY_BLOCK),)](token_ids, carried, tokens, count, BLOCK=_CARRY_BLOCK, num_warps=2)


def go_on(
    table: torch.Tensor,
    tokens: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """Moves rows behind drafts of the step before to where they belong, and gives them their tokens. Its oracle is `Batch.with_carried`.

    table      int32 [N, 4 + 3 * D], see RowsBehind in twostep/engine/batch.py
    tokens     int64, what the step before sampled
    token_ids, positions, slots, seq_lens   int32 or int64, written in place at the table's rows
    accepted   int32, written there: how many drafts of the sequence were accepted
    """
    num_rows, width = table.shape
    most = (width - 4) // 3
    assert width == 4 + 3 * most
    assert most <= MOST_DRAFTS
    assert table.dtype == torch.int32
    assert table.is_contiguous()
    assert tokens.dtype == torch.int64
    assert accepted.dtype == torch.int32
    assert all(each.is_contiguous() for each in (token_ids, positions, slots, seq_lens))
    _go_on_kernel[(triton.cdiv(num_rows, _GO_ON_BLOCK),)](
        table, tokens, token_ids, positions, slots, seq_lens, accepted, num_rows, most,
        MOST=MOST_DRAFTS, BLOCK=_GO_ON_BLOCK, num_warps=2,
    )  # fmt: skip


@triton.jit
def sort_key(values, places):
    """int64 that orders (value, then lower place first) as signed numbers. values float32, NaN above all; places below 2**31."""
    # -0.0 equals 0.0.
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(values != values, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def key_place(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def key_is_finite(key):
    """Returns whether the value is above -infinity and below +infinity."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered < 0x7F800000) & (ordered > -0x7F800001)


@triton.jit
def _best_kernel(logits_ptr, best_ptr, vocab_size, row_stride, per_split, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    split = tl.program_id(1)
    start = split * per_split
    end = tl.minimum(start + per_split, vocab_size)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    best = tl.full((BLOCK,), -(2**63), tl.int64)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        there = place < end
        values = tl.load(row_ptr + place, mask=there, other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.where(there, sort_key(values, place), -(2**63)))
    tl.store(best_ptr + row * tl.num_programs(1) + split, tl.max(best, 0))


@triton.jit
def _choose_kernel(best_ptr, tokens_ptr, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    key = tl.max(tl.load(best_ptr + row * SPLITS + tl.arange(0, SPLITS)), 0)
    tl.store(tokens_ptr + row, tl.where(key_is_finite(key), key_place(key), -1))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["token_ids_ptr", "carried_ptr"])
def _carry_kernel(token_ids_ptr, carried_ptr, tokens_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(carried_ptr + place, mask=place < count, other=-1)
    token = tl.load(tokens_ptr + row, mask=row >= 0, other=0)
    tl.store(token_ids_ptr + place, tl.maximum(token, 0).to(token_ids_ptr.dtype.element_ty), mask=row >= 0)


@triton.jit(
    do_not_specialize=["num_rows", "most"],
    do_not_specialize_on_alignment=["table_ptr", "token_ids_ptr", "positions_ptr", "slots_ptr", "lens_ptr"],
)
def _go_on_kernel(
    table_ptr, tokens_ptr, token_ids_ptr, positions_ptr, slots_ptr, lens_ptr, accepted_ptr, num_rows, most,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < num_rows
    entry = table_ptr + place * (4 + 3 * most)
    row = tl.load(entry, mask=there, other=0)
    first = tl.load(entry + 1, mask=there, other=0)
    accepted = tl.zeros((BLOCK,), tl.int32)
    going = there
    for i in tl.static_range(MOST):
        drafted = tl.load(entry + 2 + i, mask=going & (i < most), other=-1)
        sampled = tl.load(tokens_ptr + first + i, mask=drafted >= 0, other=-1)
        going = (drafted >= 0) & (sampled == drafted)
        accepted += going.to(tl.int32)
    known = tl.load(entry + 2 + most + accepted, mask=there, other=0)
    sampled = tl.load(tokens_ptr + first + accepted, mask=there & (known < 0), other=0)
    token = tl.where(known < 0, tl.maximum(sampled, 0), known.to(tl.int64))
    slot = tl.load(entry + 3 + 2 * most + accepted, mask=there, other=0)
    position = tl.load(positions_ptr + row, mask=there, other=0) + accepted
    length = tl.load(lens_ptr + row, mask=there, other=0) + accepted
    tl.store(token_ids_ptr + row, token.to(token_ids_ptr.dtype.element_ty), mask=there)
    tl.store(positions_ptr + row, position.to(positions_ptr.dtype.element_ty), mask=there)
    tl.store(slots_ptr + row, slot.to(slots_ptr.dtype.element_ty), mask=there)
    tl.store(lens_ptr + row, length.to(lens_ptr.dtype.element_ty), mask=there)
    tl.store(accepted_ptr + row, accepted, mask=there)


def mask_rows(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Sets to -infinity, in place, what is not allowed. Nothing is read of the logits, and what is allowed is not written. Its oracle is
    `apply_masks` of twostep/model/runner/sampler.py.

    logits  [R, V] in any float dtype, dense rows
    rows    int64 [C], rows of `logits`
    bits    int32 [C, ceil(V / 32)], contiguous
    """
    num_rows, vocab_size = rows.shape[0], logits.shape[1]
    assert rows.dtype == torch.int64
    assert bits.shape == (num_rows, triton.cdiv(vocab_size, 32))
    assert bits.dtype == torch.int32
    assert bits.is_contiguous()
    assert logits.stride(1) == 1
    if num_rows:
        _mask_kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
            logits, rows, bits, vocab_size, logits.stride(0), bits.shape[1], BLOCK=_BLOCK, num_warps=4
        )


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "bits_ptr"])
def _mask_kernel(logits_ptr, rows_ptr, bits_ptr, vocab_size, row_stride, num_words, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < vocab_size
    word = tl.load(bits_ptr + i.to(tl.int64) * num_words + place // 32, mask=there, other=0)
    row_ptr = logits_ptr + tl.load(rows_ptr + i) * row_stride
    tl.store(row_ptr + place, -float("inf"), mask=there & (((word >> (place % 32)) & 1) == 0))
