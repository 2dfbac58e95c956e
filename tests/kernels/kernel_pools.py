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


def poisoned_pool(dtype: torch.dtype, *, num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int) -> KvCache:
    shape = KvShape(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
    )
    cache = KvCache(shape, DEVICE)
    cache.tensor.fill_(torch.nan)
    return cache
