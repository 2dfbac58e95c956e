"""A GGUF file of the llama architecture as a Hugging Face directory in bfloat16.

Also a program, so that a process that only wants the directory need not load torch:

    python -m twostep.model.loading.gguf_import MODEL.gguf OUT_DIR

It prints progress to stdout; on failure one message to stderr, and it exits with 1.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from twostep.checkpoint.directory import open_file
from twostep.errors import SetupError

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


_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Each digit is a piece of its own before anything else is split, so that spaces before a digit stay together.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# `tokenizer.ggml.pre` names how text is cut before merges apply; a wrong guess gives other ids and no error.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"gpt-2": _gpt2, "smollm": _smollm}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer that the metadata describe. Control and user-defined tokens (by token type) are matched in text as a whole;
    control tokens are special. Raises SetupError for another vocabulary type or an unknown pre-tokenizer."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise SetupError(
            f"tokenizer.ggml.model is {kind!r}; only gpt2 (byte-level BPE) is converted: give the Hugging Face directory instead"
        )
    if pre not in _PRE_TOKENIZERS:
        raise SetupError(
            f"tokenizer.ggml.pre is {pre!r}; converted are {', '.join(sorted(_PRE_TOKENIZERS))}: give the Hugging Face directory instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _SPECIAL_TOKENS.items():
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = tokens[token_id]
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config


def eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the end-of-sequence id, and that of <|endoftext|> where a chat model ends its turns with another token."""
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    end_of_text = [
        i
        for i, (token, token_type) in enumerate(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
        if token == "<|endoftext|>" and token_type == TokenType.CONTROL and i != eos
    ]
    return ([] if eos is None else [eos]) + end_of_text


_MAGIC = b"GGUF"
_HEAD = struct.Struct("<IQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")
_TENSOR_TAIL = struct.Struct("<IQ")
_TEXT, _ARRAY = 8, 9
# By number of the type: u8, i8, u16, i16, u32, i32, f32, bool, u64, i64, f64.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

_MAX_ENTRIES = 4096
_MAX_TENSORS = 1 << 16
_MAX_DIMENSIONS = 8
# Of all arrays together: the largest vocabularies have a quarter of a million tokens, with as many scores, types and merges.
_MAX_ITEMS = 1 << 22
# No quantization stores a weight in less than a bit.
_MAX_WEIGHTS_PER_BYTE = 8


def check_gguf(path: Path) -> None:
    """Holds what a file says of itself against its size before a library reads it, which believes any count. Raises SetupError for counts
    and sizes that cannot be true, in time and memory that do not depend on them.

    "GGUF" | u32 version | u64 tensors | u64 entries | entries: name, u32 type, value | tensors: name, u32 n, n * u64, u32 type, u64 offset
    a name or text: u64 bytes, then these      an array: u32 type of its items, u64 items, then these
    """
    try:
        num_bytes = path.stat().st_size
        with open_file(path) as file:
            _Walk(file, num_bytes).check()
    except (OSError, ValueError, struct.error) as error:
        raise SetupError(f"{path} cannot be read as GGUF ({error}); download it again") from error


class _Walk:
    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file = file
        self._num_bytes = num_bytes
        self._num_items = 0

    def check(self) -> None:
        if self._file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        _, num_tensors, num_entries = self._take(_HEAD)
        if num_entries > _MAX_ENTRIES or num_tensors > _MAX_TENSORS:
            raise ValueError(f"it says that it has {num_entries} entries and {num_tensors} tensors")
        for _ in range(num_entries):
            self._skip_text()
            self._skip_value(self._take(_U32)[0])
        for _ in range(num_tensors):
            self._skip_text()
            (num_dimensions,) = self._take(_U32)
            if num_dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {num_dimensions} dimensions")
            num_weights = math.prod(self._take(_U64)[0] for _ in range(num_dimensions))
            _, offset = self._take(_TENSOR_TAIL)
            if num_weights > _MAX_WEIGHTS_PER_BYTE * self._num_bytes or offset > self._num_bytes:
                raise ValueError(f"a tensor has {num_weights} weights at byte {offset}, the file {self._num_bytes} bytes")

    def _take(self, what: struct.Struct) -> tuple[int, ...]:
        return what.unpack(self._file.read(what.size))

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > self._num_bytes - self._file.tell():
            raise ValueError(f"{num_bytes} bytes are said to follow byte {self._file.tell()} of {self._num_bytes}")
        self._file.seek(num_bytes, 1)

    def _skip_text(self) -> None:
        self._skip(self._take(_U64)[0])

    def _skip_value(self, kind: int) -> None:
        if kind == _TEXT:
            self._skip_text()
        elif kind != _ARRAY:
            self._skip(self._scalar_bytes(kind))
        else:
            kind, num_items = self._take(_ARRAY_HEAD)
            self._num_items += num_items
            if self._num_items > _MAX_ITEMS:
                raise ValueError(f"its arrays are said to have {self._num_items} items")
            if kind == _TEXT:
                for _ in range(num_items):
                    self._skip_text()
            else:
                self._skip(num_items * self._scalar_bytes(kind))

    def _scalar_bytes(self, kind: int) -> int:
        """Arrays of arrays are no scalars either: no file of a model has any."""
        if kind not in _SCALAR_BYTES:
            raise ValueError(f"values of type {kind} are not known here")
        return _SCALAR_BYTES[kind]


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
