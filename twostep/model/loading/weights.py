"""What the safetensors files of a model directory hold, checked before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch

from twostep.checkpoint.directory import INDEX, SINGLE, SafetensorsHeader, read_header, read_weight_map, weight_files
from twostep.errors import SetupError

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_MAX_DIMENSIONS = 8
_MAX_COUNT = 1 << 62
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file, row-major from byte `offset` of the file on. `dtype` None: nothing a model has a place for."""

    name: str
    path: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def stored_tensors(model_dir: Path) -> list[StoredTensor]:
    """All tensors of a Hugging Face directory, single file or sharded, file by file in the order of their bytes, each name once.

    Raises SetupError, naming the file, for a missing, corrupt or truncated one, and for shards that do not hold what the index says.
    """
    files = weight_files(model_dir)
    tensors = [tensor for path in files for tensor in _tensors(read_header(path))]
    held: dict[str, str] = {}
    for tensor in tensors:
        if tensor.name in held:
            raise SetupError(
                f"{tensor.name} is in both {held[tensor.name]} and {tensor.path.name} of {model_dir}; download the model again"
            )
        held[tensor.name] = tensor.path.name
    if not held:
        raise SetupError(f"{model_dir} holds no tensors; download the model again")
    if files != [model_dir / SINGLE]:
        index = model_dir / INDEX
        for name, shard in read_weight_map(index).items():
            if held.get(name) != shard:
                raise SetupError(f"{index} says that {shard} holds {name}, but it does not; download the index and its shards again")
    return tensors


def _tensors(header: SafetensorsHeader) -> list[StoredTensor]:
    """The header's tensors, which must follow each other without gaps, as the format asks."""
    tensors = []
    for name, raw in header.tensors.items():
        shape, offsets, dtype = raw.get("shape"), raw["data_offsets"], _DTYPES.get(str(raw.get("dtype")))
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise SetupError(f"{header.path} has a corrupt header ({name}: {str(raw)[:_SHOWN_CHARS]}); download it again")
        start, stop = offsets
        if dtype is not None and math.prod(shape) * dtype.itemsize != stop - start:
            raise SetupError(f"{header.path} has a corrupt header ({name} of shape {shape} in {stop - start} bytes); download it again")
        tensors.append(
            StoredTensor(
                name=name, path=header.path, dtype=dtype, shape=tuple(shape), offset=header.data_start + start, num_bytes=stop - start
            )
        )
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = header.data_start
    for tensor in tensors:
        if tensor.offset != end:
            raise SetupError(
                f"{header.path} has a corrupt header ({tensor.name} begins at byte {tensor.offset}, not {end}); download it again"
            )
        end += tensor.num_bytes
    return tensors


def _are_counts(numbers: object) -> TypeGuard[list[int]]:
    """Few and not too large, so that multiplying them takes no time."""
    return (
        isinstance(numbers, list)
        and len(numbers) <= _MAX_DIMENSIONS
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < _MAX_COUNT for n in numbers)
    )
