"""Weights from safetensors files, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from twostep.errors import SetupError
from twostep.model_dir import INDEX, SINGLE, read_header, read_weight_map, weight_files


def iter_tensors(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) for every tensor of a Hugging Face directory, single file or sharded, each name once.

    A tensor is on the CPU, in the file's shape and dtype, and lies in the memory-mapped file: copy what you keep, and no second
    full copy of the model ever exists. Names and shapes are for the model to check.

    Every file's header is checked against its size before the first tensor. Raises SetupError, naming the file, for a
    missing, corrupt or truncated file, and for shards that do not hold what the index says.
    """
    files = weight_files(model_dir)
    _check(model_dir, files)
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise SetupError(f"{path} cannot be read as safetensors ({error}); download it again") from error


def _check(model_dir: Path, files: list[Path]) -> None:
    held: dict[str, str] = {}
    for path in files:
        for name in read_header(path).tensors:
            if name in held:
                raise SetupError(f"{name} is in both {held[name]} and {path.name} of {model_dir}; download the model again")
            held[name] = path.name
    if not held:
        raise SetupError(f"{model_dir} holds no tensors; download the model again")
    if files == [model_dir / SINGLE]:
        return
    index = model_dir / INDEX
    for name, shard in read_weight_map(index).items():
        if held.get(name) != shard:
            raise SetupError(f"{index} says that {shard} holds {name}, but it does not; download the index and its shards again")
