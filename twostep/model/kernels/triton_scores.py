"""From products of queries and keys to what the softmax is of, the same in all attention kernels: a scale, then perhaps a softcap.

    product · scale = logit        softcap c: c · tanh(logit / c)        · log2(e), since the kernels' exponentials have base 2

A sink is one more logit of a head: the running maximum begins with it and the running sum with 1, once for all parts of a sequence.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))


def log2_scale(head_dim: int, scale: float | None, softcap: float = 0.0) -> float:
    """Returns what a kernel multiplies products by: `scale`, head_dim ** -0.5 where it is None, in units of log2; before `capped` what
    that takes."""
    scale = head_dim**-0.5 if scale is None else scale
    return math.log2(math.e) * (2.0 * scale / softcap if softcap else scale)


@triton.jit
def capped(x, SOFTCAP: tl.constexpr):
    """SOFTCAP · tanh(logit / SOFTCAP) in units of log2, from x = 2 · log2(e) · logit / SOFTCAP."""
    LIMIT: tl.constexpr = SOFTCAP * LOG2_E
    # Nothing more is to be seen beyond 2 ** 80; NaN stays what it is.
    return LIMIT - 2.0 * LIMIT / (tl.exp2(tl.where(x > 80.0, 80.0, x)) + 1.0)
