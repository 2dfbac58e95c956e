"""Latent attention (MLA): what a token keeps, and the two ways to attend to it (DeepSeek-V2, 2024, arXiv 2405.04434, section 2.1).

    pool, per token and layer   c: latent, normed │ r: rope, rotated, one for all heads
    head h of a key             W_UK[h] · c │ r                  of a value   W_UV[h] · c
    head h of a query           q_nope │ q_rope, rotated

expanded   keys and values of each head are made from the pool, once for all queries of a chunk: few numbers a query and key
absorbed   (W_UK[h]ᵀ · q_nope │ q_rope) · (c │ r): all heads attend to what the pool has, whose first numbers are the values, and W_UV[h]
           is applied to what comes of it: no key is ever made

Rotated pairs are stored as halves, whichever way the model has them: only products of two such vectors matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDims:
    """Numbers of each part.

    nope, rope   of a query head: without a position, and turned by it
    value        of a value head
    latent       of what keys and values are made of
    interleaved  the two numbers of a pair that turns lie beside each other; False: in two halves
    """

    nope: int
    rope: int
    value: int
    latent: int
    interleaved: bool = True

    @property
    def query(self) -> int:
        return self.nope + self.rope

    @property
    def kept(self) -> int:
        """What a token keeps: the head_dim of the pool."""
        return self.latent + self.rope


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """One layer's.

    norm  [latent], of an RMS norm with `eps`
    up    [num_heads, nope + value, latent]: W_UK over W_UV, as kv_b_proj has them
    """

    norm: torch.Tensor
    eps: float
    up: torch.Tensor


def expands(num_queries: npt.NDArray[np.int64], num_keys: npt.NDArray[np.int64], dims: LatentDims) -> bool:
    """Returns whether it costs fewer multiplications of a head to make the keys and values of some chunks than to absorb their queries,
    which then meet more than twice as many numbers of each key."""
    made = dims.latent * (dims.nope + dims.value)
    pairs = num_queries * num_keys
    expanded = made * num_keys + pairs * (dims.query + dims.value)
    return bool(expanded.sum() < (made * num_queries + pairs * (dims.kept + dims.latent)).sum())


def absorb(query: torch.Tensor, weights: LatentWeights, dims: LatentDims) -> torch.Tensor:
    """query [T, num_heads * dims.query], rows dense. Returns [T, num_heads, dims.kept], of which the last dims.rope are not written."""
    up = weights.up
    heads = query.view(len(query), len(up), dims.query)
    out = query.new_empty(len(query), len(up), dims.kept)
    torch.bmm(heads[..., : dims.nope].transpose(0, 1), up[:, : dims.nope], out=out[..., : dims.latent].transpose(0, 1))
    return out


def values_of(attended: torch.Tensor, weights: LatentWeights, dims: LatentDims) -> torch.Tensor:
    """attended [T, num_heads, dims.latent], weighted latents. Returns [T, num_heads * dims.value]."""
    out = attended.new_empty(len(attended), len(weights.up), dims.value)
    torch.bmm(attended.transpose(0, 1), weights.up[:, dims.nope :].transpose(1, 2), out=out.transpose(0, 1))
    return out.view(len(attended), -1)
