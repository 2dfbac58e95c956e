"""The llama family of decoders (Touvron et al., LLaMA, 2023; Jiang et al., Mistral 7B, 2023), and the base of its relatives: RMSNorm,
RoPE, a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostep.checkpoint.context import context_of
from twostep.checkpoint.directory import MAX_MODEL_LEN, MAX_VOCAB_SIZE
from twostep.checkpoint.fields import Fields
from twostep.model.families.attention import Attention
from twostep.model.families.config import (
    DEFAULT_WINDOW,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ModelConfig,
    WindowRule,
    parse_windows,
)
from twostep.model.families.decoder import Decoder
from twostep.model.families.experts import ExpertNames, ExpertsMlp
from twostep.model.families.layers import AttentionPart, DecoderLayer
from twostep.model.families.mlp import GatedMlp, Mlp
from twostep.model.families.modules import Norm
from twostep.model.families.rope import Rope, parse_rope
from twostep.model.kernels.ops import Activation


class Llama(Decoder):
    architecture = "llama"
    supported = "grouped heads, `head_dim`, `attention_bias`, `mlp_bias`, tied embeddings"
    embed_name = "model.embed_tokens"
    layers_name = "model.layers"
    norm_name = "model.norm"
    expert_names = ExpertNames()

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        bias = fields.boolean("attention_bias", False)
        return parse_relative(
            cls.architecture,
            fields,
            dtype,
            names_kv_heads=False,
            null_kv_heads=True,
            null_head_dim=True,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=fields.boolean("mlp_bias", False),
        )

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        return DecoderLayer(index, make.rms_norm(c.hidden_size), self._attention(), make.rms_norm(c.hidden_size), self._mlp(index))

    def _attention(self) -> AttentionPart:
        return Attention(self.config, self._make)

    def _mlp(self, index: int) -> Mlp:
        """Of the layer of this number."""
        experts = self.config.experts
        has_experts = experts is not None and experts.layers[index]
        return ExpertsMlp(self.config, self._make, self.expert_names) if has_experts else GatedMlp(self.config, self._make)

    def _last_norm(self) -> Norm:
        return self._make.rms_norm(self.config.hidden_size)


class Mistral(Llama):
    """Differs from Llama by what its config.json may say."""

    architecture = "mistral"
    supported = "as Llama, without biases; `sliding_window` (in all layers) or null"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        return parse_relative(cls.architecture, fields, dtype, windows=WindowRule.ALL, null_head_dim=True)


def parse_relative(
    architecture: str,
    fields: Fields,
    dtype: str,
    *,
    windows: WindowRule = WindowRule.NONE,
    window: int | None = DEFAULT_WINDOW,
    period: int = 1,
    names_kv_heads: bool = True,
    null_kv_heads: bool = False,
    head_dim: int | None = None,
    null_head_dim: bool = False,
    norm_eps: float = 1e-6,
    norm_key: str = "rms_norm_eps",
    tied: bool = False,
    theta: float = 10000.0,
    default_rope: Mapping[str, Any] | None = None,
    rope: Rope | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    activation: Activation | None = None,
) -> ModelConfig:
    """Takes what all relatives of Llama have. `names_kv_heads`: num_key_value_heads may not be left out. `null_kv_heads`, `null_head_dim`:
    null counts as one for each head, and as hidden_size / num_attention_heads. `window`, `head_dim`, `norm_eps`, `tied`, `theta`,
    `default_rope`: where the file does not say. `rope`, `activation`: if they are taken already."""
    if activation is None:
        fields.expect("hidden_act", "silu", default="silu")
    hidden_size = fields.positive_int("hidden_size", MAX_WIDTH)
    num_heads = fields.positive_int("num_attention_heads", MAX_HEADS)
    num_layers = fields.positive_int("num_hidden_layers", MAX_LAYERS)
    longest = fields.positive_int("max_position_embeddings", MAX_MODEL_LEN)
    size = _head_dim(fields, head_dim, hidden_size, num_heads, may_be_null=null_head_dim)
    if rope is None:
        rope = parse_rope(fields, longest, head_dim=size, theta=theta, default=default_rope)
    max_model_len = context_of(fields.whole, fields.path)
    num_kv_heads, key = num_heads, "num_key_value_heads"
    if (fields.has(key) and fields.peek(key) is None and null_kv_heads) or not (fields.has(key) or names_kv_heads):
        fields.take(key, None)
    else:
        num_kv_heads = fields.positive_int(key, MAX_HEADS)
        if num_heads % num_kv_heads:
            fields.refuse(key, num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size", MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size", MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=size,
        norm_eps=fields.positive_float(norm_key, norm_eps),
        rope=rope,
        num_positions=0,
        windows=parse_windows(fields, architecture, windows, num_layers, max_model_len, default=window, period=period),
        max_model_len=max_model_len,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", tied),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        activation=activation or "silu",
        dtype=dtype,
    )


def coming_head_dim(fields: Fields, default: int | None = None) -> int:
    """Returns a head's size without taking it; `default`: where the file does not say. Raises SetupError, naming the key."""
    copy = Fields(fields.path, fields.whole)
    hidden_size, num_heads = copy.positive_int("hidden_size", MAX_WIDTH), copy.positive_int("num_attention_heads", MAX_HEADS)
    return _head_dim(copy, default, hidden_size, num_heads, may_be_null=True)


def _head_dim(fields: Fields, default: int | None, hidden_size: int, num_heads: int, *, may_be_null: bool) -> int:
    if default is not None and not fields.has("head_dim"):
        return default
    if fields.has("head_dim") and not (may_be_null and fields.peek("head_dim") is None):
        head_dim = fields.positive_int("head_dim", MAX_HEAD_DIM)
    else:
        fields.take("head_dim", None)
        if hidden_size % num_heads:
            fields.refuse("hidden_size", hidden_size, f"without head_dim it must be a multiple of num_attention_heads ({num_heads})")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "rotary embedding needs an even one")
    return head_dim
