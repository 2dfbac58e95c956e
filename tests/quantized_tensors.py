"""Quantizes weights as formats are defined, one number at a time, and says what each number means. Independent of twostep's own loader:
definitions are those of AutoAWQ (gemm), AutoGPTQ, compressed-tensors, and of FP8 as vLLM reads it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Array = npt.NDArray[np.float32]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns is the i-th of a word


@dataclass(frozen=True)
class Kind:
    """Says what a test asks for. `group` 0: whole rows; `block`: rows and columns of FP8, (0, 0) the whole tensor, (1, 0) rows."""

    method: str  # awq | gptq | gptq_v2 | packed | int8 | fp8
    bits: int = 4
    group: int = 0
    symmetric: bool = True
    block: tuple[int, int] = (0, 0)
    activations: str = ""  # fp8-token | fp8-static | fp8-group | int8-token | int8-asymmetric
    ordered: bool = False


@dataclass(frozen=True)
class Quantized:
    tensors: dict[str, torch.Tensor]  # by the last part of their name
    dense: Array  # [out, in], what they mean


def float8_values() -> Array:
    """The value of each byte: a sign, 4 bits of exponent (bias 7), 3 of fraction; 0x7f and 0xff are no numbers."""
    values = []
    for byte in range(256):
        sign, exponent, fraction = (-1.0 if byte >> 7 else 1.0), byte >> 3 & 15, byte & 7
        value = (fraction / 8) * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        values.append(math.nan if byte & 127 == 127 else sign * value)
    return np.array(values, np.float32)


def to_float8(x: Array) -> npt.NDArray[np.uint8]:
    """The bytes of the nearest values, ties to the even fraction, beyond the largest the largest."""
    values = float8_values()[:127].astype(np.float64)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    above = np.clip(np.searchsorted(values, magnitude), 1, 126)
    low, high = values[above - 1], values[above]
    nearer_low = (magnitude - low < high - magnitude) | ((magnitude - low == high - magnitude) & ((above - 1) % 2 == 0))
    return (np.where(nearer_low, above - 1, above) + 128 * (np.signbit(x))).astype(np.uint8)


def quantize(kind: Kind, weight: Array, *, scale_dtype: torch.dtype = torch.float16, seed: int = 0) -> Quantized:
    rng = np.random.default_rng(seed)
    rows, columns = weight.shape
    height, width = kind.block if kind.method == "fp8" else (1, kind.group)
    height, width = height or rows, width or columns
    group_rows = [row // height for row in range(rows)]
    group_columns = [column // width for column in range(columns)]
    if kind.ordered:
        rng.shuffle(group_columns)
    sizes = (max(group_rows) + 1, max(group_columns) + 1)
    least, most = np.zeros(sizes), np.full(sizes, 1e-3)
    at = np.repeat(group_rows, columns), np.tile(group_columns, rows)
    np.minimum.at(least, at, weight.ravel())
    np.maximum.at(most, at, weight.ravel())
    low, high = (-448, 448) if kind.method == "fp8" else (-(2 ** (kind.bits - 1)), 2 ** (kind.bits - 1) - 1)
    exact = np.maximum(-least, most) / high if kind.symmetric else (most - least) / (high - low)
    scales = torch.from_numpy(exact).to(scale_dtype)
    scale = scales.float().numpy()
    # AutoGPTQ's `gptq` cannot say 0; the largest stands for it here, as it does there.
    zero = np.zeros(sizes, int) if kind.symmetric else np.clip(np.rint(low - least / scale), low, high).astype(int)
    each = scale[group_rows][:, group_columns]
    if kind.method == "fp8":
        stored = to_float8(weight / each)
        dense = float8_values()[stored] * each
        tensors = {"weight": torch.from_numpy(stored).view(torch.float8_e4m3fn)}
        if kind.activations == "fp8-group":
            tensors["weight_scale_inv"] = scales
        else:
            tensors["weight_scale"] = scales.flatten() if kind.block == (0, 0) else scales
    else:
        zeros = zero[group_rows][:, group_columns]
        numbers = np.clip(np.rint(weight / each) + zeros, low, high).astype(int)
        dense = (numbers - zeros).astype(np.float32) * each
        tensors = _stored(kind, numbers, zero, scales, group_columns)
    if kind.activations == "fp8-static":
        tensors["input_scale"] = torch.tensor([0.02])
    return Quantized({name: tensor.contiguous() for name, tensor in tensors.items()}, dense.astype(np.float32))


def _stored(
    kind: Kind, numbers: npt.NDArray[np.int64], zero: npt.NDArray[np.int64], scales: torch.Tensor, groups: list[int]
) -> dict[str, torch.Tensor]:
    middle = 2 ** (kind.bits - 1)
    if kind.method == "int8":
        tensors = {"weight": torch.from_numpy(numbers.astype(np.int8)), "weight_scale": scales}
        return tensors if kind.symmetric else tensors | {"weight_zero_point": torch.from_numpy(zero.astype(np.int8))}
    q, z = numbers + middle, zero + middle  # from 0 on
    if kind.method == "packed":
        tensors = {
            "weight_packed": _words(q, kind.bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(numbers.shape),
        }
        if kind.ordered:
            tensors["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
        return tensors if kind.symmetric else tensors | {"weight_zero_point": _words(z.T, kind.bits).T}
    if kind.method == "awq":
        return {"qweight": _words(q.T, 4, _AWQ_ORDER), "qzeros": _words(z.T, 4, _AWQ_ORDER), "scales": scales.T}
    less = 1 if kind.method == "gptq" else 0
    return {
        "qweight": _words(q, kind.bits).T,
        "qzeros": _words((z.T - less) % 2**kind.bits, kind.bits),
        "scales": scales.T,
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }


def _words(values: npt.NDArray[np.int64], bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Packs along the last axis, the first number in the lowest bits; `order`: which number of a word's is first, second, and so on."""
    per_word = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word)))
    words = np.zeros((len(values), padded.shape[1] // per_word), np.uint32)
    for place in range(per_word):
        chosen = padded[:, (order or range(per_word))[place] :: per_word]
        words |= chosen.astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32))


def rounded_input(kind: Kind, x: Array) -> Array:
    """Returns what the format's product sees of its input, x [T, in]."""
    if not kind.activations:
        return x
    if kind.activations == "fp8-group":
        width = kind.block[1]
        parts = [x[:, start : start + width] for start in range(0, x.shape[1], width)]
        return np.concatenate([_rounded(part, "fp8-token") for part in parts], 1)
    return _rounded(x, kind.activations)


def _rounded(x: Array, how: str) -> Array:
    if how == "int8-asymmetric":
        least, most = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
        scale = ((most - least) / np.float32(255)).astype(np.float32)
        zero = np.rint(-128 - least / scale)
        return ((np.rint(np.clip(x / scale + zero, -128, 127)) - zero) * scale).astype(np.float32)
    largest = np.abs(x).max(1, keepdims=True)
    if how == "int8-token":
        scale = largest / np.float32(127)
        return (np.rint(x / scale) * scale).astype(np.float32)
    scale = np.float32(0.02) if how == "fp8-static" else largest / np.float32(448)
    return (float8_values()[to_float8((x / scale).astype(np.float32))] * scale).astype(np.float32)


def config_of(kind: Kind) -> dict[str, object]:
    """quantization_config, as the format's own library writes it."""
    group = kind.group or -1
    if kind.method == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    if kind.method in ("gptq", "gptq_v2"):
        config = {"quant_method": "gptq", "bits": kind.bits, "group_size": group, "sym": kind.symmetric, "desc_act": kind.ordered}
        return config | {"checkpoint_format": kind.method, "damp_percent": 0.1, "true_sequential": True, "lm_head": False}
    if kind.method == "fp8" and kind.block != (1, 0):
        static = kind.activations == "fp8-static"
        config = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
        return config | ({"weight_block_size": list(kind.block)} if kind.activations == "fp8-group" else {})
    strategy = {"strategy": "group", "group_size": kind.group} if kind.group else {"strategy": "channel"}
    weights = {"num_bits": 8 if kind.method == "fp8" else kind.bits, "type": "float" if kind.method == "fp8" else "int"}
    weights |= {"symmetric": kind.symmetric, "dynamic": False, "actorder": "group" if kind.ordered else None} | strategy
    inputs = None
    if kind.activations:
        inputs = {"num_bits": 8, "type": "float" if "fp8" in kind.activations else "int", "strategy": "token", "dynamic": True}
        inputs |= {"symmetric": kind.activations != "int8-asymmetric"}
    layout = {"packed": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}[kind.method]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}},
        "ignore": ["lm_head"],
    }


def quantize_directory(source: Path, target: Path, kind: Kind) -> None:
    """Copies a model directory, with all layers but the output layer quantized."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        made = quantize(kind, tensors.pop(name).float().numpy(), scale_dtype=torch.float32)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in made.tensors.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": config_of(kind)}))


KINDS = {
    "awq": Kind("awq", group=16, symmetric=False),
    "awq whole rows": Kind("awq", symmetric=False),
    "gptq": Kind("gptq", group=16),
    "gptq 8 bits": Kind("gptq", bits=8, group=24, symmetric=False),
    "gptq asymmetric": Kind("gptq", group=16, symmetric=False),
    "gptq_v2": Kind("gptq_v2", group=16),
    "gptq_v2 asymmetric": Kind("gptq_v2", symmetric=False),
    "gptq in order of activations": Kind("gptq", group=16, ordered=True),
    "packed": Kind("packed", group=16),
    "packed asymmetric": Kind("packed", group=16, symmetric=False),
    "packed rows": Kind("packed", bits=8, symmetric=False),
    "packed in order": Kind("packed", group=16, ordered=True),
    "packed, fp8 inputs": Kind("packed", group=16, activations="fp8-token"),
    "int8": Kind("int8", bits=8),
    "int8 asymmetric": Kind("int8", bits=8, symmetric=False),
    "int8 groups": Kind("int8", bits=8, group=16),
    "w8a8": Kind("int8", bits=8, activations="int8-token"),
    "w8a8 asymmetric": Kind("int8", bits=8, activations="int8-asymmetric"),
    "fp8": Kind("fp8", activations="fp8-token"),
    "fp8 static": Kind("fp8", activations="fp8-static"),
    "fp8 rows": Kind("fp8", block=(1, 0), activations="fp8-token"),
    "fp8 blocks": Kind("fp8", block=(32, 32), activations="fp8-group"),
}
