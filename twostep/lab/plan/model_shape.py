"""Reads what planning needs to know of a model: how many bytes its weights and a token's KV take. From config.json and the weight files'
headers alone, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.checkpoint.directory import read_header, read_json, weight_files
from twostep.errors import SetupError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# A quantized vector of one token and head is a byte a number and a bfloat16 scale.
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """`item_bytes` is that of a number of K or V; `scale_bytes` what each vector of them takes besides (quantized KV only)."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: int
    item_bytes: int = 2
    scale_bytes: int = 0

    @property
    def kv_token_bytes(self) -> int:
        """2 · layers · kv_heads · head_dim · bytes, and for quantized KV the scales."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.item_bytes + self.scale_bytes)

    @property
    def formula(self) -> str:
        """How kv_token_bytes comes about, with numbers."""
        vector = f"{self.head_dim} · {self.item_bytes}"
        vector = f"({vector} + {self.scale_bytes})" if self.scale_bytes else vector
        names = "2 · layers · kv_heads · " + ("(head_dim · bytes + scale)" if self.scale_bytes else "head_dim · bytes")
        return f"{names} = 2 · {self.num_layers} · {self.num_kv_heads} · {vector} = {self.kv_token_bytes:,} bytes"


def read_model(model_dir: Path, *, dtype: str = "auto", kv_cache_dtype: str = "auto") -> PlannedModel:
    """Weights in `dtype` ("auto": as config.json says). Raises SetupError, naming the file and what is missing in it."""
    return model_of(read_json(model_dir / "config.json"), model_dir, dtype=dtype, kv_cache_dtype=kv_cache_dtype)


def weight_bytes(model_dir: Path, dtype: str) -> int:
    """Returns the size of the weights once they are loaded; 0 where that is not known before."""
    try:
        return read_model(model_dir, dtype=dtype).weight_bytes
    except SetupError:
        # Whoever loads it says what is wrong with it.
        return 0


def model_of(config: dict[str, Any], model_dir: Path, *, dtype: str = "auto", kv_cache_dtype: str = "auto") -> PlannedModel:
    """`config` is that of `model_dir`, whose weight files are looked at if they are there, and else counted from the shape."""
    path = model_dir / "config.json"

    def number(*names: str, default: int | None = None) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SetupError(f"{path} has no usable {' or '.join(names)} ({value!r}); give the directory of a decoder model")
        return value

    num_layers = number("num_hidden_layers")
    num_heads = number("num_attention_heads")
    hidden = number("hidden_size")
    num_kv_heads = number("num_key_value_heads", default=num_heads)
    head_dim = number("head_dim", default=hidden // num_heads)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if stored not in _ITEM_BYTES:
        raise SetupError(f"{path} says dtype {stored}; planned can be {', '.join(_ITEM_BYTES)}: use the unquantized model")
    item_bytes = _ITEM_BYTES[stored if dtype == "auto" else dtype]
    intermediate = number("intermediate_size", "ffn_dim")
    # OPT's MLP has two matrices, Llama's and its relatives' three.
    num_mlp = 2 if "ffn_dim" in config else 3
    layer = hidden * head_dim * 2 * (num_heads + num_kv_heads) + num_mlp * hidden * intermediate
    # What transformers takes for granted: an OPT's are tied.
    tied = bool(config.get("tie_word_embeddings", "ffn_dim" in config))
    params = num_layers * layer + number("vocab_size") * hidden * (1 if tied else 2)
    on_disk = _bytes_on_disk(model_dir)
    weight_bytes = params * item_bytes if on_disk is None else on_disk * item_bytes // _ITEM_BYTES[stored]
    quantized = kv_cache_dtype != "auto"
    return PlannedModel(
        name=model_dir.name,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        weight_bytes=weight_bytes,
        item_bytes=1 if quantized else item_bytes,
        scale_bytes=_SCALE_BYTES if quantized else 0,
    )


def _bytes_on_disk(model_dir: Path) -> int | None:
    """Returns the size of the weights; None: they are not there."""
    if not any(model_dir.glob("*.safetensors")):
        return None
    return sum(header.num_bytes - header.data_start for header in map(read_header, weight_files(model_dir)))
