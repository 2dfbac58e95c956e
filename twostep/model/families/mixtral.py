"""Mixtral (Jiang et al., Mixtral of Experts, 2024, arXiv 2401.04088): Mistral with a mixture of experts in every layer, of which a softmax
picks the best two, whose weights are made to add up to 1."""

from __future__ import annotations

from dataclasses import replace

from twostep.checkpoint.fields import Fields
from twostep.model.families.config import ExpertsConfig, ModelConfig, WindowRule
from twostep.model.families.experts import ExpertNames, parse_router
from twostep.model.families.layers import DecoderLayer
from twostep.model.families.llama import Llama, parse_relative

_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "block_sparse_moe")


class Mixtral(Llama):
    architecture = "mixtral"
    supported = "as Mistral, all MLPs [mixtures of experts](#mixtures-of-experts)"
    expert_names = ExpertNames(gate="w1", up="w3", down="w2")

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        fields.take("router_jitter_noise", None)  # of training
        router = parse_router(fields, "num_local_experts", renormalize=True)
        # Mistral's window goes without saying, Mixtral's does not.
        windows = WindowRule.ALL if fields.has("sliding_window") else WindowRule.NONE
        config = parse_relative(cls.architecture, fields, dtype, windows=windows, norm_eps=1e-5, theta=1e6, null_head_dim=True)
        experts = ExpertsConfig(router=router, layers=(True,) * config.num_layers, intermediate_size=config.intermediate_size)
        return replace(config, experts=experts)

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        norms = make.rms_norm(c.hidden_size), make.rms_norm(c.hidden_size)
        return DecoderLayer(index, norms[0], self._attention(), norms[1], self._mlp(index), names=_PARTS)
