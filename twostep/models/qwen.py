"""Qwen2 (biases on q, k and v) and Qwen3 (norms on each head of q and k) as variations of the llama decoder."""

from __future__ import annotations

import torch

from twostep.kernels.ops import AttentionPlan
from twostep.models.llama import Llama, _Layer


class Qwen2(Llama):
    """Differs from Llama by `qkv_bias` alone, which the config carries."""


class Qwen3(Llama):
    def _attend(self, index: int, layer: _Layer, plan: AttentionPlan, normed: torch.Tensor) -> torch.Tensor:
        c = self.config
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        qkv = layer.qkv(normed)
        heads = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        query, key = heads[:, : c.num_heads], heads[:, c.num_heads : c.num_heads + c.num_kv_heads]
        query.copy_(self._ops.rms_norm(query, layer.q_norm, c.rms_norm_eps))
        key.copy_(self._ops.rms_norm(key, layer.k_norm, c.rms_norm_eps))
        plan.rotate_and_write(index, qkv)
        return plan.attend(index, qkv)
