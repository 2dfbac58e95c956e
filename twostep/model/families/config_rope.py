"""RoPE out of config.json: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""

from __future__ import annotations

from twostep.checkpoint.context import YarnStretch, rope_kind, rope_of
from twostep.checkpoint.directory import MAX_MODEL_LEN
from twostep.model.families.config_fields import Fields
from twostep.model.families.rope import LinearScaling, Llama3Scaling, Rope, Scaling, YarnScaling

_DEFAULT_THETA = 10000.0
_PARAMETERS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor",
    "mscale", "mscale_all_dim", "truncate",
)  # fmt: skip


def parse_rope(fields: Fields, max_position_embeddings: int) -> Rope:
    """Raises SetupError, naming the key, for a type or a parameter that is not supported."""
    theta = fields.positive_float("rope_theta", _DEFAULT_THETA) if fields.peek("rope_theta") is not None else _DEFAULT_THETA
    fields.take("rope_theta", None)
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    name, raw = rope_of({"rope_parameters": new, "rope_scaling": old})
    if new is not None and old is not None and new != old:
        fields.refuse("rope_scaling", old, "it contradicts rope_parameters; keep one of them")
    if raw is None:
        return Rope(theta=theta)
    if not isinstance(raw, dict):
        fields.refuse(name, raw, "it must be an object or null")
    rope = Fields(fields.path, raw, prefix=f"{name}.")
    kind = rope_kind(raw)
    for key in ("type", "rope_type"):
        rope.take(key, None)
    if rope.peek("rope_theta") is not None:
        theta = rope.positive_float("rope_theta")
    rope.take("rope_theta", None)
    rope.expect("partial_rotary_factor", 1.0, default=1.0)
    scaling: Scaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor=rope.positive_float("factor"))
    elif kind == "llama3":
        scaling = _llama3(rope)
    elif kind == "yarn":
        scaling = _yarn(rope, theta, YarnStretch.of(raw, name, max_position_embeddings, fields.path))
    elif kind == "default":
        # Parameters of a scaling that is not applied change nothing.
        for key in _PARAMETERS:
            rope.take(key, None)
    else:
        rope.refuse("rope_type", kind, "supported are default, linear, yarn and llama3")
    rope.refuse_rest()
    return Rope(theta=theta, scaling=scaling)


def _llama3(rope: Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.positive_float("factor"),
        low_freq_factor=rope.positive_float("low_freq_factor"),
        high_freq_factor=rope.positive_float("high_freq_factor"),
        original_max_position_embeddings=rope.positive_int("original_max_position_embeddings", MAX_MODEL_LEN),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.refuse("high_freq_factor", scaling.high_freq_factor, "it must be above low_freq_factor")
    return scaling


def _yarn(rope: Fields, theta: float, stretch: YarnStretch) -> YarnScaling:
    """Null is absent, as it is in transformers."""
    for key in ("factor", "original_max_position_embeddings"):
        rope.take(key, None)
    if theta <= 1:
        rope.refuse("rope_theta", theta, "yarn needs one above 1")
    scaling = YarnScaling(
        factor=stretch.factor,
        original_max_position_embeddings=stretch.original,
        beta_fast=rope.optional_float("beta_fast") or 32.0,
        beta_slow=rope.optional_float("beta_slow") or 1.0,
        attention_factor=rope.optional_float("attention_factor"),
        mscale=rope.optional_float("mscale"),
        mscale_all_dim=rope.optional_float("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )
    if scaling.beta_fast < scaling.beta_slow:
        rope.refuse("beta_fast", scaling.beta_fast, f"it must be at least beta_slow ({scaling.beta_slow})")
    return scaling
