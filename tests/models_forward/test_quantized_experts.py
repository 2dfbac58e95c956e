"""Quantized experts, stored or quantized at the load, give the logits of what they become; and what contradicts itself is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from forward_helpers import make_batch, save_model, scattered_sequences
from quantized_tensors import KINDS, Kind, quantize, quantize_directory
from safetensors.torch import load_file, save_file

from twostep.checkpoint.quantization import fitting, quantization_at_load
from twostep.errors import SetupError
from twostep.model.kernels import weight_quantizer
from twostep.model.runner.model_runner import ModelRunner

# Formats that pack rows by eight.
SIZES = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
AT_LOAD = {"int8": KINDS["int8"], "int4": Kind("packed", group=32), "fp8": KINDS["fp8 rows"]}


def logits(directory: Path, quantization: str = "none") -> torch.Tensor:
    runner = ModelRunner(directory, num_blocks=16, block_size=4, quantization=quantization)
    (sequence,) = scattered_sequences([23], 4, 16, random.Random(0))
    return runner.forward(make_batch([(sequence, 23)], 4))


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


def dequantized(source: Path, target: Path, kind: Kind) -> None:
    """The same model, its layers' weights what the format makes of them."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = torch.from_numpy(quantize(kind, tensors[name].float().numpy(), scale_dtype=torch.float32).dense)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["awq", "gptq in order of activations", "packed asymmetric", "w8a8", "fp8 static", "fp8 blocks"])
def test_logits_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    save_model("qwen2-moe", tmp_path / "model", **SIZES)
    dequantized(tmp_path / "model", tmp_path / "dense", kind)
    quantize_directory(tmp_path / "model", tmp_path / "quantized", kind)
    # Inputs that are rounded to 8 bits move logits, and a few tokens to other experts.
    assert error(logits(tmp_path / "quantized"), logits(tmp_path / "dense")) < (0.3 if kind.activations else 1e-2)


@pytest.mark.parametrize("name", AT_LOAD)
def test_experts_are_quantized_at_the_load(name: str, tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path / "model", moe_intermediate_size=32)
    shutil.copytree(tmp_path / "model", tmp_path / "dense")
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    groups = quantization_at_load(name).groups
    for tensor in [each for each in tensors if each.endswith("_proj.weight") or (each == "lm_head.weight" and name != "fp8")]:
        format = groups[-1].format if tensor == "lm_head.weight" else groups[0].format
        weight = tensors[tensor]
        tensors[tensor] = weight_quantizer.quantize(weight, fitting(format, weight.shape[1])).dequantize(torch.float32)
    save_file(tensors, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    assert error(logits(tmp_path / "model", name), logits(tmp_path / "dense")) < (0.3 if name == "fp8" else 1e-2)


def test_experts_of_one_layer_have_one_format(tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path / "model", moe_intermediate_size=32)
    quantize_directory(tmp_path / "model", tmp_path / "quantized", KINDS["packed"])
    path = tmp_path / "quantized" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"].append("model.layers.2.mlp.experts.4.down_proj")
    path.write_text(json.dumps(config))
    with pytest.raises(SetupError) as refused:
        logits(tmp_path / "quantized")
    assert "model.layers.2.mlp.experts.4.down_proj" in refused.value.message


@pytest.mark.parametrize("tensor", ["mlp.experts.6.up_proj.weight", "mlp.experts.7.up_proj.weight", "mlp.gate.weight"])
def test_missing_and_surplus_tensors_of_experts_are_refused_by_name(tensor: str, tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path)
    file, name = tmp_path / "model.safetensors", f"model.layers.0.{tensor}"
    tensors = load_file(file)
    if name in tensors:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(28, 48)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SetupError) as refused:
        logits(tmp_path)
    assert name in refused.value.message
