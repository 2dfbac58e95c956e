"""GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019): learned positions, LayerNorm, biases, a plain MLP; a
checkpoint has its weights as [in, out], and q, k and v as one."""

from __future__ import annotations

from collections.abc import Mapping

from twostep.checkpoint.directory import MAX_MODEL_LEN, MAX_VOCAB_SIZE
from twostep.checkpoint.fields import Fields
from twostep.model.families.attention import Attention
from twostep.model.families.config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelConfig, parse_activation
from twostep.model.families.decoder import Decoder
from twostep.model.families.fused import Fused, fused
from twostep.model.families.layers import DecoderLayer
from twostep.model.families.mlp import PlainMlp
from twostep.model.families.modules import Norm


class Gpt2(Decoder):
    architecture = "gpt2"
    supported = "learned positions, LayerNorm first, plain MLP; not with `scale_attn_by_inverse_layer_idx` or `add_cross_attention`"
    embed_name = "transformer.wte"
    layers_name = "transformer.h"
    norm_name = "transformer.ln_f"
    positions_name = "transformer.wpe"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        fields.expect("scale_attn_weights", True, default=True)
        fields.take("reorder_and_upcast_attn", None)  # the same numbers, in another order
        hidden_size = fields.positive_int("n_embd", MAX_WIDTH)
        num_heads = fields.positive_int("n_head", MAX_HEADS)
        if hidden_size % num_heads:
            fields.refuse("n_embd", hidden_size, f"it must be a multiple of n_head ({num_heads})")
        num_layers = fields.positive_int("n_layer", MAX_LAYERS)
        num_positions = fields.positive_int("n_positions", MAX_MODEL_LEN)
        if (old := fields.take("n_ctx", None)) not in (None, num_positions):
            fields.refuse("n_ctx", old, f"it contradicts n_positions ({num_positions})")
        inner = fields.positive_int("n_inner", MAX_WIDTH) if fields.peek("n_inner") is not None else 4 * hidden_size
        return ModelConfig(
            architecture=cls.architecture,
            vocab_size=fields.positive_int("vocab_size", MAX_VOCAB_SIZE),
            hidden_size=hidden_size,
            intermediate_size=inner,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            norm_eps=fields.positive_float("layer_norm_epsilon", 1e-5),
            rope=None,
            num_positions=num_positions,
            windows=(0,) * num_layers,
            max_model_len=num_positions,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            gated_mlp=False,
            activation=parse_activation(fields, "activation_function", "gelu_new"),
            dtype=dtype,
        )

    @classmethod
    def fused(cls, config: ModelConfig) -> Mapping[str, Fused]:
        width = config.hidden_size
        alone = {"attn.c_proj": width, "mlp.c_fc": config.intermediate_size, "mlp.c_proj": width}
        found = fused("attn.c_attn", {f"attn.{each}_proj": width for each in "qkv"}, turned=True)
        for name, rows in alone.items():
            found |= fused(name, {name: rows}, turned=True)
        return found

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        return DecoderLayer(
            index,
            make.layer_norm(c.hidden_size),
            Attention(c, make, names=("q_proj", "k_proj", "v_proj", "c_proj")),
            make.layer_norm(c.hidden_size),
            PlainMlp(c, make, names=("c_fc", "c_proj")),
            names=("ln_1", "attn", "ln_2", "mlp"),
        )

    def _last_norm(self) -> Norm:
        return self._make.layer_norm(self.config.hidden_size)
