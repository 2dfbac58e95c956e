"""What a model directory holds, by its config.json and its weight files' headers alone: formats, layers, bytes. Torch-free."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostep.checkpoint.config_file import read_config
from twostep.checkpoint.directory import FLOAT_DTYPES, read_header, stored_dtype, weight_files
from twostep.checkpoint.expert_sizes import ExpertSizes, read_expert_sizes
from twostep.checkpoint.held import held_bytes, held_in_head
from twostep.checkpoint.kv_scheme import read_kv_scheme
from twostep.checkpoint.linear_format import LinearFormat, Role
from twostep.checkpoint.quantization import HEAD, Quantization, check_unquantized, fitting, quantization_at_load, read_quantization
from twostep.checkpoint.stacked import names_apart, shape_apart
from twostep.checkpoint.usual_keys import lies_turned, usual_keys
from twostep.errors import SetupError

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NUMBER = re.compile(r"\.\d+\.")
_EXPERT = ".experts."
# Embeddings of tokens, positions and distances, which no product takes.
_LOOKED_UP = re.compile(r"embed(?!_out)|\bw[tp]e$|^shared$|\brelative_attention_bias$")


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
    method: str  # of quantization of weights; empty: none
    kv: str | None  # how it wants its KV held; None: it does not say
    formats: tuple[FormatShare, ...]
    unquantized: tuple[str, ...]  # matrices that are left as they are; layers' numbers are a *
    num_weights: int
    token_weights: int  # that one token is multiplied with or looked up in: of experts those that it goes to
    experts: ExpertSizes | None
    num_bytes: int  # in the files
    loaded_bytes: int  # once a GPU serves it, with `dtype` for what is not quantized
    cpu_bytes: int  # once a CPU does, which unpacks what it has no product for


def describe(model_dir: Path, *, dtype: str = "auto", quantization: str = "none", architecture: str = "") -> ModelDescription:
    """`dtype` auto: as config.json says; `quantization`: as --quantization. Raises SetupError, naming file, key or tensor, for what is
    missing, broken or not supported. It does not look whether the architecture is."""
    config = read_config(model_dir, architecture)
    found = read_quantization(model_dir, config)
    if quantization != "none":
        check_unquantized(found, quantization)
        found = quantization_at_load(quantization)
    headers = [read_header(path) for path in weight_files(model_dir)]
    tensors = {name: raw for header in headers for stored in header.tensors.items() for name, raw in _apart(*stored)}
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or stored_dtype(model_dir)).removeprefix("torch.")
    if dtype not in _ITEM_BYTES:
        raise SetupError(f"{model_dir / 'config.json'}: dtype is {dtype}; supported are {', '.join(_ITEM_BYTES)}")
    layers, weights, sizes, held = Counter[str](), Counter[str](), Counter[str](), Counter[bool]()
    experts, in_experts = read_expert_sizes(config), 0
    seen: set[str] = set()
    for layer, format, (rows, columns) in _quantized(model_dir, config, found, tensors):
        for on_cpu in (False, True):
            held[on_cpu] += held_bytes(format, rows, columns, item_bytes=_ITEM_BYTES[dtype], on_cpu=on_cpu)
        kind = str(format)
        layers[kind] += 1
        weights[kind] += rows * columns
        in_experts += rows * columns if _EXPERT in layer else 0
        if found is not None and not found.stored:
            seen.add(f"{layer}.weight")
            sizes[kind] += _num_bytes(tensors.get(f"{layer}.weight"))
            continue
        parts = {part.role: (part, tensors.get(f"{layer}.{part.suffix}")) for part in format.parts}
        seen |= {f"{layer}.{part.suffix}" for part, raw in parts.values() if raw is not None}
        sizes[kind] += sum(_num_bytes(raw) for _, raw in parts.values())
    if (head := _tied_head(config, found, tensors)) is not None:
        for on_cpu in (False, True):
            held[on_cpu] += held_in_head(found, *head, item_bytes=_ITEM_BYTES[dtype], on_cpu=on_cpu)
    others = {name: raw for name, raw in tensors.items() if name not in seen}
    for name, raw in others.items():
        if raw.get("dtype") not in FLOAT_DTYPES and name.endswith((".weight", ".bias")):
            raise SetupError(f"{model_dir}: tensor {name} is stored as {raw.get('dtype')}, but nothing says how it is quantized")
    dense_bytes = sum(math.prod(_shape(raw)) for raw in others.values()) * _ITEM_BYTES[dtype]
    num_weights = sum(weights.values()) + sum(math.prod(_shape(raw)) for raw in others.values())
    in_experts += sum(math.prod(_shape(raw)) for name, raw in others.items() if _EXPERT in name)
    unused = 0 if experts is None else in_experts * (experts.num_experts - experts.top_k) // experts.num_experts
    names = Counter(_NUMBER.sub(".*.", name.removesuffix(".weight")) for name, raw in others.items() if len(_shape(raw)) > 1)
    names_of_architecture = config.get("architectures") or [config.get("model_type")]
    return ModelDescription(
        architecture=str(names_of_architecture[0] if isinstance(names_of_architecture, list) else names_of_architecture),
        dtype=dtype,
        method="" if found is None else found.method,
        kv=None if (kv := read_kv_scheme(model_dir, config)) is None else str(kv),
        formats=tuple(
            FormatShare(format=kind, num_layers=count, num_weights=weights[kind], num_bytes=sizes[kind]) for kind, count in layers.items()
        ),
        unquantized=tuple(f"{name} ({count})" if count > 1 else name for name, count in names.items()),
        num_weights=num_weights,
        token_weights=num_weights - unused,
        experts=experts,
        num_bytes=sum(map(_num_bytes, tensors.values())),
        loaded_bytes=dense_bytes + held[False],
        cpu_bytes=dense_bytes + held[True],
    )


def _apart(name: str, raw: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yields a tensor, or those that it holds."""
    shape = _shape(raw)
    names = names_apart(name, shape)
    if not names:
        yield name, raw
        return
    start, size = int(raw["data_offsets"][0]), _num_bytes(raw) // len(names)
    for i, each in enumerate(names):
        yield each, raw | {"shape": list(shape_apart(shape)), "data_offsets": [start + i * size, start + (i + 1) * size]}


def _quantized(
    model_dir: Path, config: Mapping[str, Any], quantization: Quantization | None, tensors: Mapping[str, dict[str, Any]]
) -> Iterable[tuple[str, LinearFormat, tuple[int, int]]]:
    """Yields the layers whose weight is stored as the config says, or that become so as they are read, with its shape as [out, in]. Raises
    SetupError where a tensor is missing beside a weight."""
    if quantization is None:
        return
    for layer in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        format = quantization.format_of(layer)
        if format is None:
            continue
        if not quantization.stored:
            shape = _shape(tensors.get(f"{layer}.weight"))
            if len(shape) == 2 and not _LOOKED_UP.search(layer):
                rows, columns = shape[::-1] if lies_turned(config, layer) else shape
                yield layer, fitting(format, columns), (rows, columns)
            continue
        part = next(part for part in format.parts if part.role is Role.WEIGHT)
        weight = tensors.get(f"{layer}.{part.suffix}")
        if weight is None or weight.get("dtype") not in part.dtypes:
            continue
        if missing := [name for part in format.parts if part.required and (name := f"{layer}.{part.suffix}") not in tensors]:
            raise SetupError(f"{model_dir} lacks the tensor {missing[0]}, without which {layer} means nothing; download the model again")
        shape = _shape(weight)
        if len(shape) == 2:
            rows, columns = shape[::-1] if part.turned else shape
            yield layer, format, (rows * part.units[0], columns * part.units[1])


def _tied_head(
    config: Mapping[str, Any], quantization: Quantization | None, tensors: Mapping[str, dict[str, Any]]
) -> tuple[int, int] | None:
    """Returns the shape of an output layer that is the embedding in the files, and quantized by itself as they are read; None: there is
    none."""
    config = usual_keys(config)
    if quantization is None or quantization.stored or quantization.format_of(HEAD) is None or not config.get("tie_word_embeddings"):
        return None
    rows, columns = config.get("vocab_size"), config.get("hidden_size")
    return (rows, columns) if isinstance(rows, int) and isinstance(columns, int) and f"{HEAD}.weight" not in tensors else None


def _shape(raw: dict[str, Any] | None) -> list[int]:
    return [] if raw is None else list(raw["shape"])


def _num_bytes(raw: dict[str, Any] | None) -> int:
    if raw is None:
        return 0
    start, stop = raw["data_offsets"]
    return int(stop) - int(start)
