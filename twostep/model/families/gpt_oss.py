"""gpt-oss (OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, 2025, arXiv 2508.10925): llama's layers with biases, a sink beside each head's
keys, windows in every other layer, and a mixture of experts with clamped gates in every layer.

A checkpoint has a layer's experts in one tensor (twostep/checkpoint/stacked.py), gates and what they gate by turns:

    gate 0, up 0, gate 1, up 1, …
"""

from __future__ import annotations

from dataclasses import replace

import torch

from twostep.checkpoint.fields import Fields
from twostep.checkpoint.usual_keys import GPT_OSS_ROPE
from twostep.model.families.attention import Attention
from twostep.model.families.config import ExpertsConfig, ModelConfig, WindowRule
from twostep.model.families.experts import ExpertNames, parse_router
from twostep.model.families.llama import Llama, parse_relative
from twostep.model.families.modules import Cut, Maker, Place, Places
from twostep.model.kernels.experts import ClampedGate, Scores
from twostep.model.kernels.torch_attention import AttentionSpec

_DEFAULT_WINDOW = 128


class SinkAttention(Attention):
    """One more logit of each head takes its part of the softmax."""

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        super().__init__(config, make)
        self.sinks = torch.empty(config.num_heads, dtype=torch.float32, device=make.device)

    def place(self, places: Places, name: str) -> None:
        super().place(places, name)
        places[f"{name}.sinks"] = Place.whole(self.sinks, Cut.HEADS)


class GptOss(Llama):
    architecture = "gpt_oss"
    supported = "sinks, biases, windows by `layer_types`, YaRN with `truncate`, experts with clamped gates, in MXFP4 or not"
    expert_names = ExpertNames(router="router", gate_up="gate_up_proj")

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        gate = ClampedGate(alpha=fields.positive_float("swiglu_alpha", 1.702), limit=fields.positive_float("swiglu_limit", 7.0))
        router = parse_router(fields, "num_local_experts", renormalize=False)
        # The first releases' name of the same.
        if fields.take("experts_per_token", router.top_k) != router.top_k:
            fields.refuse("experts_per_token", fields.whole["experts_per_token"], f"it contradicts num_experts_per_tok ({router.top_k})")
        fields.take("initial_context_length", None)  # rope's original_max_position_embeddings says it
        bias = fields.boolean("attention_bias", True)
        config = parse_relative(
            cls.architecture,
            fields,
            dtype,
            windows=WindowRule.PATTERN,
            window=_DEFAULT_WINDOW,
            period=2,
            head_dim=64,
            norm_eps=1e-5,
            theta=150000.0,
            default_rope=GPT_OSS_ROPE,
            qkv_bias=bias,
            o_bias=bias,
        )
        experts = ExpertsConfig(
            router=replace(router, scores=Scores.CHOSEN),
            layers=(True,) * config.num_layers,
            intermediate_size=config.intermediate_size,
            biased=True,
            clamped=gate,
        )
        return replace(config, experts=experts)

    def _attention(self) -> Attention:
        return SinkAttention(self.config, self._make)

    def _attention_spec(self, device: str) -> AttentionSpec:
        sinks = [layer.attention.sinks for layer in self._layers if isinstance(layer.attention, SinkAttention)]
        return replace(super()._attention_spec(device), sinks=sinks)
