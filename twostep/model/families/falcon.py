"""Falcon (Almazrouei et al., The Falcon Series of Open Language Models, 2023, arXiv 2311.16867): attention and MLP beside each other,
LayerNorm, a plain MLP; a checkpoint has q, k and v of each KV head in turn. New layers (40B, 180B, 11B) have grouped heads and a norm or
two; old ones (7B) one KV head and one norm."""

from __future__ import annotations

from collections.abc import Mapping

from twostep.checkpoint.context import context_of
from twostep.checkpoint.directory import MAX_MODEL_LEN, MAX_VOCAB_SIZE
from twostep.checkpoint.fields import Fields
from twostep.model.families.attention import Attention
from twostep.model.families.config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelConfig, parse_activation
from twostep.model.families.decoder import Decoder
from twostep.model.families.fused import Fused, fused
from twostep.model.families.layers import DecoderLayer, ParallelLayer
from twostep.model.families.mlp import PlainMlp
from twostep.model.families.modules import Norm
from twostep.model.families.rope import parse_rope


class Falcon(Decoder):
    architecture = "falcon"
    supported = "`new_decoder_architecture` with one norm or two, `multi_query`, `parallel_attn`, `bias`; not with `alibi`"
    embed_name = "transformer.word_embeddings"
    layers_name = "transformer.h"
    norm_name = "transformer.ln_f"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        fields.expect("alibi", False, default=False)
        hidden_size = fields.positive_int("hidden_size", MAX_WIDTH)
        num_heads = fields.positive_int("num_attention_heads", MAX_HEADS)
        if hidden_size % num_heads or hidden_size // num_heads % 2:
            fields.refuse("hidden_size", hidden_size, f"it must be an even multiple of num_attention_heads ({num_heads})")
        num_layers = fields.positive_int("num_hidden_layers", MAX_LAYERS)
        max_model_len = context_of(fields.whole, fields.path)
        if fields.has("max_position_embeddings"):
            fields.positive_int("max_position_embeddings", MAX_MODEL_LEN)
        inner = fields.positive_int("ffn_hidden_size", MAX_WIDTH) if fields.peek("ffn_hidden_size") is not None else 4 * hidden_size
        if (factor := fields.take("ff_factor", None)) not in (None, inner / hidden_size):
            fields.refuse("ff_factor", factor, f"it contradicts ffn_hidden_size ({inner})")
        num_kv_heads, parallel = _num_kv_heads(fields, num_heads), fields.boolean("parallel_attn", True, null=False)
        is_new = fields.boolean("new_decoder_architecture", False, null=False)
        num_norms = fields.take("num_ln_in_parallel_attn", None) or (2 if is_new or not parallel else 1)
        if is_new and not parallel:
            fields.refuse("parallel_attn", parallel, "layers of new_decoder_architecture are parallel")
        if num_norms not in ((1, 2) if is_new else (1 if parallel else 2,)):
            fields.refuse("num_ln_in_parallel_attn", num_norms, "supported are 1 and 2, with new_decoder_architecture")
        bias = fields.boolean("bias", False, null=False)
        return ModelConfig(
            architecture=cls.architecture,
            vocab_size=fields.positive_int("vocab_size", MAX_VOCAB_SIZE),
            hidden_size=hidden_size,
            intermediate_size=inner,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=hidden_size // num_heads,
            norm_eps=fields.positive_float("layer_norm_epsilon", 1e-5),
            rope=parse_rope(fields, max_model_len, head_dim=hidden_size // num_heads),
            num_positions=0,
            windows=(0,) * num_layers,
            max_model_len=max_model_len,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", True),
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            gated_mlp=False,
            activation=parse_activation(fields, "activation", "gelu"),
            parallel_residual=parallel,
            norms_per_layer=num_norms,
            dtype=dtype,
        )

    @classmethod
    def fused(cls, config: ModelConfig) -> Mapping[str, Fused]:
        d, name = config.head_dim, "self_attention"
        share = config.num_heads // config.num_kv_heads
        return fused(f"{name}.query_key_value", {f"{name}.q_proj": share * d, f"{name}.k_proj": d, f"{name}.v_proj": d})

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        norm = make.layer_norm(c.hidden_size)
        both = "input_layernorm", "post_attention_layernorm"
        if c.parallel_residual:
            both = ("ln_attn", "ln_mlp") if c.norms_per_layer == 2 else ("input_layernorm", "input_layernorm")
        kind = ParallelLayer if c.parallel_residual else DecoderLayer
        return kind(
            index,
            norm,
            Attention(c, make, names=("q_proj", "k_proj", "v_proj", "dense")),
            norm if both[0] == both[1] else make.layer_norm(c.hidden_size),
            PlainMlp(c, make, names=("dense_h_to_4h", "dense_4h_to_h")),
            names=(both[0], "self_attention", both[1], "mlp"),
        )

    def _last_norm(self) -> Norm:
        return self._make.layer_norm(self.config.hidden_size)


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    given = fields.positive_int("num_kv_heads", MAX_HEADS) if fields.peek("num_kv_heads") is not None else num_heads
    fields.take("num_kv_heads", None)
    multi_query = fields.boolean("multi_query", True, null=False)
    if fields.peek("new_decoder_architecture"):
        if num_heads % given:
            fields.refuse("num_kv_heads", given, f"it must divide num_attention_heads ({num_heads})")
        return given
    if multi_query:
        return 1
    if given != num_heads:
        fields.refuse("num_kv_heads", given, "without multi_query and new_decoder_architecture all heads have KV of their own")
    return num_heads
