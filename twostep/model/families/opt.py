"""OPT (Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022): learned positions, LayerNorm, a plain ReLU MLP."""

from __future__ import annotations

from twostep.checkpoint.directory import MAX_MODEL_LEN, MAX_VOCAB_SIZE
from twostep.checkpoint.fields import Fields
from twostep.model.families.attention import Attention
from twostep.model.families.config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelConfig
from twostep.model.families.decoder import Decoder
from twostep.model.families.layers import DecoderLayer
from twostep.model.families.mlp import PlainMlp
from twostep.model.families.modules import Norm


class Opt(Decoder):
    architecture = "opt"
    supported = "learned positions, LayerNorm first, ReLU, `enable_bias`; not with its own `word_embed_proj_dim` or norms last (opt-350m)"
    embed_name = "model.decoder.embed_tokens"
    layers_name = "model.decoder.layers"
    norm_name = "model.decoder.final_layer_norm"
    positions_name = "model.decoder.embed_positions"
    positions_start = 2  # the first rows stand for padding

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        fields.expect("activation_function", "relu", default="relu")
        fields.expect("do_layer_norm_before", True, default=True)
        fields.expect("layer_norm_elementwise_affine", True, default=True)
        fields.expect("_remove_final_layer_norm", False, default=False)
        hidden_size = fields.positive_int("hidden_size", MAX_WIDTH)
        if (projected := fields.take("word_embed_proj_dim", None)) not in (None, hidden_size):
            fields.refuse("word_embed_proj_dim", projected, f"only that of hidden_size ({hidden_size}) is supported")
        num_heads = fields.positive_int("num_attention_heads", MAX_HEADS)
        if hidden_size % num_heads:
            fields.refuse("hidden_size", hidden_size, f"it must be a multiple of num_attention_heads ({num_heads})")
        num_layers = fields.positive_int("num_hidden_layers", MAX_LAYERS)
        num_positions = fields.positive_int("max_position_embeddings", MAX_MODEL_LEN)
        bias = fields.boolean("enable_bias", True)
        return ModelConfig(
            architecture=cls.architecture,
            vocab_size=fields.positive_int("vocab_size", MAX_VOCAB_SIZE),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("ffn_dim", MAX_WIDTH),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            norm_eps=1e-5,  # torch's default, which transformers uses
            rope=None,
            num_positions=num_positions,
            windows=(0,) * num_layers,
            max_model_len=num_positions,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            gated_mlp=False,
            activation="relu",
            dtype=dtype,
        )

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        return DecoderLayer(
            index,
            make.layer_norm(c.hidden_size),
            Attention(c, make, names=("q_proj", "k_proj", "v_proj", "out_proj")),
            make.layer_norm(c.hidden_size),
            PlainMlp(c, make, names=("fc1", "fc2")),
            names=("self_attn_layer_norm", "self_attn", "final_layer_norm", ""),
        )

    def _last_norm(self) -> Norm:
        return self._make.layer_norm(self.config.hidden_size)
