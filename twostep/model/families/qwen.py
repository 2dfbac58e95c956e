"""Qwen2 (biases on q, k and v) and Qwen3 (norms on each head of q and k) as variations of the llama decoder (Qwen team, technical reports
of 2024 and 2025)."""

from __future__ import annotations

from twostep.checkpoint.fields import Fields
from twostep.model.families.attention import Attention
from twostep.model.families.config import ModelConfig, WindowRule
from twostep.model.families.llama import Llama, parse_relative


class Qwen2(Llama):
    """Differs from Llama by `qkv_bias` alone, which the config carries."""

    architecture = "qwen2"
    supported = "as Llama, biases on q, k and v; windows by `use_sliding_window` with `max_window_layers` or `layer_types`"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        return parse_relative(cls.architecture, fields, dtype, windows=WindowRule.SWITCHED, null_kv_heads=True, qkv_bias=True)


class Qwen3(Llama):
    architecture = "qwen3"
    supported = "as Llama, `attention_bias`, norms of heads; windows as Qwen2's"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        bias = fields.boolean("attention_bias", False)
        return parse_relative(
            cls.architecture, fields, dtype, windows=WindowRule.SWITCHED, null_kv_heads=True, head_dim=128, qkv_bias=bias, o_bias=bias
        )

    def _attention(self) -> Attention:
        c, make = self.config, self._make
        return Attention(c, make, qk_norms=(make.rms_norm(c.head_dim), make.rms_norm(c.head_dim)))
