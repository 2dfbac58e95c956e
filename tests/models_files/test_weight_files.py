"""Safetensors on disk: whole models come out, damaged ones are refused by file name."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from twostep.checkpoint.directory import read_header, weight_files
from twostep.errors import SetupError
from twostep.model.loading.weight_files import stored_tensors


@pytest.fixture(scope="session")
def sharded_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_tiny_model(tmp_path_factory.mktemp("models") / "sharded", max_shard_size="200KB")


@pytest.fixture
def single(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_llama_dir, tmp_path / "single")


@pytest.fixture
def sharded(sharded_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded_dir, tmp_path / "sharded")


def refused(model_dir: Path, *words: str) -> None:
    with pytest.raises(SetupError) as caught:
        stored_tensors(model_dir)
    for word in words:
        assert word in caught.value.message


def test_a_single_file(tiny_llama_dir: Path) -> None:
    expected = load_file(tiny_llama_dir / "model.safetensors")
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in stored_tensors(tiny_llama_dir)}
    assert found == {name: (tensor.dtype, tensor.shape) for name, tensor in expected.items()}


def test_shards_hold_what_the_single_file_holds(tiny_llama_dir: Path, sharded_dir: Path) -> None:
    assert len(weight_files(sharded_dir)) > 3
    names = [tensor.name for tensor in stored_tensors(sharded_dir)]
    assert sorted(names) == sorted(tensor.name for tensor in stored_tensors(tiny_llama_dir))
    offsets = [(tensor.path, tensor.offset) for tensor in stored_tensors(sharded_dir)]
    assert offsets == sorted(offsets)


def test_nothing_to_load(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "model.safetensors", "model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "only safetensors")


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)


def truncate_in_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(100)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def spoil_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff\xff\xff")


def no_header(path: Path) -> None:
    path.write_bytes(b"<html>502 Bad Gateway</html>" * 1000)


def header_without_offsets(path: Path) -> None:
    header = json.dumps({"a.weight": {"dtype": "F32", "shape": [1]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


def header_that_lies(path: Path) -> None:
    """Offsets that cover the file, but a shape that does not go with them."""
    header = json.dumps({"a.weight": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


DAMAGES = [truncate, truncate_in_header, empty, append, spoil_header, no_header, header_without_offsets, header_that_lies]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file(single: Path, damage: Callable[[Path], None]) -> None:
    damage(single / "model.safetensors")
    refused(single, str(single / "model.safetensors"), "download")


@pytest.mark.parametrize("damage", [truncate, empty, spoil_header])
def test_a_damaged_last_shard_is_found(sharded: Path, damage: Callable[[Path], None]) -> None:
    last = weight_files(sharded)[-1]
    damage(last)
    with pytest.raises(SetupError, match=last.name):
        stored_tensors(sharded)


def test_a_missing_shard(sharded: Path) -> None:
    shard = weight_files(sharded)[1]
    shard.unlink()
    refused(sharded, shard.name, "download")


def test_a_shard_without_its_tensors(sharded: Path) -> None:
    first, second = weight_files(sharded)[:2]
    name = next(iter(read_header(second).tensors))
    shutil.copy(first, second)
    refused(sharded, first.name)
    save_file({"other": torch.zeros(1)}, second)
    refused(sharded, second.name, name)


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/etc/evil.safetensors", "weights.bin", 3])
def test_an_index_that_points_elsewhere(sharded: Path, shard: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    refused(sharded, "model.safetensors.index.json", repr(shard))


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_a_broken_index(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, "model.safetensors.index.json", "download it again")


def test_a_model_without_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    refused(tmp_path, "no tensors")


numbers = st.one_of(st.integers(-1, 12), st.sampled_from([True, None, "4", 1.5, 1 << 70]))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16"]),
        "shape": st.lists(numbers, max_size=2) | numbers,
        "data_offsets": st.lists(numbers, max_size=3) | st.sampled_from([[0, 8], [8, 12], [0, 12], [4, 8], [0, 4]]),
    }
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), entries, min_size=1))
@example({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F16", "shape": [2, 1], "data_offsets": [8, 12]}})
def test_what_the_librarys_own_reader_refuses_is_refused(header: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as name:
        raw = json.dumps(header).encode()
        file = Path(name, "model.safetensors")
        file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(12))
        try:
            expected = load_file(file)
        except Exception:  # noqa: BLE001 - it raises whatever it likes
            with pytest.raises(SetupError, match=r"model\.safetensors"):
                stored_tensors(Path(name))
            return
        found = {tensor.name: tensor.shape for tensor in stored_tensors(Path(name))}
        assert found == {name: tuple(tensor.shape) for name, tensor in expected.items()}
