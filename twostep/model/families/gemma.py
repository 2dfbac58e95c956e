"""Gemma (Gemma Team, 2024), Gemma 2 (2024) and the text models of Gemma 3 (2025, arXiv 2403.08295, 2408.00118, 2503.19786): Llama's layers
with weights of norms counted from one, scaled embeddings and a GELU; from Gemma 2 on norms on both sides of attention and MLP, and windows
in most layers.

Gemma 2 caps logits of attention and of the output; Gemma 3 norms heads of queries and keys instead, and layers with a window turn at a
rate of their own.
"""

from __future__ import annotations

from dataclasses import replace

from twostep.checkpoint.context import context_of
from twostep.checkpoint.fields import Fields
from twostep.model.families.attention import Attention
from twostep.model.families.config import MAX_HEAD_DIM, ModelConfig, WindowRule, parse_activation, parse_windows
from twostep.model.families.layers import DecoderLayer, SandwichLayer
from twostep.model.families.llama import Llama, coming_head_dim, parse_relative
from twostep.model.families.mlp import GatedMlp
from twostep.model.families.modules import Norm, RmsNorm
from twostep.model.families.rope import Rope, parse_parameters, parse_rope
from twostep.model.kernels.ops import Activation

_GELU = "gelu_pytorch_tanh"
_HEAD_DIM = 256
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0  # Gemma 3's
_NO_END = 1 << 62


class Gemma(Llama):
    architecture = "gemma"
    supported = "weights of norms from one, scaled embeddings, gated GELU; not with `use_bidirectional_attention`"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        if (newer := fields.take("hidden_activation", None)) not in (None, _GELU):
            fields.refuse("hidden_activation", newer, f"only {_GELU} is supported")
        if fields.peek("hidden_act") == "gelu":  # what the first files say, and do not mean
            fields.take("hidden_act", None)
        return cls._parse(fields, dtype, parse_activation(fields, "hidden_act", _GELU), WindowRule.NONE)

    @classmethod
    def _parse(
        cls,
        fields: Fields,
        dtype: str,
        activation: Activation,
        windows: WindowRule,
        period: int = 1,
        rope: Rope | None = None,
    ) -> ModelConfig:
        bias = fields.boolean("attention_bias", False)
        config = parse_relative(
            cls.architecture,
            fields,
            dtype,
            windows=windows,
            period=period,
            head_dim=_HEAD_DIM,
            tied=True,
            rope=rope,
            qkv_bias=bias,
            o_bias=bias,
            activation=activation,
        )
        return replace(config, embedding_scale=config.hidden_size**0.5)

    def _layer(self, index: int) -> DecoderLayer:
        return DecoderLayer(index, self._norm_of_width(), self._attention(), self._norm_of_width(), GatedMlp(self.config, self._make))

    def _norm_of_width(self) -> RmsNorm:
        return self._make.rms_norm_from_one(self.config.hidden_size)

    def _last_norm(self) -> Norm:
        return self._norm_of_width()


class Gemma2(Gemma):
    architecture = "gemma2"
    supported = "norms on both sides, softcaps, `query_pre_attn_scalar`, windows in every other layer or by `layer_types`"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        fields.take("hidden_act", None)  # beside hidden_activation, which counts
        scale = fields.positive_int("query_pre_attn_scalar", MAX_HEAD_DIM) if fields.has("query_pre_attn_scalar") else _HEAD_DIM
        caps = [
            (fields.optional_float(key) or 0.0) if fields.has(key) else default
            for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
        ]
        activation = parse_activation(fields, "hidden_activation", _GELU)
        config = cls._parse(fields, dtype, activation, WindowRule.PATTERN, period=2)
        return replace(config, attention_scale=scale**-0.5, attention_softcap=caps[0], logit_softcap=caps[1])

    def _layer(self, index: int) -> DecoderLayer:
        before, after, before_mlp, after_mlp = (self._norm_of_width() for _ in range(4))
        mlp = GatedMlp(self.config, self._make)
        return SandwichLayer(index, before, self._attention(), after, before_mlp, mlp, after_mlp)


class Gemma3(Gemma2):
    architecture = "gemma3_text"
    supported = "norms on both sides and of heads, two RoPEs, windows by `sliding_window_pattern` (6) or `layer_types`; text only"

    @classmethod
    def parse(cls, fields: Fields, dtype: str) -> ModelConfig:
        fields.take("hidden_act", None)
        scale = fields.positive_int("query_pre_attn_scalar", MAX_HEAD_DIM) if fields.has("query_pre_attn_scalar") else _HEAD_DIM
        cap = fields.optional_float("final_logit_softcapping") or 0.0
        period = 6
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            period = fields.positive_int(key, _NO_END) if fields.peek(key) is not None else period
        rope, local = _ropes(fields, context_of(fields.whole, fields.path), coming_head_dim(fields, _HEAD_DIM))
        activation = parse_activation(fields, "hidden_activation", _GELU)
        # Layers with a window turn at their rate also where it is longer than the context.
        copy = Fields(fields.path, fields.whole)
        config = cls._parse(fields, dtype, activation, WindowRule.PATTERN, period=period, rope=rope)
        sliding = parse_windows(copy, cls.architecture, WindowRule.PATTERN, config.num_layers, _NO_END, period=period)
        ropes = tuple(local if window else rope for window in sliding)
        return replace(config, attention_scale=scale**-0.5, logit_softcap=cap, layer_ropes=ropes)

    def _attention(self) -> Attention:
        c, make = self.config, self._make
        return Attention(c, make, qk_norms=(make.rms_norm_from_one(c.head_dim), make.rms_norm_from_one(c.head_dim)))


def _ropes(fields: Fields, longest: int, head_dim: int) -> tuple[Rope, Rope]:
    """Takes RoPE of layers that see all keys and of those with a window, in the layouts of transformers 5 and 4."""
    # Null only where rope_parameters have what counts.
    key = "rope_local_base_freq"
    local_theta = fields.optional_float(key) if fields.has(key) else _LOCAL_THETA
    by_kind = fields.peek("rope_parameters")
    if by_kind is None:
        if local_theta is None:
            fields.refuse(key, None, "it must be a positive number")
        return parse_rope(fields, longest, head_dim=head_dim, theta=_THETA), Rope(theta=local_theta)
    fields.take("rope_parameters", None)
    theta = fields.optional_float("rope_theta") if fields.has("rope_theta") else _THETA
    kinds = {"full_attention": theta, "sliding_attention": local_theta}
    if not isinstance(by_kind, dict) or not by_kind.keys() <= kinds.keys():
        fields.refuse("rope_parameters", by_kind, f"it must have {' and '.join(kinds)}")
    full, sliding = (
        parse_parameters(
            fields, f"rope_parameters.{kind}", {} if by_kind.get(kind) is None else by_kind[kind], longest, head_dim=head_dim, theta=theta
        )
        for kind, theta in kinds.items()
    )
    return full, sliding
