"""Qwen3-Next (Qwen team, 2025): three of four layers have a gated delta net in place of attention, the fourth gated attention; all of
them a mixture of experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from twostep.checkpoint.fields import Fields
from twostep.model.families.attention import Attention
from twostep.model.families.config import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, GatedDeltaConfig, ModelConfig
from twostep.model.families.fused import Fused, fused
from twostep.model.families.gated_delta_net import GatedDeltaNet, columns_of
from twostep.model.families.layers import AttentionPart, DecoderLayer
from twostep.model.families.llama import Llama, parse_relative
from twostep.model.families.modules import Norm
from twostep.model.families.qwen_moe import parse_experts
from twostep.model.families.rope import parse_rope

_LINEAR, _FULL = "linear_attention", "full_attention"
_MAX_KERNEL = 16
_HEAD_DIM, _TURNED = 256, 0.25


class Qwen3Next(Llama):
    architecture = "qwen3_next"
    supported = "gated delta nets and gated attention by `layer_types`, experts as Qwen2's; over ranks by key heads"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        kinds = fields.take("layer_types", None)
        interval = fields.positive_int("full_attention_interval", MAX_LAYERS) if fields.has("full_attention_interval") else 4
        bias = fields.boolean("attention_bias", False)
        # What is no number is refused below.
        head_dim, longest = fields.peek("head_dim"), fields.peek("max_position_embeddings")
        head_dim = head_dim if isinstance(head_dim, int) else _HEAD_DIM
        rope = parse_rope(fields, longest if isinstance(longest, int) else 1, head_dim=head_dim, turned=_TURNED)
        config = parse_relative(cls.architecture, fields, dtype, head_dim=_HEAD_DIM, rope=rope, qkv_bias=bias, o_bias=bias)
        experts = parse_experts(config, fields, is_shared=True, renormalize=True)
        return replace(config, experts=experts, gated_attention=True, gated_delta=_parse_gated_delta(fields, kinds, interval, config))

    @classmethod
    def fused(cls, config: ModelConfig) -> Mapping[str, Fused]:
        # Each of the three is cut by its own heads.
        d = config.gated_delta
        assert d is not None
        keys, values = d.num_key_heads * d.key_dim, d.num_value_heads * d.value_dim
        return fused(
            "linear_attn.conv1d", {f"linear_attn.conv1d.{each}": rows for each, rows in zip("qkv", (keys, keys, values), strict=True)}
        )

    def unused(self, names: Collection[str]) -> Collection[str]:
        # Layers that draft tokens.
        return {name for name in names if name.startswith("mtp.")}

    def _layer(self, index: int) -> DecoderLayer:
        c, make = self.config, self._make
        assert c.gated_delta is not None
        is_linear = c.gated_delta.layers[index]
        mixer: AttentionPart
        if is_linear:
            mixer = GatedDeltaNet(c, make)
        else:
            norms = make.rms_norm_from_one(c.head_dim), make.rms_norm_from_one(c.head_dim)
            mixer = Attention(c, make, qk_norms=norms)
        return DecoderLayer(
            index,
            make.rms_norm_from_one(c.hidden_size),
            mixer,
            make.rms_norm_from_one(c.hidden_size),
            self._mlp(index),
            names=("input_layernorm", "linear_attn" if is_linear else "self_attn", "post_attention_layernorm", "mlp"),
            among_its_kind=c.among_its_kind(index),
        )

    def _last_norm(self) -> Norm:
        return self._make.rms_norm_from_one(self.config.hidden_size)


def _parse_gated_delta(fields: Fields, kinds: object, interval: int, config: ModelConfig) -> GatedDeltaConfig:
    num_layers = config.num_layers
    if kinds is None:
        kinds = [_LINEAR if (i + 1) % interval else _FULL for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_LINEAR, _FULL) for kind in kinds):
        fields.refuse("layer_types", kinds, f"it must name {num_layers} layers, each {_LINEAR} or {_FULL}")
    if _FULL not in kinds or _LINEAR not in kinds:
        fields.refuse("layer_types", kinds, f"there must be {_LINEAR} and {_FULL} layers")
    num_key_heads = fields.positive_int("linear_num_key_heads", MAX_HEADS)
    num_value_heads = fields.positive_int("linear_num_value_heads", MAX_HEADS)
    if num_value_heads % num_key_heads:
        fields.refuse("linear_num_value_heads", num_value_heads, f"it must be a multiple of linear_num_key_heads ({num_key_heads})")
    kernel = fields.positive_int("linear_conv_kernel_dim", _MAX_KERNEL)
    if kernel < 2:
        fields.refuse("linear_conv_kernel_dim", kernel, "it must be 2 at least")
    return GatedDeltaConfig(
        layers=tuple(kind == _LINEAR for kind in kinds),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.positive_int("linear_key_head_dim", MAX_HEAD_DIM),
        value_dim=fields.positive_int("linear_value_head_dim", MAX_HEAD_DIM),
        kernel=kernel,
        columns=columns_of(config, num_key_heads),
    )
