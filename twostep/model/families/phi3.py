"""Phi-3 and Phi-4 (Abdin et al., Phi-3 Technical Report, 2024, arXiv 2404.14219): Llama's layers; a checkpoint has q, k and v as one layer,
and gate and up as one; heads may turn in part, and long contexts by LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping

from twostep.checkpoint.context import context_of, rope_of
from twostep.checkpoint.directory import MAX_MODEL_LEN
from twostep.checkpoint.fields import Fields
from twostep.model.families.config import ModelConfig, WindowRule
from twostep.model.families.fused import Fused, fused
from twostep.model.families.llama import Llama, coming_head_dim, parse_relative
from twostep.model.families.rope import LongRopeScaling, parse_rope

_ORIGINAL = 4096


class Phi3(Llama):
    architecture = "phi3"
    supported = "fused q, k, v and gate, up; `partial_rotary_factor`, `longrope`; `sliding_window` (in all layers) or null"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        # Phi-4-mini's files say so; transformers knows neither.
        for key in ("full_attn_mod", "interpolate_factor"):
            fields.expect(key, 1, default=1)
        key = "original_max_position_embeddings"
        original = fields.positive_int(key, MAX_MODEL_LEN) if fields.has(key) else _ORIGINAL
        turned = fields.positive_float("partial_rotary_factor", 1.0)
        longest = context_of(fields.whole, fields.path)
        rope = parse_rope(fields, longest, head_dim=coming_head_dim(fields), turned=turned, original=original)
        if not (rope.scaling is None or isinstance(rope.scaling, LongRopeScaling)):
            fields.refuse(*rope_of(fields.whole), "only longrope is supported")
        return parse_relative(
            cls.architecture,
            fields,
            dtype,
            windows=WindowRule.ALL,
            window=None,
            names_kv_heads=False,
            null_kv_heads=True,
            norm_eps=1e-5,
            rope=rope,
        )

    @classmethod
    def fused(cls, config: ModelConfig) -> Mapping[str, Fused]:
        rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"self_attn.q_proj": rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
        gate_up = {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size}
        return fused("self_attn.qkv_proj", qkv) | fused("mlp.gate_up_proj", gate_up)
