"""Qwen2-MoE and Qwen3-MoE (Qwen team, technical reports of 2024 and 2025): Qwen2 and Qwen3 whose layers, all or some, have a mixture of
experts. Qwen2's sends every token to a shared expert as well, as far as a gate of its own lets it through."""

from __future__ import annotations

from dataclasses import replace

from twostep.checkpoint.fields import Fields
from twostep.model.families.config import MAX_LAYERS, MAX_WIDTH, ExpertsConfig, ModelConfig, WindowRule
from twostep.model.families.experts import parse_router
from twostep.model.families.llama import parse_relative
from twostep.model.families.qwen import Qwen2, Qwen3


class Qwen2Moe(Qwen2):
    architecture = "qwen2_moe"
    supported = "as Qwen2 without windows; experts, a shared one with its gate; `decoder_sparse_step`, `mlp_only_layers`, `norm_topk_prob`"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        _expect_no_windows(cls.architecture, fields)
        bias = fields.boolean("qkv_bias", True)
        config = parse_relative(cls.architecture, fields, dtype, windows=WindowRule.SWITCHED, null_kv_heads=True, qkv_bias=bias)
        return replace(config, experts=parse_experts(config, fields, is_shared=True))


class Qwen3Moe(Qwen3):
    architecture = "qwen3_moe"
    supported = "as Qwen3 without windows; experts as Qwen2's, without a shared one"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        bias = fields.boolean("attention_bias", False)
        _expect_no_windows(cls.architecture, fields)
        config = parse_relative(cls.architecture, fields, dtype, windows=WindowRule.SWITCHED, qkv_bias=bias, o_bias=bias)
        return replace(config, experts=parse_experts(config, fields))


def _expect_no_windows(architecture: str, fields: Fields) -> None:
    # transformers' own windows of these two agree neither with each other nor with Qwen2's, and no published model has one.
    if fields.peek("use_sliding_window"):
        fields.refuse("use_sliding_window", True, f"{architecture} is supported without windows; set it to false")


def parse_experts(config: ModelConfig, fields: Fields, *, is_shared: bool = False, renormalize: bool = False) -> ExpertsConfig:
    """Takes what Qwen's configs say of experts. `renormalize`: the default."""
    # transformers 5 saves Qwen3's under Mixtral's name.
    other = "num_local_experts"
    if fields.has(other) and fields.has("num_experts") and fields.peek(other) != fields.peek("num_experts"):
        fields.refuse(other, fields.peek(other), f"it contradicts num_experts ({fields.peek('num_experts')}); keep one of them")
    key = other if fields.has(other) and not fields.has("num_experts") else "num_experts"
    router = parse_router(fields, key, renormalize=fields.boolean("norm_topk_prob", renormalize))
    fields.take(other, None)
    size = fields.positive_int("moe_intermediate_size", MAX_WIDTH)
    shared_size = fields.positive_int("shared_expert_intermediate_size", MAX_WIDTH) if is_shared else 0
    step = fields.positive_int("decoder_sparse_step", MAX_LAYERS) if fields.has("decoder_sparse_step") else 1
    dense = fields.take("mlp_only_layers", None) or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or i not in range(config.num_layers) for i in dense):
        fields.refuse("mlp_only_layers", dense, f"it must be a list of layers, from 0 to {config.num_layers - 1}")
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_layers))
    if not any(layers):
        fields.refuse("decoder_sparse_step", step, f"no layer has experts; {config.architecture} without experts has another name")
    return ExpertsConfig(router=router, layers=layers, intermediate_size=size, shared_size=shared_size, shared_gated=is_shared)
