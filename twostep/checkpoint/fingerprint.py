"""Computes the fingerprint by which router and workers know that they serve the same model. Torch-free, milliseconds whatever the size."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from twostep.checkpoint.config_file import read_config
from twostep.checkpoint.directory import has_file, open_file, read_header, weight_files
from twostep.checkpoint.quantization import QUANTIZATION_FILES
from twostep.errors import SetupError

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_DUMMY = "dummy-"
_ANY = "any"
_HOW = "+"


def model_fingerprint(model_dir: Path, architecture: str = "") -> str:
    """Hex sha256 over config.json (canonical), tokenizer.json, and of each safetensors file: name, size, header, and 64 evenly
    spaced samples of 4 KiB of its data; and what files beside config.json say of quantization. `architecture` is as if config.json said it.

    It tells apart: other shapes, dtypes, configurations, vocabularies, layouts of shards; other checkpoints and fine-tunes (which
    move nearly every weight); truncated or exchanged files. It does not see a change between the samples (a flipped bit, one edited
    tensor), nor generation_config.json and the chat template, which do not change what a worker computes. The directory's own
    name and the order of config.json's keys do not matter.

    Raises SetupError, naming the file, for a directory that is no complete model."""
    digest = hashlib.sha256(b"twostep model 1")
    config = read_config(model_dir, architecture)
    _add(digest, json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    tokenizer = model_dir / "tokenizer.json"
    try:
        _add(digest, _read(tokenizer))
        for name in QUANTIZATION_FILES:
            if has_file(model_dir / name):
                _add(digest, _read(model_dir / name))
        for path in weight_files(model_dir):
            header = read_header(path)
            _add(digest, path.name.encode())
            _add(digest, struct.pack("<Q", header.num_bytes))
            _add(digest, header.raw)
            last = max(header.data_start, header.num_bytes - _SAMPLE_BYTES)
            with open_file(path, buffering=0) as file:
                for i in range(_SAMPLES_PER_FILE):
                    file.seek(header.data_start + (last - header.data_start) * i // (_SAMPLES_PER_FILE - 1))
                    _add(digest, file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise SetupError(f"{error.filename or model_dir} cannot be read: {error.strerror or error}; download the model again") from error
    return digest.hexdigest()


def dummy_fingerprint(model_dir: Path, kind: str = _ANY, architecture: str = "") -> str:
    """Returns the fingerprint of made-up weights, which follow from the shape and from `kind`, the device and the parts they are made in.
    Without a kind it stands for all of them, to ask only whether it is the same model."""
    shape = json.dumps(read_config(model_dir, architecture), sort_keys=True)
    return f"{_DUMMY}{kind}-{hashlib.sha256(shape.encode()).hexdigest()}"


def quantized_fingerprint(fingerprint: str, quantization: str) -> str:
    """Returns that of a model whose weights are quantized as they are read, or not ("none"): its KV is another."""
    return fingerprint if quantization == "none" else f"{fingerprint}{_HOW}{quantization}"


def turned_fingerprint(fingerprint: str, factors: str) -> str:
    """Returns that of a model whose keys turn by one of several lists of factors, as the context that is served asks for; empty: there is
    one way. Its KV is another."""
    return f"{fingerprint}{_HOW}{factors}" if factors else fingerprint


def is_same_model(wanted: str, found: str) -> bool:
    """Returns whether the fingerprint `found` is `wanted`, however it is served; or is of made-up weights, and `wanted` is of
    any such."""
    found = found.partition(_HOW)[0]
    any_kind = f"{_DUMMY}{_ANY}-"
    if wanted.startswith(any_kind):
        return found.startswith(_DUMMY) and found.endswith(wanted.removeprefix(any_kind))
    return found == wanted


def _read(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """With its length, so that no two sequences of parts look the same."""
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)
