"""The hand-over's checksum where the bytes are in registers anyway (definition and oracle: kv_transfer/checksums.py).

A block's sum is the sum of `mix` over its 64-bit words, modulo 2^64: any order, any split, so that each program adds what it alone has
seen. Twenty instructions for eight bytes, beside memory that takes longer.
"""

from __future__ import annotations

import triton
import triton.language as tl

# kv_transfer.checksums has the same numbers.
_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mix(words, place):
    """uint64 words and their places in the block, counted in words: what each adds to the sum. One-to-one in the word."""
    x = words + (place.to(tl.uint64) + 1) * _STEP
    x ^= x >> 32
    x *= _FIRST
    x ^= x >> 29
    x *= _SECOND
    return x ^ (x >> 32)


@triton.jit
def mix_vectors(x, place, kept):
    """Returns what each word of vectors adds to the sum, uint64 [rows, N / numbers in a word]; the vectors are stored as they are.

    x      [rows, N] of a float dtype; N a multiple of the numbers in a word
    place  [rows, 1]: words before the first number
    kept   [rows, N / numbers in a word]: which words count
    """
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    if BITS == 16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        even, odd = tl.split(tl.reshape(bits, (x.shape[0], x.shape[1] // 2, 2)))
        halves = even | (odd << 16)
    else:
        halves = x.to(tl.uint32, bitcast=True)
    low, high = tl.split(tl.reshape(halves, (x.shape[0], x.shape[1] * BITS // 64, 2)))
    words = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    at = place + tl.arange(0, x.shape[1] * BITS // 64)[None, :]
    return tl.where(kept, mix(words, at), 0)
