"""Pools whose unwritten slots are NaN, and how near a kernel must come to its oracle."""

from __future__ import annotations

from typing import Any

import torch

from twostep.engine.batch import KvShape
from twostep.model.step.kv_cache import KvCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype: torch.dtype) -> dict[str, Any]:
    """A few roundings of one value."""
    step = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    return {"rtol": step, "atol": step}


def poisoned_pool(dtype: torch.dtype, *, quantization: str = "none", **sizes: int) -> KvCache:
    """A pool of a KvShape of these sizes. Slots never written are NaN; quantized ones have any bytes but NaN's, and NaN scales."""
    cache = KvCache(KvShape(dtype=str(dtype).removeprefix("torch."), quantization=quantization, **sizes), DEVICE)
    poison(cache)
    return cache


def some_sinks(num_heads: int) -> torch.Tensor:
    """From some that hardly count to some that take most of a softmax."""
    return torch.linspace(-3.0, 6.0, num_heads, device=DEVICE)


def poison(cache: KvCache) -> None:
    if cache.quantized is None:
        cache.tensor.fill_(torch.nan)
    else:
        cache.tensor.copy_(torch.randint(0, 0x7F, cache.tensor.shape, dtype=torch.uint8))
        cache.quantized.scales.fill_(torch.nan)
