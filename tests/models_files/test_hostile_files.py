"""Wrong or huge claims of a model directory about itself are refused by name, before they take memory or time."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from twostep.checkpoint.directory import read_header, weight_files
from twostep.checkpoint.embedding_format import EmbeddingFormat
from twostep.checkpoint.fingerprint import model_fingerprint
from twostep.errors import InvalidRequest, SetupError
from twostep.model.families.registry import parse_config
from twostep.model.loading.gguf_import import check_gguf, convert
from twostep.model.loading.weight_files import stored_tensors
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import Tokenizer
from twostep.text.tokenizer_files import repeats_repetitions

HUGE = 1 << 60
# Python memory that reading may take: a small model's files and some more.
_MOST_BYTES = 64 << 20


@pytest.fixture
def model_dir(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_dir, tmp_path / "model"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(work: Callable[[], object]) -> str:
    """The message. Counts the memory rather than the time."""
    tracemalloc.start()
    try:
        with pytest.raises(SetupError) as caught:
            work()
        assert tracemalloc.get_traced_memory()[1] < _MOST_BYTES
    finally:
        tracemalloc.stop()
    assert len(caught.value.message) < 2000
    return caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads", "hidden_size")
          for value in (10**9, 10**12, HUGE, -1, 0, 1.5, True, "3", [3], 10**400)),
        ("intermediate_size", 1 << 30),
        ("head_dim", 1 << 20),
        ("max_position_embeddings", 1 << 31),
        ("rope_parameters", {"rope_type": "yarn", "factor": 1e300, "rope_theta": 10000.0}),
        ("rope_parameters", {"rope_type": {"rope_type": {}}}),
        ("rope_parameters", {"rope_type": "default", "more": {"rope_parameters": {}}}),
        ("rope_scaling", [[[]]]),
        ("layer_types", ["full_attention"] * 100_000),
        ("sliding_window", -HUGE),
    ],
)  # fmt: skip
def test_configurations(model_dir: Path, key: str, value: Any) -> None:
    change(model_dir / "config.json", **{key: value})
    message = refused(lambda: parse_config(model_dir))
    assert "config.json" in message


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"vocab_size": 10**12}),
        ("config.json", {"max_position_embeddings": HUGE}),
        ("config.json", {"eos_token_id": list(range(100_000))}),
        ("generation_config.json", {"eos_token_id": HUGE}),
        ("generation_config.json", {"eos_token_id": [[1]]}),
        ("generation_config.json", {"temperature": [0] * 10_000}),
        ("tokenizer_config.json", {"chat_template": "x" * (2 << 20)}),
    ],
)
def test_cards(model_dir: Path, file: str, values: dict[str, Any]) -> None:
    (model_dir / "chat_template.jinja").unlink()
    change(model_dir / file, **values)
    refused(lambda: ModelCard.load(model_dir))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_of_gigabytes(model_dir: Path, name: str) -> None:
    """Which take no place on a disk."""
    with (model_dir / name).open("ab") as file:
        file.truncate(4 << 30)
    assert name in refused(lambda: ModelCard.load(model_dir))


def test_a_tokenizer_of_gigabytes(model_dir: Path) -> None:
    with (model_dir / "tokenizer.json").open("ab") as file:
        file.truncate(4 << 30)
    assert "tokenizer.json" in refused(lambda: Tokenizer.load(model_dir))


def header(tensors: Any, data: int = 0) -> bytes:
    raw = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(raw)) + raw + b"\0" * data


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        header(b"[" * 1_000_000),
        header({"a.weight": {"dtype": "F32", "shape": [HUGE] * 100_000, "data_offsets": [0, 4]}}, 4),
        header({"a.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, HUGE]}}, 4),
        header({"a.weight": {"dtype": "F32", "shape": [10**4000], "data_offsets": [0, 4]}}, 4),
        header({"a.weight": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, 4),
        header({"a.weight": {"dtype": "F32", "shape": [1], "data_offsets": [1e308, 4]}}, 4),
        header({"a.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b.weight": [1]}, 4),
    ],
)
def test_safetensors(model_dir: Path, content: bytes) -> None:
    (model_dir / "model.safetensors").write_bytes(content)
    refused(lambda: stored_tensors(model_dir))


def test_a_header_of_gigabytes(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 99_000_000))
    with path.open("ab") as file:
        file.truncate(4 << 30)
    for work in (lambda: read_header(path), lambda: model_fingerprint(model_dir)):
        refused(work)


@pytest.mark.parametrize(
    "shards",
    [
        ["../model/model.safetensors"],
        ["/etc/passwd"],
        ["a/../b.safetensors"],
        ["..safetensors/x.safetensors"],
        [f"{i}.safetensors" for i in range(9000)],
    ],
)
def test_shards_elsewhere(model_dir: Path, shards: list[str]) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "shard.safetensors")
    index = {"weight_map": {f"model.{i}.weight": shard for i, shard in enumerate(shards)}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "index.json" in refused(lambda: weight_files(model_dir))


def gguf(*, tensors: int = 0, entries: int = 0, rest: bytes = b"") -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, entries) + rest


def text(words: bytes) -> bytes:
    return struct.pack("<Q", len(words)) + words


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return text(b"a") + struct.pack("<IIQ", 9, kind, count) + items


@pytest.mark.parametrize(
    "content",
    [
        gguf(entries=HUGE),
        gguf(tensors=HUGE),
        gguf(entries=1, rest=struct.pack("<Q", HUGE) + b"x"),
        gguf(entries=1, rest=text(b"a") + struct.pack("<IQ", 8, HUGE)),
        # A library reads past the end of the file without noticing, once for each item.
        *(gguf(entries=1, rest=array(kind, HUGE)) for kind in (0, 4, 8, 9, 12, 77)),
        gguf(entries=1, rest=array(0, 1 << 30)),
        gguf(entries=1, rest=text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50_000),
        gguf(entries=1, rest=text(b"a") + struct.pack("<I", 77)),
        gguf(tensors=1, rest=text(b"t") + struct.pack("<I", 1 << 31)),
        gguf(tensors=1, rest=text(b"t") + struct.pack("<IQQQQIQ", 4, HUGE, HUGE, HUGE, HUGE, 0, 0)),
        gguf(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 4, 0, HUGE)),
    ],
)
def test_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bomb.gguf"
    path.write_bytes(content)
    assert "bomb.gguf" in refused(lambda: convert(path, tmp_path, progress=lambda line: None))


def test_a_gguf_whose_counts_are_true(tmp_path: Path) -> None:
    path = tmp_path / "fine.gguf"
    rest = array(8, 2, text(b"ab") + text(b"")) + text(b"n") + struct.pack("<If", 6, 1.0) + text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0)
    path.write_bytes(gguf(entries=2, tensors=1, rest=rest) + b"\0" * 64)
    check_gguf(path)


@pytest.mark.parametrize("pattern", [r"(x+x+)+y", r"(a*)*", r"((a+)b?)+", r"(?:\s+|a){2,}", r"(?:a|(b+))*"])
def test_patterns_that_never_end(model_dir: Path, pattern: str) -> None:
    tokenizer = Tokenizer.load(model_dir)._inner
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    tokenizer.save(str(model_dir / "tokenizer.json"))
    assert "tokenizer.json" in refused(lambda: Tokenizer.load(model_dir))


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*""",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}",
        r"\d{1,3}(?=(?:\d{3})*\b)",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$",
        r"(a+)b(c+)",
    ],
)
def test_patterns_of_models(pattern: str) -> None:
    assert not repeats_repetitions(pattern)


def test_a_tokenizer_that_gives_up_on_a_text_refuses_it(model_dir: Path) -> None:
    inner = Tokenizer.load(model_dir)._inner
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    with pytest.raises(InvalidRequest):
        Tokenizer(inner).encode("x" * 40)


def _is_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        # The path may be too long for an address.
        here = os.open(path.parent, os.O_DIRECTORY)
        sock.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def _read_all(model_dir: Path) -> None:
    """Everything that routers and workers read of a directory."""
    parse_config(model_dir)
    ModelCard.load(model_dir)
    Tokenizer.load(model_dir)
    EmbeddingFormat.load(model_dir)
    model_fingerprint(model_dir)
    stored_tensors(model_dir)


FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "modules.json", "1_Pooling/config.json"),
    "sentence_bert_config.json",
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
)


@pytest.mark.parametrize(
    ("name", "make"), [*((name, os.mkfifo) for name in FILES), ("tokenizer.json", _is_socket), ("chat_template.jinja", os.mkdir)]
)
def test_what_is_no_file_is_refused_by_name(model_dir: Path, name: str, make: Callable[[Path], None]) -> None:
    path = model_dir / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if name == "chat_template.json":
        (model_dir / "chat_template.jinja").unlink()
    if name == "model.safetensors.index.json":
        (model_dir / "model.safetensors").unlink()
    make(path)
    assert str(path) in refused(lambda: _read_all(model_dir))


def test_a_gguf_file_that_is_none_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    assert "m.gguf" in refused(lambda: check_gguf(tmp_path / "m.gguf"))
