"""GPT-NeoX and Pythia (Black et al., GPT-NeoX-20B, 2022; Biderman et al., Pythia, 2023): attention and MLP beside each other, LayerNorm,
biases, heads that turn in part; a checkpoint has q, k and v of each head in turn."""

from __future__ import annotations

from collections.abc import Mapping

from twostep.checkpoint.context import context_of, rope_of
from twostep.checkpoint.directory import MAX_VOCAB_SIZE
from twostep.checkpoint.fields import Fields
from twostep.model.families.attention import Attention
from twostep.model.families.config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelConfig, parse_activation
from twostep.model.families.decoder import Decoder
from twostep.model.families.fused import Fused, fused
from twostep.model.families.layers import DecoderLayer, ParallelLayer
from twostep.model.families.mlp import PlainMlp
from twostep.model.families.modules import Norm
from twostep.model.families.rope import parse_rope

# GPT-NeoX's own name of what others call rope_theta and partial_rotary_factor, that name, and what it is where the file does not say.
_ROPE = (("rotary_emb_base", "rope_theta", 10000.0), ("rotary_pct", "partial_rotary_factor", 0.25))


def _own(fields: Fields, key: str, usual: str, default: float) -> float:
    """Takes one of _ROPE by both names, of which transformers reads the first alone."""
    _, parameters = rope_of(fields.whole)
    if isinstance(parameters, dict) and parameters.get(usual) is not None:
        # What stands there counts.
        default = fields.optional_float(key) or default
    else:
        default = fields.positive_float(key, default)
    if fields.take(usual, None) not in (None, default):
        fields.refuse(usual, fields.whole[usual], f"GPT-NeoX's own key is {key}, and makes it {default}; keep that one")
    return default


class GptNeox(Decoder):
    architecture = "gpt_neox"
    supported = "parallel residual or not (`use_parallel_residual`), `rotary_pct`, `attention_bias`, plain MLP"
    embed_name = "gpt_neox.embed_in"
    layers_name = "gpt_neox.layers"
    norm_name = "gpt_neox.final_layer_norm"
    head_name = "embed_out"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        hidden_size = fields.positive_int("hidden_size", MAX_WIDTH)
        num_heads = fields.positive_int("num_attention_heads", MAX_HEADS)
        if hidden_size % num_heads:
            fields.refuse("hidden_size", hidden_size, f"it must be a multiple of num_attention_heads ({num_heads})")
        num_layers = fields.positive_int("num_hidden_layers", MAX_LAYERS)
        max_model_len = context_of(fields.whole, fields.path)
        fields.take("max_position_embeddings", None)
        theta, turned = (_own(fields, *names) for names in _ROPE)
        head_dim = hidden_size // num_heads
        bias = fields.boolean("attention_bias", True)
        return ModelConfig(
            architecture=cls.architecture,
            vocab_size=fields.positive_int("vocab_size", MAX_VOCAB_SIZE),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("intermediate_size", MAX_WIDTH),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            norm_eps=fields.positive_float("layer_norm_eps", 1e-5),
            rope=parse_rope(fields, max_model_len, head_dim=head_dim, theta=theta, turned=turned),
            num_positions=0,
            windows=(0,) * num_layers,
            max_model_len=max_model_len,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=True,
            gated_mlp=False,
            activation=parse_activation(fields, "hidden_act", "gelu"),
            parallel_residual=fields.boolean("use_parallel_residual", True),
            dtype=dtype,
        )

    @classmethod
    def fused(cls, config: ModelConfig) -> Mapping[str, Fused]:
        return fused("attention.query_key_value", {f"attention.{each}_proj": config.head_dim for each in "qkv"})

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        kind = ParallelLayer if c.parallel_residual else DecoderLayer
        return kind(
            index,
            make.layer_norm(c.hidden_size),
            Attention(c, make, names=("q_proj", "k_proj", "v_proj", "dense")),
            make.layer_norm(c.hidden_size),
            PlainMlp(c, make, names=("dense_h_to_4h", "dense_4h_to_h")),
            names=("input_layernorm", "attention", "post_attention_layernorm", "mlp"),
        )

    def _last_norm(self) -> Norm:
        return self._make.layer_norm(self.config.hidden_size)
