"""config.json's shape in the names that most decoders have for it. Torch-free, for those who load no model: what cannot be served is
refused by who loads it (twostep/model/families/)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostep.checkpoint.architectures import model_type_of

# By `model_type`: the usual name of a key, and that architecture's own.
_NAMES = {
    "falcon": {"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    },
    "opt": {"intermediate_size": "ffn_dim"},
    "t5": {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_decoder_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
    },
}
# What transformers takes for granted where the file says nothing.
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_shared_experts": 2, "q_lora_rank": 1536},
    "deepseek_v3": {"first_k_dense_replace": 3, "n_shared_experts": 1, "q_lora_rank": 1536},
    "falcon": {"max_position_embeddings": 2048, "tie_word_embeddings": True},
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt2": {"tie_word_embeddings": True},
    "gpt_oss": {"head_dim": 64},
    "opt": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"head_dim": 256},
    "starcoder2": {"tie_word_embeddings": True},
    # Positions are relative: no file says how long a context may be.
    "t5": {"max_position_embeddings": 4096, "tie_word_embeddings": True},
}
_FOUR_TIMES = ("falcon", "gpt2")  # as wide as the model, is an MLP where the file says nothing
_TURNED = ("c_attn", "c_fc", "c_proj")  # GPT-2's products
WITH_ENCODER = ("t5",)  # before the decoder: it reads the prompt
_PLAIN = ("falcon", "gpt2", "gpt_neox", "opt", "starcoder2")  # MLPs of two products, not three


def kind_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(config.get("model_type") or (model_type_of(str(names[0])) if isinstance(names, list) and names else ""))


def own_name(config: Mapping[str, Any], key: str) -> str:
    """Returns what this file calls a key."""
    return _NAMES.get(kind_of(config), {}).get(key, key)


def usual_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` with its shape under the usual names as well, and with defaults."""
    kind = kind_of(config)
    found = dict(config)
    for key, own in _NAMES.get(kind, {}).items():
        if config.get(own) is not None:
            found[key] = config[own]
    if kind == "falcon" and not config.get("new_decoder_architecture"):
        found["num_key_value_heads"] = 1 if config.get("multi_query", True) else config.get("num_attention_heads")
    if kind == "gpt_oss" and config.get("rope_parameters") is None and not config.get("rope_scaling"):
        found["rope_parameters"] = GPT_OSS_ROPE
    if kind == "t5":
        if config.get("num_decoder_layers") is None:
            found["num_hidden_layers"] = config.get("num_layers")
        if config.get("tie_word_embeddings") is None:
            found["tie_word_embeddings"] = True
    width = found.get("hidden_size")
    if kind in _FOUR_TIMES and isinstance(width, int):
        found.setdefault("intermediate_size", 4 * width)
    # What null means is another matter: some families refuse it, and for `q_lora_rank` it is a value.
    return _DEFAULTS.get(kind, {}) | found


def num_kv_layers(config: Mapping[str, Any], num_layers: int) -> int:
    """Returns how many of the layers have KV: of a hybrid not those that keep a state in its place."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return num_layers - kinds.count("linear_attention")
    interval = config.get("full_attention_interval", 4 if kind_of(config) == "qwen3_next" else 1)
    return num_layers // interval if isinstance(interval, int) and interval > 0 else num_layers


def lies_turned(config: Mapping[str, Any], layer: str) -> bool:
    """Returns whether the files have a layer's weight as [in, out]."""
    return kind_of(config) == "gpt2" and layer.rpartition(".")[2] in _TURNED


def mlp_products(config: Mapping[str, Any]) -> int:
    """Returns how many matrices a layer's MLP has."""
    if kind_of(config) == "t5":
        return 3 if str(config.get("feed_forward_proj")).startswith("gated") else 2
    return 2 if kind_of(config) in _PLAIN else 3
