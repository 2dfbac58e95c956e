"""Qwen2 (biases on q, k and v) and Qwen3 (norms on each head of q and k) as variations of the llama decoder."""

from __future__ import annotations

import torch

from twostep.model.families.config import ModelConfig
from twostep.model.families.llama import Llama, LlamaLayer
from twostep.model.families.modules import Maker
from twostep.model.kernels.ops import AttentionPlan
from twostep.model.loading.places import Places


class Qwen2(Llama):
    """Differs from Llama by `qkv_bias` alone, which the config carries."""


class _Qwen3Layer(LlamaLayer):
    def __init__(self, index: int, config: ModelConfig, make: Maker) -> None:
        super().__init__(index, config, make)
        self._q_norm = make.rms_norm(config.head_dim)
        self._k_norm = make.rms_norm(config.head_dim)

    def place(self, places: Places, prefix: str) -> None:
        super().place(places, prefix)
        self._q_norm.place(places, f"{prefix}.self_attn.q_norm")
        self._k_norm.place(places, f"{prefix}.self_attn.k_norm")

    def attend(self, plan: AttentionPlan, qkv: torch.Tensor) -> torch.Tensor:
        c = self.config
        heads = qkv.view(-1, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        query, key = heads[:, : c.num_heads], heads[:, c.num_heads : c.num_heads + c.num_kv_heads]
        query.copy_(self._q_norm(query))
        key.copy_(self._k_norm(key))
        return super().attend(plan, qkv)


class Qwen3(Llama):
    def _layer(self, index: int) -> _Qwen3Layer:
        return _Qwen3Layer(index, self.config, self._make)
