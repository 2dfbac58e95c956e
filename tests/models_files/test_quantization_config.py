"""Quantization configs are read as their libraries write them, and refused by key where they cannot be honoured."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest

from twostep.checkpoint.linear_format import AWQ, GPTQ, GPTQ_V2, PACKED, PLAIN, PLAIN_BLOCKS, Activations, LinearFormat
from twostep.checkpoint.quantization import Quantization, read_quantization
from twostep.errors import SetupError

Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj", "lm_head"

_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True, "dynamic": False}
_WEIGHTS |= {"actorder": None, "observer": "minmax", "observer_kwargs": {}, "block_structure": None, "scale_dtype": None, "zp_dtype": None}
_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True, "group_size": None}
CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.19.0",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": None, "output_activations": None, "format": None}
    },
}
AUTOAWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
AUTOGPTQ = {
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.01,
    "desc_act": False,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": "model",
    "is_marlin_format": False,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128], "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}


def read(raw: Any, tmp_path: Path = Path("nowhere")) -> Quantization | None:
    return read_quantization(tmp_path, {"quantization_config": raw})


def format_of(raw: Any, layer: str = Q) -> LinearFormat | None:
    found = read(raw)
    assert found is not None
    return found.format_of(layer)


def ct(path: str = "", value: Any = None, **keys: Any) -> dict[str, Any]:
    """The config with one value of the group exchanged, and keys of its own."""
    config = copy.deepcopy(CT)
    *parents, last = (path or "weights.dynamic").split(".")
    inner = config["config_groups"]["group_0"]
    for parent in parents:
        inner = inner[parent]
    inner[last] = value if path else False
    return config | keys


def weights(**keys: Any) -> dict[str, Any]:
    return ct("weights", _WEIGHTS | keys)


INT4 = LinearFormat(storage=PACKED, is_float=False, bits=4, block=(1, 64))
PER_TOKEN = Activations(is_float=True, dynamic=True)
W8A8 = {"num_bits": 8, "strategy": "channel", "group_size": None}


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (AUTOAWQ, LinearFormat(storage=AWQ, is_float=False, bits=4, block=(1, 128), symmetric=False)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "zero_point": True, "version": "GEMM"},
            LinearFormat(storage=AWQ, is_float=False, bits=4, block=(1, 0), symmetric=False),
        ),
        (AUTOGPTQ | {"quant_method": "gptq"}, LinearFormat(storage=GPTQ, is_float=False, bits=4, block=(1, 128))),
        (
            AUTOGPTQ | {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2", "sym": False, "desc_act": True},
            LinearFormat(storage=GPTQ_V2, is_float=False, bits=8, block=(1, 128), symmetric=False, ordered=True),
        ),
        (FP8, LinearFormat(storage=PLAIN, is_float=True, bits=8, block=(0, 0), activations=PER_TOKEN)),
        (
            FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]},
            LinearFormat(storage=PLAIN, is_float=True, bits=8, block=(0, 0), activations=Activations(is_float=True, dynamic=False)),
        ),
        (
            BLOCKS,
            LinearFormat(
                storage=PLAIN_BLOCKS,
                is_float=True,
                bits=8,
                block=(128, 128),
                activations=Activations(is_float=True, dynamic=True, group=128),
            ),
        ),
        (CT, INT4),
        (weights(symmetric=False, group_size=32), LinearFormat(storage=PACKED, is_float=False, bits=4, block=(1, 32), symmetric=False)),
        (weights(strategy="channel", group_size=None), LinearFormat(storage=PACKED, is_float=False, bits=4, block=(1, 0))),
        (weights(strategy=None, group_size=-1), LinearFormat(storage=PACKED, is_float=False, bits=4, block=(1, 0))),
        (weights(actorder="group"), LinearFormat(storage=PACKED, is_float=False, bits=4, block=(1, 64), ordered=True)),
        (weights(actorder="static"), INT4),
        (ct("input_activations", _TOKEN), LinearFormat(storage=PACKED, is_float=False, bits=4, block=(1, 64), activations=PER_TOKEN)),
        (weights(**W8A8) | {"format": "int-quantized"}, LinearFormat(storage=PLAIN, is_float=False, bits=8, block=(1, 0))),
        (weights(**W8A8) | {"format": "naive-quantized"}, LinearFormat(storage=PLAIN, is_float=False, bits=8, block=(1, 0))),
        (
            weights(**W8A8 | {"type": "float", "strategy": "block", "block_structure": [128, 64]}) | {"format": "float-quantized"},
            LinearFormat(storage=PLAIN, is_float=True, bits=8, block=(128, 64)),
        ),
        (
            weights(**W8A8 | {"type": "float", "strategy": "block", "block_structure": "128x64"}) | {"format": "float-quantized"},
            LinearFormat(storage=PLAIN, is_float=True, bits=8, block=(128, 64)),
        ),
    ],
)
def test_what_libraries_write_is_read(raw: dict[str, Any], wanted: LinearFormat) -> None:
    json.dumps(raw)
    assert format_of(raw) == wanted
    assert format_of(raw, HEAD) is None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("fp8", ["quantization_config", "fp8"]),
        ({}, ["quant_method"]),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["quant_method", "bitsandbytes", "awq"]),
        ({"quant_method": "fbgemm_fp8"}, ["quant_method", "fbgemm_fp8"]),
        (AUTOAWQ | {"bits": 3}, ["bits", "3"]),
        (AUTOAWQ | {"zero_point": False}, ["zero_point"]),
        (AUTOAWQ | {"version": "gemv"}, ["version", "gemv"]),
        (AUTOAWQ | {"group_size": 0}, ["group_size", "0"]),
        (AUTOAWQ | {"group_size": True}, ["group_size"]),
        (AUTOAWQ | {"rotation": "quarot"}, ["rotation"]),
        (AUTOAWQ | {"modules_to_not_convert": "lm_head"}, ["modules_to_not_convert"]),
        (AUTOGPTQ | {"quant_method": "gptq", "bits": 3}, ["bits", "3"]),
        (AUTOGPTQ | {"quant_method": "gptq", "is_marlin_format": True}, ["is_marlin_format"]),
        (AUTOGPTQ | {"quant_method": "gptq", "checkpoint_format": "marlin"}, ["checkpoint_format", "marlin"]),
        (AUTOGPTQ | {"quant_method": "gptq", "checkpoint_format": "gptq", "format": "gptq_v2"}, ["checkpoint_format"]),
        (AUTOGPTQ | {"quant_method": "gptq", "dynamic": {"+:.*": {"bits": 8}}}, ["dynamic"]),
        (AUTOGPTQ | {"quant_method": "gptq", "group_size": None}, ["group_size"]),
        (FP8 | {"activation_scheme": "sometimes"}, ["activation_scheme", "sometimes"]),
        ({"quant_method": "fp8"}, ["activation_scheme"]),
        (BLOCKS | {"activation_scheme": "static"}, ["activation_scheme", "weight_block_size"]),
        (BLOCKS | {"weight_block_size": [128]}, ["weight_block_size"]),
        (BLOCKS | {"weight_block_size": [128, -1]}, ["weight_block_size"]),
        (BLOCKS | {"scale_fmt": "ue8m0"}, ["scale_fmt", "ue8m0"]),
        (FP8 | {"fmt": "e5m2"}, ["fmt", "e5m2"]),
        (ct(format="marlin-24"), ["format", "marlin-24"]),
        (ct(format=None), ["config_groups.group_0.format"]),
        (ct(quantization_status="frozen"), ["quantization_status", "frozen"]),
        (ct(sparsity_config={"format": "sparse-24-bitmask"}), ["sparsity_config"]),
        (ct(transform_config={"config_groups": {"u": {}}}), ["transform_config"]),
        (ct(config_groups={}), ["config_groups"]),
        (ct(config_groups={"group_0": None}), ["config_groups.group_0"]),
        (ct("targets", []), ["config_groups.group_0.targets"]),
        (ct("targets", ["Embedding"]), ["config_groups.group_0.targets", "Embedding"]),
        (ct("targets", ["re:("]), ["targets", "re:("]),
        (ct("targets", ["re:(a+)+b"]), ["targets", "(a+)+b"]),
        (ct(ignore=["re:.*.*.*.*.*.*x"]), ["ignore"]),
        (ct(ignore=["re:" + "a" * 300]), ["ignore"]),
        (ct(ignore="lm_head"), ["ignore"]),
        (ct("weights", None), ["config_groups.group_0.weights"]),
        (ct("output_activations", _TOKEN), ["output_activations"]),
        (ct("input_activations", _TOKEN | {"num_bits": 4}), ["input_activations.num_bits"]),
        (ct("input_activations", _TOKEN | {"dynamic": "local"}), ["input_activations.dynamic", "local"]),
        (ct("input_activations", _TOKEN | {"dynamic": False}), ["input_activations.dynamic"]),
        (ct("input_activations", _TOKEN | {"symmetric": False}), ["input_activations.symmetric"]),
        (ct("input_activations", _TOKEN | {"group_size": 128}), ["input_activations.group_size", "token"]),
        (weights(num_bits=3), ["config_groups.group_0.weights.num_bits", "3"]),
        (weights(type="float"), ["weights.num_bits"]),
        (weights(type="float", num_bits=8), ["weights.type", "pack-quantized"]),
        (weights() | {"format": "float-quantized"}, ["weights.num_bits"]),
        (weights(num_bits=8) | {"format": "float-quantized"}, ["weights.type", "float-quantized"]),
        (weights(group_size=None), ["weights.group_size", "group"]),
        (weights(group_size=-5), ["weights.group_size"]),
        (weights(strategy="channel"), ["weights.group_size", "channel"]),
        (weights(strategy="tensor_group"), ["weights"]),
        (weights(strategy="block", group_size=None), ["weights.block_structure"]),
        (weights(symmetric=False, strategy="tensor", group_size=None), ["weights.symmetric"]),
        (weights(dynamic=True), ["weights.dynamic"]),
        (weights(actorder="random"), ["weights.actorder"]),
        (weights(scale_dtype="torch.float8_e4m3fn"), ["weights.scale_dtype"]),
        (weights(twist=1), ["weights.twist"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_key(raw: Any, words: list[str]) -> None:
    with pytest.raises(SetupError) as caught:
        read(raw)
    for word in ["config.json", *words]:
        assert word in caught.value.message


def test_nothing_is_said() -> None:
    assert read(None) is None
    assert read_quantization(Path("nowhere"), {}) is None


KV: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def test_weights_may_be_whole_where_kv_alone_is_quantized(tmp_path: Path) -> None:
    assert read(ct(config_groups={}, kv_cache_scheme=KV, format="dense")) is None
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": [HEAD]}}))
    assert read_quantization(tmp_path, {}) is None
    with pytest.raises(SetupError, match=r"hf_quant_config\.json.*quant_method"):
        read(FP8, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "storage"),
    [
        ("quantize_config.json", AUTOGPTQ, GPTQ),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, AWQ),
        (
            "hf_quant_config.json",
            {
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": [HEAD]},
            },
            PLAIN,
        ),
    ],
)
def test_files_of_older_tools(name: str, content: dict[str, Any], storage: object, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    found = read_quantization(tmp_path, {})
    assert found is not None
    format = found.format_of(Q)
    assert format is not None
    assert format.storage is storage


def test_two_files_must_agree(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(json.dumps(AUTOGPTQ))
    same = AUTOGPTQ | {"quant_method": "gptq", "checkpoint_format": "gptq", "lm_head": False}
    assert read(same, tmp_path) == read_quantization(tmp_path, {})
    with pytest.raises(SetupError, match=r"quantize_config\.json.*groups of 128.*config\.json.*groups of 64"):
        read(same | {"group_size": 64}, tmp_path)


def test_modelopts_other_formats_are_refused(tmp_path: Path) -> None:
    for inner in ({"quant_algo": "NVFP4"}, {"quant_algo": "INT4_AWQ", "kv_cache_quant_algo": "FP8"}):
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
        with pytest.raises(SetupError, match=r"hf_quant_config\.json.*_algo"):
            read_quantization(tmp_path, {})


def test_names_go_before_patterns_and_those_before_classes() -> None:
    groups = {}
    for size, target in ((16, "Linear"), (32, r"re:.*mlp.*"), (48, DOWN)):
        groups[f"g{size}"] = {"targets": [target], "weights": _WEIGHTS | {"group_size": size}}
    found = read(ct(config_groups=groups, ignore=["re:.*k_proj", HEAD, "model.layers.3.mlp.up_proj"]))
    assert found is not None

    def group(layer: str) -> int | None:
        format = found.format_of(layer)
        return None if format is None else format.block[1]

    assert [group(name) for name in (Q, "model.layers.1.mlp.down_proj", DOWN)] == [16, 32, 48]
    assert [group(name) for name in ("model.layers.0.self_attn.k_proj", HEAD, "model.layers.3.mlp.up_proj")] == [None] * 3
    assert group("model.layers.30.mlp.up_proj") == 32


def test_modules_are_left_out_with_all_that_is_in_them() -> None:
    for raw in (AUTOAWQ | {"modules_to_not_convert": ["self_attn", "model.layers.1"]}, FP8 | {"ignored_layers": ["self_attn", "layers.1"]}):
        assert [format_of(raw, name) is None for name in (Q, "model.layers.1.mlp.up_proj", DOWN)] == [True, True, False]
    inside = AUTOGPTQ | {"quant_method": "gptq", "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    assert [format_of(inside, name) is None for name in (Q, DOWN)] == [False, True]
    assert format_of(AUTOGPTQ | {"quant_method": "gptq", "lm_head": True}, HEAD) is not None
    assert format_of(ct(ignore=[]), HEAD) == INT4


def test_hostile_patterns_end() -> None:
    """The worst that is let through, over names as long as there are."""
    found = read(ct(ignore=["re:.*.*.*.*.*x", "re:(.|.)?(.|.)?(.|.)?(.|.)?(.|.)?y"]))
    assert found is not None
    began = time.process_time()
    for layer in range(100):
        assert found.format_of(f"model.layers.{layer}.self_attn.q_proj") is not None
    assert time.process_time() - began < 10
