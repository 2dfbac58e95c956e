"""The shape of a decoder, as the models need it, and how config.json of a Hugging Face directory becomes it.

Strict: what config.json asks for and the models cannot honour is refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.model_dir import read_json, stored_dtype
from twostep.models.config_fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """rope_type "llama3": frequencies are scaled by wavelength (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str  # "llama" | "mistral" | "qwen2" | "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_model_len: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # of the weights on disk: "bfloat16" | "float16" | "float32"


_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DTYPES = ("bfloat16", "float16", "float32")


def parse_config(model_dir: Path) -> ModelConfig:
    """Reads config.json, in the layouts of transformers 4 and 5. A missing key has the value transformers gives it.

    Raises SetupError, naming the file and the key, for a missing or broken file, an architecture, quantization, activation,
    attention window or rope type that is not supported, and for any unknown key whose value could change the result.
    """
    path = model_dir / "config.json"
    fields = Fields(path, read_json(path))
    architecture = _architecture(fields)
    if (quantization := fields.take("quantization_config", None)) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        fields.refuse("quantization_config", method, "only unquantized weights are supported (bfloat16, float16, float32)")
    fields.expect("hidden_act", "silu", default="silu")
    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = _num_kv_heads(fields, architecture, num_heads)
    max_model_len = fields.positive_int("max_position_embeddings")
    _check_no_window(fields, architecture, max_model_len)
    rope_theta, rope_scaling = _rope(fields)
    attention_bias = fields.boolean("attention_bias", False) if architecture in ("llama", "qwen3") else False
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=fields.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, architecture, hidden_size, num_heads),
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_model_len=max_model_len,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False) if architecture == "llama" else False,
        qk_norm=architecture == "qwen3",
        dtype=_dtype(fields, model_dir),
    )
    fields.refuse_rest()
    return config


def _architecture(fields: Fields) -> str:
    names = fields.take("architectures", None)
    model_type = fields.take("model_type", None)
    supported = "supported are " + ", ".join(_ARCHITECTURES)
    if names is None and model_type in _ARCHITECTURES.values():
        return str(model_type)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _ARCHITECTURES:
        fields.refuse("architectures", names if names is not None else model_type, supported)
    architecture = _ARCHITECTURES[names[0]]
    if model_type not in (None, architecture):
        fields.refuse("model_type", model_type, f"{names[0]} goes with {architecture!r}; {supported}")
    return architecture


def _num_kv_heads(fields: Fields, architecture: str, num_heads: int) -> int:
    if architecture == "llama" and fields.peek("num_key_value_heads") is None:
        fields.take("num_key_value_heads", None)
        return num_heads
    num_kv_heads = fields.positive_int("num_key_value_heads")
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
    return num_kv_heads


def _head_dim(fields: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    if architecture == "qwen3" and not fields.has("head_dim"):
        return 128
    if fields.peek("head_dim") is not None:
        head_dim = fields.positive_int("head_dim")
    else:
        fields.take("head_dim", None)
        if hidden_size % num_heads:
            fields.refuse("hidden_size", hidden_size, f"without head_dim it must be a multiple of num_attention_heads ({num_heads})")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "rotary embedding needs an even one")
    return head_dim


def _check_no_window(fields: Fields, architecture: str, max_model_len: int) -> None:
    """A window at least as long as the context never cuts anything off, so it is no window."""
    # transformers' own default: an old Mistral config without the key means a window of 4096.
    window = fields.take("sliding_window", 4096 if architecture == "mistral" else None)
    if architecture in ("qwen2", "qwen3") and not fields.boolean("use_sliding_window", False):
        window = None
    if window is not None and not (isinstance(window, int) and window >= max_model_len):
        fields.refuse("sliding_window", window, "attention windows are not supported; only models with sliding_window null (or off) are")
    layer_types = fields.take("layer_types", None)
    if layer_types is not None and (not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)):
        odd = [kind for kind in layer_types if kind != "full_attention"] if isinstance(layer_types, list) else [layer_types]
        fields.refuse("layer_types", odd[0], "only full_attention layers are supported")


def _rope(fields: Fields) -> tuple[float, Llama3RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    theta = fields.positive_float("rope_theta", 10000.0) if fields.peek("rope_theta") is not None else 10000.0
    fields.take("rope_theta", None)
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    name = "rope_scaling" if new is None else "rope_parameters"
    raw: Any = old if new is None else new
    if new is not None and old is not None and new != old:
        fields.refuse("rope_scaling", old, "it contradicts rope_parameters; keep one of them")
    if raw is None:
        return theta, None
    if not isinstance(raw, dict):
        fields.refuse(name, raw, "it must be an object or null")
    rope = Fields(fields.path, raw, prefix=f"{name}.")
    legacy = rope.take("type", None)
    kind = rope.take("rope_type", legacy if legacy is not None else "default")
    if rope.peek("rope_theta") is not None:
        theta = rope.positive_float("rope_theta")
    rope.take("rope_theta", None)
    rope.expect("partial_rotary_factor", 1.0, default=1.0)
    if kind == "default":
        # Parameters of a scaling that is not applied change nothing.
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            rope.take(key, None)
        rope.refuse_rest()
        return theta, None
    if kind != "llama3":
        rope.refuse("rope_type", kind, "supported are default and llama3")
    scaling = Llama3RopeScaling(
        factor=rope.positive_float("factor"),
        low_freq_factor=rope.positive_float("low_freq_factor"),
        high_freq_factor=rope.positive_float("high_freq_factor"),
        original_max_position_embeddings=rope.positive_int("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.refuse("high_freq_factor", scaling.high_freq_factor, "it must be above low_freq_factor")
    rope.refuse_rest()
    return theta, scaling


def _dtype(fields: Fields, model_dir: Path) -> str:
    old = fields.take("torch_dtype", None)
    dtype = fields.take("dtype", None) or old
    if dtype is None:
        return stored_dtype(model_dir)
    if isinstance(dtype, str):
        dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        fields.refuse("dtype", dtype, "supported are " + ", ".join(_DTYPES))
    return str(dtype)
