"""Writes a GGUF file as llama.cpp's own converter would, from a small llama that transformers saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    model_dir: Path,
    *,
    architecture: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra_tensors: dict[str, npt.NDArray[np.float32]] | None = None,
    overrides: dict[str, Any] | None = None,
) -> Path:
    """`overrides` replace metadata; None leaves a key out."""
    config = json.loads((model_dir / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_metadata(model_dir, config) | (overrides or {})).items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    tensors = {name: tensor.to(torch.float32).numpy() for name, tensor in load_file(model_dir / "model.safetensors").items()}
    for name, tensor in tensors.items():
        data, kind = tensor, gguf.GGMLQuantizationType.F32
        if "q_proj" in name:
            data = permuted(tensor, config["num_attention_heads"])
        elif "k_proj" in name:
            data = permuted(tensor, config["num_key_value_heads"])
        if data.ndim == 2:
            data, kind = gguf.quants.quantize(data, quantization), quantization
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp's order, row by row: rows 2i and 2i + 1 of a head are its rows i and i + head_dim / 2."""
    head_dim = len(weight) // num_heads
    rows = [head * head_dim + i + half * head_dim // 2 for head in range(num_heads) for i in range(head_dim // 2) for half in range(2)]
    return np.ascontiguousarray(weight[rows])


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in top:
        return top[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[part.removesuffix('.weight')]}.weight"


def _metadata(model_dir: Path, config: dict[str, Any]) -> dict[str, Any]:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": (model_dir / "chat_template.jinja").read_text(),
    }
