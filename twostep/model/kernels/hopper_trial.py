"""A trial of Hopper's kernels for chunks on the card at hand, before they serve: what no interpreter runs has to agree with the portable
kernel once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from twostep.engine.batch import KvShape
from twostep.model.kernels import triton_prefill
from twostep.model.kernels.hopper_prefill import hopper_attention
from twostep.model.kernels.hopper_prefill_quantized import hopper_quantized_attention
from twostep.model.kernels.triton_launch import num_sms_of
from twostep.model.step.kv_cache import KvCache

# Tokens of a chunk, and of all up to its end; and how far apart sums in another order may be.
_CHUNK, _KEYS, _DIFFERENCE = 300, 700, 2e-2


def trial(kv: KvShape, num_heads: int, device: torch.device, *, softcap: float = 0.0, sinks: bool = False) -> str:
    """Attends a chunk over random blocks of this kind, beside the portable kernel, as AttentionSpec has softcap and sinks. Empty, or what
    is wrong."""
    num_blocks = -(-_KEYS // kv.block_size)
    cache = KvCache(replace(kv, num_blocks=num_blocks, num_layers=1), str(device))
    cache.fill_random(num_blocks)
    generator = torch.Generator(device).manual_seed(0)
    columns = (num_heads + 2 * kv.num_kv_heads) * kv.head_dim
    qkv = torch.randn(_CHUNK, columns, generator=generator, device=device).to(cache.dtype)
    logits: dict[str, Any] = {"softcap": softcap}
    if sinks:
        # Some that hardly count, and some that take most of the softmax.
        logits["sinks"] = torch.linspace(-4.0, 8.0, num_heads, device=device)
    share = num_heads // kv.num_kv_heads
    portable = triton_prefill.tile_shape(cache.dtype, kv.head_dim, share, _CHUNK, quantized=cache.quantized is not None)
    attention = hopper_attention if cache.quantized is None else hopper_quantized_attention
    outs = [qkv.new_empty(_CHUNK, num_heads * kv.head_dim) for _ in range(2)]

    def inputs(tokens: int) -> dict[str, Any]:
        tiles = triton_prefill.plan_tiles(np.array([_CHUNK], np.int64), np.array([_KEYS], np.int64), tokens)
        given = {"query_start": [0, _CHUNK], "seq_lens": [_KEYS], "block_tables": [list(range(num_blocks))]}
        sent = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in given.items()}
        return sent | logits | {"num_heads": num_heads, "tiles": torch.from_numpy(tiles).to(device)}

    try:
        triton_prefill.prefill_attention(qkv, outs[0], cache, 0, shape=portable, **inputs(portable.num_rows // share))
        attention(qkv, outs[1], cache, 0, num_programs=num_sms_of(device), **inputs(triton_prefill.HOPPER_ROWS // share))
        want, got = (out.float() for out in outs)
        difference = float((got - want).norm() / want.norm())
    except Exception as error:  # noqa: BLE001 - whatever a compiler or driver raises: this card does without
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "" if difference < _DIFFERENCE else f"it differs from the portable kernel by {difference:.1e}"
