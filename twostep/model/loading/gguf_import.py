"""A GGUF file of the llama architecture as a Hugging Face directory in bfloat16.

Also a program, so that a process that only wants the directory need not load torch:

    python -m twostep.model.loading.gguf_import MODEL.gguf OUT_DIR

It prints progress to stdout; on failure one message to stderr, and it exits with 1.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file

from twostep.errors import SetupError
from twostep.model.loading.gguf_check import check_gguf
from twostep.model.loading.gguf_tokenizer import build_tokenizer, eos_token_ids, tokenizer_config

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert(gguf: Path, out_dir: Path, *, progress: Callable[[str], None]) -> None:
    """Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors (bf16, dequantized)
    into the existing `out_dir`. Holds the bf16 weights in memory once. Raises SetupError for a file that is not a GGUF, for
    whatever it holds that has no place in such a directory, by name, and if something cannot be written."""
    check_gguf(gguf)
    try:
        reader = GGUFReader(gguf)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError, OverflowError, RecursionError, struct.error) as error:
        raise SetupError(f"{gguf} cannot be read as GGUF ({error}); download it again") from error
    try:
        tensors = _tensors(reader, metadata, progress)
        config = _config(metadata, tied="lm_head.weight" not in tensors)
        tokenizer = build_tokenizer(metadata)
        texts = {
            "config.json": config,
            "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config},
            "tokenizer_config.json": tokenizer_config(metadata, config["max_position_embeddings"]),
        }
    except SetupError as error:
        raise SetupError(f"{gguf}: {error.message}") from error
    except KeyError as error:
        raise SetupError(f"{gguf} has no {error.args[0]}; download it again") from error
    except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        raise SetupError(f"{gguf} contradicts itself ({error}); download it again") from error
    progress("writing the converted model")
    try:
        save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
        for name, content in texts.items():
            (out_dir / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (out_dir / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise SetupError(f"{out_dir} cannot be written ({error}); free some disk space or use another directory") from error


def _tensors(reader: GGUFReader, metadata: Mapping[str, Any], progress: Callable[[str], None]) -> dict[str, torch.Tensor]:
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise SetupError(f"general.architecture is {architecture!r}; only llama is converted: give the Hugging Face directory instead")
    num_heads: int = metadata["llama.attention.head_count"]
    num_kv_heads: int = metadata["llama.attention.head_count_kv"]
    tensors: dict[str, torch.Tensor] = {}
    for i, tensor in enumerate(reader.tensors):
        if i % 50 == 0:
            progress(f"converting tensor {i + 1} of {len(reader.tensors)}")
        name = _tensor_name(tensor.name)
        try:
            weight: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise SetupError(
                f"{tensor.name} is stored as {tensor.tensor_type.name}, which is not supported; use another quantization"
            ) from error
        if name.endswith("q_proj.weight"):
            weight = unpermute(weight, num_heads)
        elif name.endswith("k_proj.weight"):
            weight = unpermute(weight, num_kv_heads)
        # The contiguous copy also detaches it from the mapped file.
        tensors[name] = torch.from_numpy(np.array(weight, order="C")).to(torch.bfloat16)
    return tensors


def unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undoes llama.cpp's row order of q and k, [heads * head_dim, hidden]: it interleaves the two halves of each head (rotary pairs
    side by side), Hugging Face keeps them apart (pair i is rows i and i + head_dim / 2)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tensor_name(name: str) -> str:
    if name in _OTHER_TENSORS:
        return _OTHER_TENSORS[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.weight"
    raise SetupError(f"tensor {name} is not known and may change the result; give the Hugging Face directory instead")


def _config(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    for key in ("llama.rope.scaling.type", "llama.expert_count", "llama.attention.sliding_window", "llama.rope.scale_linear"):
        if metadata.get(key) not in (None, 0, 1.0, "none"):
            raise SetupError(f"{key} is {metadata[key]!r}, which is not converted; give the Hugging Face directory instead")
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    if (
        metadata.get("llama.rope.dimension_count", head_dim) != head_dim
        or metadata.get("llama.attention.value_length", head_dim) != head_dim
    ):
        raise SetupError(
            "rotary embedding of a part of the head, or other sizes of K and V, are not converted; give the Hugging Face directory instead"
        )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "max_position_embeddings": metadata["llama.context_length"],
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": eos_token_ids(metadata),
    }
    for key, name in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[key] = token_id
    return config


def _shortest(value: float) -> float:
    """A float32 as the decimal number it was meant to be: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def main(arguments: list[str]) -> int:
    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    if len(arguments) != 2:
        sys.stderr.write("usage: python -m twostep.model.loading.gguf_import MODEL.gguf OUT_DIR\n")
        return 2
    try:
        convert(Path(arguments[0]), Path(arguments[1]), progress=say)
    except SetupError as error:
        sys.stderr.write(error.message + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
