"""What a model directory holds, by its config.json and its weight files' headers alone: formats, layers, bytes. Torch-free."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.checkpoint.directory import FLOAT_DTYPES, read_header, read_json, stored_dtype, weight_files
from twostep.checkpoint.linear_format import LinearFormat, Role
from twostep.checkpoint.quantization import Quantization, read_quantization
from twostep.errors import SetupError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NUMBER = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatShare:
    """Layers of one format. `num_weights` counts numbers, `num_bytes` is what they and their scales take in the files."""

    format: str
    num_layers: int
    num_weights: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    architecture: str
    dtype: str
    method: str  # of quantization; empty: none
    formats: tuple[FormatShare, ...]
    unquantized: tuple[str, ...]  # matrices that are left as they are; layers' numbers are a *
    num_weights: int
    num_bytes: int  # in the files
    loaded_bytes: int  # once they are served in `dtype`


def describe(model_dir: Path) -> ModelDescription:
    """Raises SetupError, naming file, key or tensor, for what is missing, broken or not supported. It does not look whether the
    architecture is."""
    config = read_json(model_dir / "config.json")
    quantization = read_quantization(model_dir, config)
    tensors = {name: raw for path in weight_files(model_dir) for name, raw in read_header(path).tensors.items()}
    dtype = str(config.get("dtype") or config.get("torch_dtype") or stored_dtype(model_dir)).removeprefix("torch.")
    if dtype not in _ITEM_BYTES:
        raise SetupError(f"{model_dir / 'config.json'}: dtype is {dtype}; supported are {', '.join(_ITEM_BYTES)}")
    layers, weights, sizes = Counter[str](), Counter[str](), Counter[str]()
    seen: set[str] = set()
    for layer, format in _quantized(quantization, tensors):
        kind = str(format)
        parts = {part.role: (part, tensors.get(f"{layer}.{part.suffix}")) for part in format.parts}
        seen |= {f"{layer}.{part.suffix}" for part, raw in parts.values() if raw is not None}
        part, raw = parts[Role.WEIGHT]
        layers[kind] += 1
        weights[kind] += math.prod(_shape(raw)) * math.prod(part.units)
        sizes[kind] += sum(_num_bytes(raw) for _, raw in parts.values())
    others = {name: raw for name, raw in tensors.items() if name not in seen}
    for name, raw in others.items():
        if raw.get("dtype") not in FLOAT_DTYPES and name.endswith((".weight", ".bias")):
            raise SetupError(f"{model_dir}: tensor {name} is stored as {raw.get('dtype')}, but nothing says how it is quantized")
    num_weights = sum(weights.values()) + sum(math.prod(_shape(raw)) for raw in others.values())
    names = Counter(_NUMBER.sub(".*.", name.removesuffix(".weight")) for name, raw in others.items() if len(_shape(raw)) > 1)
    names_of_architecture = config.get("architectures") or [config.get("model_type")]
    return ModelDescription(
        architecture=str(names_of_architecture[0] if isinstance(names_of_architecture, list) else names_of_architecture),
        dtype=dtype,
        method="" if quantization is None else quantization.method,
        formats=tuple(
            FormatShare(format=kind, num_layers=count, num_weights=weights[kind], num_bytes=sizes[kind]) for kind, count in layers.items()
        ),
        unquantized=tuple(f"{name} ({count})" if count > 1 else name for name, count in names.items()),
        num_weights=num_weights,
        num_bytes=sum(map(_num_bytes, tensors.values())),
        # Scales are no weights any more.
        loaded_bytes=num_weights * _ITEM_BYTES[dtype],
    )


def _quantized(quantization: Quantization | None, tensors: Iterable[str]) -> Iterable[tuple[str, LinearFormat]]:
    """Yields the layers whose weight and scales are stored as the config says."""
    if quantization is None:
        return
    names = frozenset(tensors)
    for layer in dict.fromkeys(name.rpartition(".")[0] for name in names):
        format = quantization.format_of(layer)
        if format is not None and all(f"{layer}.{part.suffix}" in names for part in format.parts if part.required):
            yield layer, format


def _shape(raw: dict[str, Any] | None) -> list[int]:
    shape = [] if raw is None else raw.get("shape")
    return shape if isinstance(shape, list) and all(isinstance(n, int) for n in shape) else []


def _num_bytes(raw: dict[str, Any] | None) -> int:
    if raw is None:
        return 0
    start, stop = raw["data_offsets"]
    return int(stop) - int(start)
