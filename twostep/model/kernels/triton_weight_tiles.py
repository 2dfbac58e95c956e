"""Parts of kernels that multiply 16-bit weights: rows and tiles of a weight as they are loaded, and a tile's product with tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_weight_rows(weight_ptr, row, k, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[len(row), BLOCK], zeros past WIDTH. Every weight is read once: it need not stay in the first-level cache."""
    at = weight_ptr + row[:, None] * WIDTH + k[None, :]
    if WIDTH == BLOCK:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=(k < WIDTH)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def load_weight_tile(source, first, row, k, WIDTH: tl.constexpr, DEPTH: tl.constexpr, BULK: tl.constexpr):
    """[COLS, DEPTH] of the weight, zeros past its width; rows from `first` on, `row` where they are loaded one by one."""
    if BULK:
        return source.load([first, k])
    else:
        depth = k + tl.arange(0, DEPTH)
        at = source + row[:, None] * WIDTH + depth[None, :]
        if WIDTH % DEPTH != 0:
            return tl.load(at, mask=(depth < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def multiply_tile(x, weight, acc, TURNED: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """Adds the product of tokens [TOKENS, DEPTH] and a weight's tile [COLS, DEPTH] to `acc`: [COLS, TOKENS] if turned, or the other way
    round."""
    if IN_FLOAT32:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if TURNED:
        return tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
