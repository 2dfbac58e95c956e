"""Quantized experts, stored or quantized at the load, give the logits of what they become; and what contradicts itself is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from forward_helpers import make_batch, of_pool, save_model, scattered_sequences
from hypothesis import given
from hypothesis import strategies as st
from quantized_tensors import KINDS, Kind, quantize, quantize_directory
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from twostep.checkpoint.description import describe
from twostep.checkpoint.linear_format import MXFP4, LinearFormat
from twostep.checkpoint.quantization import fitting, quantization_at_load
from twostep.errors import SetupError
from twostep.model.families.registry import build_model, parse_config
from twostep.model.families.sharding import ModelPart, shard_of, with_whole_experts
from twostep.model.kernels import weight_quantizer
from twostep.model.kernels.ops import Ops
from twostep.model.loading.weights import load_weights
from twostep.model.runner.model_runner import ModelRunner

# Formats that pack rows by eight.
SIZES = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
AT_LOAD = {"int8": KINDS["int8"], "int4": Kind("packed", group=32), "fp8": KINDS["fp8 rows"]}


def logits(directory: Path, quantization: str = "none") -> torch.Tensor:
    runner = ModelRunner(directory, num_blocks=24, block_size=4, quantization=quantization)
    num_blocks = 16 if runner.kv_shape.num_groups == 1 else 24
    (sequence,) = scattered_sequences([23], 4, num_blocks, random.Random(0), **of_pool(runner.kv_shape))
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


OSS = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}


def in_4_bits(source: Path, target: Path) -> None:
    """gpt-oss as it is published: experts in MXFP4, any numbers, gates and what they gate by turns."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 126, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    path = target / "config.json"
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    save_model("gpt-oss", tmp_path / "model", **OSS)
    in_4_bits(tmp_path / "model", tmp_path / "quantized")
    shutil.copytree(tmp_path / "model", tmp_path / "dense")
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        scales = tensors.pop(name.replace("_blocks", "_scales"))
        tensors[name.removesuffix("_blocks")] = convert_moe_packed_tensors(tensors.pop(name), scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    assert error(logits(tmp_path / "quantized"), logits(tmp_path / "dense")) < 1e-4
    whole, packed = describe(tmp_path / "dense"), describe(tmp_path / "quantized")
    assert packed.num_weights == whole.num_weights
    assert packed.token_weights == whole.token_weights
    in_experts = 3 * 5 * 3 * 64 * 64
    assert [(share.format, share.num_layers, share.num_weights) for share in packed.formats] == [("fp4, groups of 32", 30, in_experts)]
    assert packed.loaded_bytes == whole.loaded_bytes - in_experts * 4 + in_experts // 2 + in_experts // 32 * 4


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_hold_their_parts_of_mxfp4(whole: bool, tmp_path: Path) -> None:
    """A rank's part of a product's columns, and its experts' biases, which are one rank's."""
    save_model("gpt-oss", tmp_path / "model", **OSS)
    in_4_bits(tmp_path / "model", tmp_path / "quantized")
    config = parse_config(tmp_path / "quantized")
    config = with_whole_experts(config) if whole else config
    models = [build_model(config, torch.float32, Ops())]
    for rank in range(2):
        shard = shard_of(config, rank, 2)
        models.append(build_model(shard.local, torch.float32, Ops(), "cpu", ModelPart(shard=shard, gather=lambda x: x)))
    x = torch.randn(6, 64)
    results = []
    for model in models:
        load_weights(model, tmp_path / "quantized")
        mlp = model._layers[1].mlp  # what is a term of a sum leaves a model in no other way
        results.append(mlp.leave(mlp.enter(x)))
    torch.testing.assert_close(results[1] + results[2], results[0], rtol=1e-4, atol=1e-4)


def test_gpt_oss_is_quantized_at_the_load(tmp_path: Path) -> None:
    """Its experts' weights lie the other way round."""
    save_model("gpt-oss", tmp_path / "model", **OSS)
    shutil.copytree(tmp_path / "model", tmp_path / "dense")
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    format = quantization_at_load("int8").groups[0].format

    def becomes(weight: torch.Tensor) -> torch.Tensor:
        return weight_quantizer.quantize(weight.contiguous(), format).dequantize(torch.float32)

    for name, weight in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = torch.stack([becomes(expert.T).T for expert in weight]).contiguous()
        elif name.endswith(("_proj.weight", "lm_head.weight")):
            tensors[name] = becomes(weight)
    save_file(tensors, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    assert error(logits(tmp_path / "model", "int8"), logits(tmp_path / "dense")) < 1e-2


def test_the_largest_input_scale_of_a_layer_is_every_experts(tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path / "model", moe_intermediate_size=32)
    quantize_directory(tmp_path / "model", tmp_path / "one", KINDS["fp8 static"])
    shutil.copytree(tmp_path / "one", tmp_path / "all")
    before = logits(tmp_path / "one")
    for directory, changed in (("one", ".0.mlp.experts.3.down_proj.input_scale"), ("all", ".down_proj.input_scale")):
        file = tmp_path / directory / "model.safetensors"
        tensors = load_file(file)
        for name in tensors:
            if name.endswith(changed) and ".layers.0.mlp.experts." in name:
                tensors[name] = torch.tensor([0.3])
        save_file(tensors, file, metadata={"format": "pt"})
    after = logits(tmp_path / "one")
    assert torch.equal(after, logits(tmp_path / "all"))
    assert not torch.equal(after, before)


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    save_model("gpt-oss", tmp_path / "model", **OSS)
    in_4_bits(tmp_path / "model", tmp_path / "quantized")
    file, name = tmp_path / "quantized" / "model.safetensors", "model.layers.0.mlp.experts.down_proj_scales"
    tensors = load_file(file)
    tensors[name][2, 5, 1] = 255
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SetupError) as refused:
        logits(tmp_path / "quantized")
    assert "model.layers.0.mlp.experts.2.down_proj.scales" in refused.value.message


def test_made_up_experts_of_4_bits(tmp_path: Path) -> None:
    save_model("gpt-oss", tmp_path / "model", **OSS)
    in_4_bits(tmp_path / "model", tmp_path / "quantized")
    runner = ModelRunner(tmp_path / "quantized", num_blocks=16, block_size=4, load_format="dummy")
    (sequence,) = scattered_sequences([5], 4, 16, random.Random(0), **of_pool(runner.kv_shape))
    assert runner.forward(make_batch([(sequence, 5)], 4)).isfinite().all()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=32, max_size=64), st.integers(0, 40))
def test_4_bits_are_the_nearest_floats(numbers: list[float], shift: int) -> None:
    weight = torch.tensor([numbers[: len(numbers) // 2 * 2]]).nan_to_num() * 2.0**-shift
    format = LinearFormat(storage=MXFP4, is_float=True, bits=4, block=(1, 32))
    made = weight_quantizer.quantize(weight, format)
    scale = made.spread(made.scales).expand(weight.shape)
    assert bool((made.scales.log2() == made.scales.log2().round()).all())
    # Half of the largest step, or what lies between 6 and 8.
    near = (made.dequantize(torch.float32) - weight).abs() <= scale * 1.0001
    assert bool((near | ((weight / scale).abs() > 6)).all())
    assert bool(((weight / scale).abs() < 8.001).all())


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
