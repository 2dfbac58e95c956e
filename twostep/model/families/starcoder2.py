"""StarCoder2 (Lozhkov et al., StarCoder 2 and The Stack v2, 2024): Llama's layers with LayerNorm, biases and a plain MLP."""

from __future__ import annotations

from dataclasses import replace

from twostep.checkpoint.fields import Fields
from twostep.model.families.config import ModelConfig, WindowRule, parse_activation
from twostep.model.families.layers import DecoderLayer
from twostep.model.families.llama import Llama, parse_relative
from twostep.model.families.mlp import PlainMlp
from twostep.model.families.modules import Norm


class Starcoder2(Llama):
    architecture = "starcoder2"
    supported = "LayerNorm, `use_bias`, plain MLP; `sliding_window` (in all layers) or null"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        for key, only in (("mlp_type", "default"), ("norm_type", "layer_norm"), ("scale_attn_weights", True)):
            fields.expect(key, only, default=only)
        # Left over from training: what counts are hidden_act and norm_epsilon, and softmax is in float32 anyway.
        for key in ("activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
            fields.take(key, None)
        bias = fields.boolean("use_bias", True)
        config = parse_relative(
            cls.architecture,
            fields,
            dtype,
            windows=WindowRule.ALL,
            window=None,
            norm_eps=1e-5,
            norm_key="norm_epsilon",
            tied=True,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            activation=parse_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        )
        return replace(config, gated_mlp=False)

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        mlp = PlainMlp(c, make, names=("c_fc", "c_proj"))
        return DecoderLayer(index, make.layer_norm(c.hidden_size), self._attention(), make.layer_norm(c.hidden_size), mlp)

    def _last_norm(self) -> Norm:
        return self._make.layer_norm(self.config.hidden_size)
