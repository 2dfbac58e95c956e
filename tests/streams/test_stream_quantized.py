"""Right tokens of quantized checkpoints, of every format: handed over, their prompts in pieces, they are those of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from quantized_tensors import KINDS, quantize_directory
from right_tokens import compare
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model

# Of each kind of weights one in the first tier, and what holds KV in 8 bits.
SMOKE = ("awq", "fp8 blocks")
WITH_KV_SCALES = {"kv alone": "", "fp8 static and kv": "fp8 static", "packed and kv": "packed"}


@pytest.fixture(scope="session")
def dense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with biases; neither of its widths is a multiple of blocks of 32, and one of groups of 24."""
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6}
    return save_tiny_model(tmp_path_factory.mktemp("dense") / "m", attention_bias=True, mlp_bias=True, **sizes)


def give_kv_scales(model_dir: Path) -> None:
    """As llm-compressor does: static ones, of each layer's keys and of its values. Some cut off what is largest."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config = json.loads((model_dir / "config.json").read_text())
    alone = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    quantization = config.get("quantization_config", alone) | {"kv_cache_scheme": scheme}
    (model_dir / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    tensors = load_file(model_dir / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for kind, scale in (("k", 0.013), ("v", 0.011)):
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor([scale * (layer + 1)])
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke if name in SMOKE else pytest.mark.exhaustive) for name in KINDS]
)
async def test_every_format_gives_the_single_process_s_tokens(name: str, dense_dir: Path, tmp_path: Path) -> None:
    model_dir = tmp_path / "m"
    quantize_directory(dense_dir, model_dir, KINDS[name])
    await compare(model_dir, tmp_path, rounds=bool(KINDS[name].activations))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke if name == "packed and kv" else pytest.mark.exhaustive) for name in WITH_KV_SCALES]
)
async def test_kv_in_a_checkpoint_s_scales_does_too(name: str, dense_dir: Path, tmp_path: Path) -> None:
    model_dir, kind = tmp_path / "m", WITH_KV_SCALES[name]
    if kind:
        quantize_directory(dense_dir, model_dir, KINDS[kind])
    else:
        shutil.copytree(dense_dir, model_dir)
    give_kv_scales(model_dir)
    await compare(model_dir, tmp_path, rounds=True)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
async def test_weights_quantized_at_the_load_do_too(quantization: str, dense_dir: Path, tmp_path: Path) -> None:
    await compare(dense_dir, tmp_path, rounds=quantization == "fp8", quantization=quantization)
