"""The shape of a decoder, as the models need it, and how config.json of a Hugging Face directory becomes it.

Strict: what config.json asks for and the models cannot honour is refused by name, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.checkpoint.context import context_of
from twostep.checkpoint.directory import MAX_MODEL_LEN, MAX_VOCAB_SIZE, read_json, stored_dtype
from twostep.model.families.config_fields import Fields
from twostep.model.families.config_rope import parse_rope
from twostep.model.families.config_windows import parse_windows
from twostep.model.families.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str  # a value of _ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope | None  # None: learned positions
    num_positions: int  # learned ones; 0 with RoPE
    windows: tuple[int, ...]  # of each layer: keys that a query sees, its own included; 0: all
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
    "OPTForCausalLM": "opt",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_MAX_LAYERS = 1024
_MAX_HEADS = 4096
_MAX_HEAD_DIM = 4096
_MAX_WIDTH = 1 << 20
_DTYPES = ("bfloat16", "float16", "float32")


def parse_config(model_dir: Path) -> ModelConfig:
    """Reads config.json, in the layouts of transformers 4 and 5. A missing key has the value transformers gives it.

    Raises SetupError, naming the file and the key, for a missing or broken file, an architecture, quantization, activation or rope
    type that is not supported, and for any unknown key whose value could change the result.
    """
    path = model_dir / "config.json"
    raw = read_json(path)
    fields = Fields(path, raw)
    architecture = _architecture(fields)
    if (quantization := fields.take("quantization_config", None)) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        fields.refuse("quantization_config", method, "only unquantized weights are supported (bfloat16, float16, float32)")
    dtype = _dtype(fields, model_dir)
    config = _opt(fields, dtype) if architecture == "opt" else _llama(fields, architecture, dtype, raw)
    fields.refuse_rest()
    return config


def _llama(fields: Fields, architecture: str, dtype: str, raw: dict[str, Any]) -> ModelConfig:
    """Llama and its relatives. `raw`: what `fields` began with."""
    fields.expect("hidden_act", "silu", default="silu")
    hidden_size = fields.positive_int("hidden_size", _MAX_WIDTH)
    num_heads = fields.positive_int("num_attention_heads", _MAX_HEADS)
    num_layers = fields.positive_int("num_hidden_layers", _MAX_LAYERS)
    max_position_embeddings = fields.positive_int("max_position_embeddings", MAX_MODEL_LEN)
    rope = parse_rope(fields, max_position_embeddings)
    max_model_len = context_of(raw, fields.path)
    attention_bias = fields.boolean("attention_bias", False) if architecture in ("llama", "qwen3") else False
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size", MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size", _MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, architecture, num_heads),
        head_dim=_head_dim(fields, architecture, hidden_size, num_heads),
        norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope=rope,
        num_positions=0,
        windows=parse_windows(fields, architecture, num_layers, max_model_len),
        max_model_len=max_model_len,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False) if architecture == "llama" else False,
        qk_norm=architecture == "qwen3",
        dtype=dtype,
    )


def _opt(fields: Fields, dtype: str) -> ModelConfig:
    fields.expect("activation_function", "relu", default="relu")
    fields.expect("do_layer_norm_before", True, default=True)
    fields.expect("layer_norm_elementwise_affine", True, default=True)
    fields.expect("_remove_final_layer_norm", False, default=False)
    hidden_size = fields.positive_int("hidden_size", _MAX_WIDTH)
    if (projected := fields.take("word_embed_proj_dim", None)) not in (None, hidden_size):
        fields.refuse("word_embed_proj_dim", projected, f"only that of hidden_size ({hidden_size}) is supported")
    num_heads = fields.positive_int("num_attention_heads", _MAX_HEADS)
    if hidden_size % num_heads:
        fields.refuse("hidden_size", hidden_size, f"it must be a multiple of num_attention_heads ({num_heads})")
    num_layers = fields.positive_int("num_hidden_layers", _MAX_LAYERS)
    num_positions = fields.positive_int("max_position_embeddings", MAX_MODEL_LEN)
    bias = fields.boolean("enable_bias", True)
    return ModelConfig(
        architecture="opt",
        vocab_size=fields.positive_int("vocab_size", MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("ffn_dim", _MAX_WIDTH),
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
        qk_norm=False,
        dtype=dtype,
    )


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
    num_kv_heads = fields.positive_int("num_key_value_heads", _MAX_HEADS)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", num_kv_heads, f"it must divide num_attention_heads ({num_heads})")
    return num_kv_heads


def _head_dim(fields: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    if architecture == "qwen3" and not fields.has("head_dim"):
        return 128
    if fields.peek("head_dim") is not None:
        head_dim = fields.positive_int("head_dim", _MAX_HEAD_DIM)
    else:
        fields.take("head_dim", None)
        if hidden_size % num_heads:
            fields.refuse("hidden_size", hidden_size, f"without head_dim it must be a multiple of num_attention_heads ({num_heads})")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "rotary embedding needs an even one")
    return head_dim


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
