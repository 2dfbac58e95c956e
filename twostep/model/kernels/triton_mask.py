"""Tokens that rows may not become, out of their logits, on the GPU.

    bits of a row   |31 … 1 0|31 … 1 0|…      bit t % 32 of word t // 32: whether token t may come

Its oracle is `apply_masks` of twostep/model/runner/penalties.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_WARPS = 4


def mask_rows(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Sets to -infinity, in place, what is not allowed. Nothing is read of the logits, and what is allowed is not written.

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
            logits, rows, bits, vocab_size, logits.stride(0), bits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS
        )


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "bits_ptr"])
def _mask_kernel(logits_ptr, rows_ptr, bits_ptr, vocab_size, row_stride, num_words, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = place < vocab_size
    word = tl.load(bits_ptr + i.to(tl.int64) * num_words + place // 32, mask=there, other=0)
    row_ptr = logits_ptr + tl.load(rows_ptr + i) * row_stride
    tl.store(row_ptr + place, -float("inf"), mask=there & (((word >> (place % 32)) & 1) == 0))
