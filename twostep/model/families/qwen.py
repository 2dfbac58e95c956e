"""Qwen2 (biases on q, k and v) and Qwen3 (norms on each head of q and k) as variations of the llama decoder."""

from __future__ import annotations

import torch

from twostep.checkpoint.fields import Fields
from twostep.model.families.config import ModelConfig, WindowRule
from twostep.model.families.llama import Llama, LlamaLayer, parse_relative
from twostep.model.families.modules import Maker, Places
from twostep.model.kernels.ops import AttentionPlan


class Qwen2(Llama):
    """Differs from Llama by `qkv_bias` alone, which the config carries."""

    architecture = "qwen2"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        return parse_relative(cls.architecture, fields, dtype, windows=WindowRule.SWITCHED, qkv_bias=True)


class Qwen3Layer(LlamaLayer):
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
    architecture = "qwen3"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        bias = fields.boolean("attention_bias", False)
        return parse_relative(
            cls.architecture, fields, dtype, windows=WindowRule.SWITCHED, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True
        )

    def _layer(self, index: int) -> Qwen3Layer:
        return Qwen3Layer(index, self.config, self._make)
