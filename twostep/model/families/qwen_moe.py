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

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        return _with_experts(cls.architecture, fields, dtype, qkv_bias=fields.boolean("qkv_bias", True), is_shared=True)


class Qwen3Moe(Qwen3):
    architecture = "qwen3_moe"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        bias = fields.boolean("attention_bias", False)
        return _with_experts(cls.architecture, fields, dtype, qkv_bias=bias, o_bias=bias)


def _with_experts(
    architecture: str, fields: Fields, dtype: str, *, qkv_bias: bool, o_bias: bool = False, is_shared: bool = False
) -> ModelConfig:
    # transformers' own windows of these two agree neither with each other nor with Qwen2's, and no published model has one.
    if fields.peek("use_sliding_window"):
        fields.refuse("use_sliding_window", True, f"{architecture} is supported without windows; set it to false")
    renormalize = fields.boolean("norm_topk_prob", False)
    # transformers 5 saves Qwen3's under Mixtral's name.
    other = "num_local_experts"
    if fields.has(other) and fields.has("num_experts") and fields.peek(other) != fields.peek("num_experts"):
        fields.refuse(other, fields.peek(other), f"it contradicts num_experts ({fields.peek('num_experts')}); keep one of them")
    key = "num_experts" if fields.has("num_experts") else other
    router = parse_router(fields, key, renormalize=renormalize)
    fields.take(other, None)
    size = fields.positive_int("moe_intermediate_size", MAX_WIDTH)
    shared_size = fields.positive_int("shared_expert_intermediate_size", MAX_WIDTH) if is_shared else 0
    step = fields.positive_int("decoder_sparse_step", MAX_LAYERS) if fields.has("decoder_sparse_step") else 1
    dense = fields.take("mlp_only_layers", None) or []
    config = parse_relative(architecture, fields, dtype, windows=WindowRule.SWITCHED, qkv_bias=qkv_bias, o_bias=o_bias)
    if not isinstance(dense, list) or any(isinstance(i, bool) or i not in range(config.num_layers) for i in dense):
        fields.refuse("mlp_only_layers", dense, f"it must be a list of layers, from 0 to {config.num_layers - 1}")
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_layers))
    if not any(layers):
        fields.refuse("decoder_sparse_step", step, f"no layer has experts; {architecture} without experts has another name")
    experts = ExpertsConfig(router=router, layers=layers, intermediate_size=size, shared_size=shared_size, shared_gated=is_shared)
    return replace(config, experts=experts)
