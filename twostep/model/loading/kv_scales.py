"""Reads a checkpoint's scales of keys and values: `k_scale` and `v_scale` of each layer's attention, or of its projections (ModelOpt)."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from twostep.checkpoint.directory import FLOAT_DTYPES
from twostep.errors import SetupError
from twostep.model.families.config import ModelConfig
from twostep.model.families.modules import Place
from twostep.model.loading.weight_files import StoredTensor, read_weights, stored_tensors

_SHOWN = 8
_NAME = re.compile(r".*\blayers\.(\d+)\.self_attn\.(?:[kv]_proj\.)?([kv])_scale")


def read_kv_scales(model_dir: Path, config: ModelConfig) -> torch.Tensor:
    """Returns float32 [num_layers, 2, num_kv_heads], of keys and of values. Raises SetupError, naming the tensor, for a scale that is
    missing, is there twice, has another shape than kv_cache_scheme says, or is no positive number."""
    num_layers, heads = config.num_layers, config.num_kv_heads
    by_head = config.kv_scheme is not None and config.kv_scheme.by_head
    asked, what = ((heads,), f"one for each of {heads} heads") if by_head else ((1,), "one number")
    found: dict[tuple[int, str], StoredTensor] = {}
    for tensor in stored_tensors(model_dir):
        if (match := _NAME.fullmatch(tensor.name)) is None:
            continue
        place = int(match[1]), match[2]
        if place in found:
            raise SetupError(f"{tensor.name} and {found[place].name} of {model_dir} are the same scale; remove one of them")
        # Sides of 1 may be left out or added.
        if tensor.stored_as not in FLOAT_DTYPES or [n for n in tensor.shape if n != 1] != [n for n in asked if n != 1]:
            raise SetupError(f"tensor {tensor.name} is {tensor.stored_as} {list(tensor.shape)}; its scales are floating-point, {what}")
        found[place] = tensor
    scales = torch.empty(num_layers, 2, heads)
    for layer in range(num_layers):
        for i, kind in enumerate("kv"):
            if (layer, kind) not in found:
                raise SetupError(
                    f"{model_dir} lacks the scale model.layers.{layer}.self_attn.{kind}_scale that kv_cache_scheme in config.json "
                    "promises; download the model again, or give --kv-cache-dtype exact"
                )
            tensor = found[layer, kind]
            value = torch.empty(tensor.shape)
            read_weights([(tensor, Place.whole(value))])
            if not bool((value.isfinite() & (value > 0)).all()):
                raise SetupError(
                    f"tensor {tensor.name} has {value.flatten().tolist()[:_SHOWN]}, no positive numbers; download the model again"
                )
            scales[layer, i] = value.flatten()
    return scales
