"""Attention over the block pool in plain torch and float64: what the kernels of a device are held against."""

from __future__ import annotations

import torch

from twostep.model.step.kv_cache import KvCache


def paged_attention(
    query: torch.Tensor,
    cache: KvCache,
    layer: int,
    block_table: torch.Tensor,
    length: int,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one sequence's last T tokens.

    query        [T, num_heads, D] of the tokens at positions length - T .. length - 1, whose keys and values are in the pool
    block_table  integer [at least ceil(length / block_size)]
    scale        of the scores; D ** -0.5 where it is None
    window       keys that a query sees, its own included; 0: all
    softcap      c: a score x counts as c * tanh(x / c); 0: as it is
    sinks        [num_heads]: a score more in each head's softmax
    Returns float64 [T, num_heads, D]; zeros where `length` is 0.
    """
    num_tokens, num_heads, head_dim = query.shape
    if not length:
        return query.double() * 0
    shape = cache.shape
    blocks = cache.numbers(layer, block_table[: -(-length // shape.block_size)].long())
    kv = blocks.permute(1, 2, 0, 3, 4).reshape(2, shape.num_kv_heads, -1, head_dim)[:, :, :length]
    # A token's rows in order: [kv_head, head of its group].
    rows = query.double().view(num_tokens, shape.num_kv_heads, -1, head_dim)
    position = torch.arange(length - num_tokens, length, device=query.device)[:, None]
    key = torch.arange(length, device=query.device)
    hidden = key > position
    if window:
        hidden |= key <= position - window
    score = torch.einsum("thgd,hkd->thgk", rows, kv[0].double()) * (head_dim**-0.5 if scale is None else scale)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(hidden[:, None, None, :], -torch.inf)
    if sinks is not None:
        sink = sinks.double().view(1, shape.num_kv_heads, -1, 1).expand(num_tokens, -1, -1, -1)
        score = torch.cat((score, sink), -1)
    weight = score.softmax(-1)[..., :length]
    # Outside the window a slot may hold anything.
    value = kv[1].double().masked_fill(hidden.all(0)[:, None], 0.0)
    return torch.einsum("thgk,hkd->thgd", weight, value).reshape(num_tokens, num_heads, head_dim)
