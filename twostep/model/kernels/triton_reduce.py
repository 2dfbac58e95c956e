"""Sum over ranks, residual and RMSNorm in one kernel, for the few tokens of a decode step: one program a token, one hop over NVLink.

    rank 0   x ─┬─ push ──▶ rank 1's inbox          each 8 bytes of an inbox are 4 of data and the number of the exchange:
                └─ poll own inbox ─▶ Σ ─▶ + ─▶ norm     a reader of the number has the data, and no rank waits for a fence
    rank 1   x ─┬─ push ──▶ rank 0's inbox
                └─ poll …

The protocol is NCCL's LL, with each rank pushing to all others (one shot): the latency of one way, at twice the bytes. Terms are added
in order of rank, so that all ranks have the same bits. Exchanges alternate between two halves of the inbox: a rank that pushes
exchange n + 2 has received n + 1 of its peer, whose program had then ended exchange n. The number is counted on the device, per token
of a step, so that captured graphs can be replayed.

    inbox  int64 [half 2, token MAX_ROWS, source SIZE, word of 4 bytes]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostep.model.kernels.triton_elementwise import sum_parts
from twostep.model.kernels.triton_launch import follow, overlaps

_WARPS = 8


def inbox_bytes(width: int, item_bytes: int, *, size: int, max_rows: int) -> int:
    return 2 * max_rows * size * (width * item_bytes // 4) * 8


class RowExchange:
    """One rank's end of the exchange. All ranks call it with the same shapes in the same order, on one stream."""

    def __init__(self, inboxes: torch.Tensor, rank: int, *, max_rows: int) -> None:
        """inboxes  int64 [size]: the address of each rank's inbox as this device sees it, zero at first"""
        self.max_rows = max_rows
        self._inboxes = inboxes
        self._rank = rank
        self._numbers = torch.zeros(max_rows, dtype=torch.int32, device=inboxes.device)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        first_weight: torch.Tensor | None = None,
        push: bool = True,
        pull: bool = True,
    ) -> torch.Tensor:
        """Adds the sum of all ranks' x to `residual` in place, and returns rms_norm(residual).

        x         [T, N], or float32 [parts, T, N], which are added up first; rounded to residual's dtype before it is exchanged
        residual  [T, N], dense, T <= max_rows, rows a multiple of 4 bytes
        weight    [N], perhaps float32 where residual is not; so is first_weight, with which the sum is normed itself before it is added
        Without `pull` only the exchange's first half is done, without `push` only its second: for tests of several ranks in one process.
        """
        rows, width = residual.shape
        assert rows <= self.max_rows
        assert residual.is_contiguous()
        assert x.shape[-2:] == residual.shape
        for each in (weight, weight if first_weight is None else first_weight):
            assert each.shape == (width,)
            assert each.is_contiguous()
        assert width * residual.element_size() % 4 == 0
        out = torch.empty_like(residual)
        if not rows:
            return out
        x = x.contiguous()
        block = triton.next_power_of_2(width)
        pdl = overlaps(x.device)
        _reduce_kernel[(rows,)](
            x, residual, first_weight, weight, out, self._inboxes, self._numbers, residual.numel(), eps,
            PARTS=x.numel() // residual.numel(), WIDTH=width, BLOCK=block, PER_WORD=4 // residual.element_size(),
            RANK=self._rank, SIZE=len(self._inboxes), MAX_ROWS=self.max_rows, NORMS_FIRST=first_weight is not None, PUSH=push, PULL=pull,
            PDL=pdl, num_warps=_WARPS if block <= 4096 else 2 * _WARPS, launch_pdl=pdl,
        )  # fmt: skip
        return out


@triton.jit
def _reduce_kernel(
    x_ptr, residual_ptr, first_ptr, weight_ptr, out_ptr, inboxes_ptr, numbers_ptr, numel, eps,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PER_WORD: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr, NORMS_FIRST: tl.constexpr, PUSH: tl.constexpr, PULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = WIDTH // PER_WORD
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < WIDTH
    word_col = tl.arange(0, BLOCK // PER_WORD)
    word_mask = word_col < WORDS
    weight = tl.load(weight_ptr + col, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        follow()
    number = tl.load(numbers_ptr + row) + 1
    # Zero is what an inbox holds before its first exchange; the halves keep taking turns.
    number = tl.where(number == 0, 2, number)
    slot = ((number & 1) * MAX_ROWS + row).to(tl.int64) * SIZE
    at = row.to(tl.int64) * WIDTH + col
    own = sum_parts(x_ptr + at, mask, numel, PARTS).to(residual_ptr.dtype.element_ty)
    if PUSH:
        words = _words(own, BLOCK, PER_WORD).to(tl.int64) & 0xFFFFFFFF
        message = words | (number.to(tl.int64) << 32)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                inbox = tl.load(inboxes_ptr + peer).to(tl.pointer_type(tl.int64))
                tl.store(inbox + (slot + RANK) * WORDS + word_col, message, mask=word_mask, cache_modifier=".wt")
    if PULL:
        inbox = tl.load(inboxes_ptr + RANK).to(tl.pointer_type(tl.int64))
        total = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(SIZE):
            if source == RANK:
                total += own.to(tl.float32)
            else:
                there = inbox + (slot + source) * WORDS + word_col
                got = tl.load(there, mask=word_mask, other=0, volatile=True)
                while tl.max((((got >> 32).to(tl.int32) != number) & word_mask).to(tl.int32), 0) != 0:
                    got = tl.load(there, mask=word_mask, other=0, volatile=True)
                total += _numbers(got.to(tl.int32), residual_ptr.dtype.element_ty, BLOCK, PER_WORD)
        tl.store(numbers_ptr + row, number)
        if NORMS_FIRST:
            first_weight = tl.load(first_ptr + col, mask=mask, other=0.0).to(tl.float32)
            total = tl.where(mask, total, 0.0)
            total *= tl.rsqrt(tl.sum(total * total, axis=0) / WIDTH + eps) * first_weight
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
        value = tl.where(mask, value, 0.0)
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
        tl.store(out_ptr + at, (value * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _words(x, BLOCK: tl.constexpr, PER_WORD: tl.constexpr):
    """The bits of x [BLOCK] as int32 [BLOCK / PER_WORD]."""
    if PER_WORD == 1:
        return x.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), (BLOCK // 2, 2)))
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def _numbers(words, dtype: tl.constexpr, BLOCK: tl.constexpr, PER_WORD: tl.constexpr):
    """The inverse of _words, float32 [BLOCK]."""
    if PER_WORD == 1:
        return words.to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        return tl.reshape(tl.join(low, high), (BLOCK,))
