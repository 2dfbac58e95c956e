"""Pools whose unwritten slots are NaN, and how near a kernel must come to its oracle."""

from __future__ import annotations

from typing import Any

import torch
from attention_oracle import Rounding, unit

from twostep.engine.batch import KvShape
from twostep.model.step.kv_cache import KvCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype: torch.dtype, *, roundings: int = 1) -> dict[str, Any]:
    """Of numbers about as large as 1, rounded so many times to the format, behind a float32 sum."""
    step = roundings * unit(dtype) + 32 * unit(torch.float32)
    return {"rtol": step, "atol": step}


def decode_rounding(cache: KvCache, query: torch.dtype) -> Rounding:
    """Returns what decode attention rounds: over quantized blocks, queries and weights to float16, which holds a bfloat16's digits. Through
    the interpreter all but queries stays in float32."""
    products = torch.float16 if cache.quantized is not None else cache.dtype
    queries = torch.float16 if cache.quantized is not None and query == torch.float32 else None
    return Rounding(queries=queries, weights=products if DEVICE == "cuda" else None)


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
