"""Two directories have one fingerprint exactly if they hold the same model, as far as samples tell."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models

from twostep.checkpoint.fingerprint import dummy_fingerprint, is_same_model, model_fingerprint, quantized_fingerprint
from twostep.errors import SetupError


@pytest.fixture
def copy(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_llama_dir, tmp_path / "another name")


def test_same_model_elsewhere(tiny_llama_dir: Path, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert model_fingerprint(copy) == model_fingerprint(tiny_llama_dir)
    assert len(model_fingerprint(copy)) == 64


def other_config(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    config["rms_norm_eps"] *= 2
    (model_dir / "config.json").write_text(json.dumps(config))


def other_tokenizer(model_dir: Path) -> None:
    path = model_dir / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|im_fin|>"))


def other_weights(model_dir: Path) -> None:
    tiny_models.save_tiny_model(model_dir, seed=1)


def other_last_byte(model_dir: Path) -> None:
    with (model_dir / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte[0] ^ 1]))


def other_tensor_name(model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"layers.1.mlp", b"layers.7.mlp"))


def other_words_of_quantization(model_dir: Path) -> None:
    (model_dir / "quantize_config.json").write_text('{"bits": 4}')


@pytest.mark.parametrize(
    "change", [other_words_of_quantization, other_config, other_tokenizer, other_weights, other_last_byte, other_tensor_name]
)
def test_another_model(tiny_llama_dir: Path, copy: Path, change: Callable[[Path], None]) -> None:
    change(copy)
    assert model_fingerprint(copy) != model_fingerprint(tiny_llama_dir)


def test_incomplete_models_are_refused(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(SetupError, match=r"tokenizer\.json"):
        model_fingerprint(copy)
    (copy / "model.safetensors").write_bytes(b"")
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(SetupError, match=r"model\.safetensors"):
        model_fingerprint(copy)


def test_neither_torch_nor_numpy_is_needed() -> None:
    """A router imports this and twostep.text."""
    code = (
        "import sys, twostep.checkpoint.fingerprint, twostep.text; assert not {'torch', 'numpy', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_made_up_weights_are_the_same_model_where_the_shape_is(tmp_path: Path) -> None:
    for name, layers in (("one", 2), ("two", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"num_hidden_layers": {layers}}}')
    wanted = dummy_fingerprint(tmp_path / "one")
    kinds = [dummy_fingerprint(tmp_path / "one", kind) for kind in ("cpu-1", "cuda-1", "cuda-2")]
    assert len(set(kinds)) == 3, "whose weights differ"
    assert all(is_same_model(wanted, kind) for kind in kinds)
    assert not is_same_model(wanted, dummy_fingerprint(tmp_path / "two", "cpu-1"))
    assert not is_same_model(kinds[0], kinds[1])
    assert is_same_model(wanted, quantized_fingerprint(kinds[0], "int8"))
    real = "ab" * 32
    assert is_same_model(real, quantized_fingerprint(real, "int8"))
    assert quantized_fingerprint(real, "none") == real
    assert is_same_model(real, real)
    assert not is_same_model(wanted, real)
    assert not is_same_model(real, kinds[0])
