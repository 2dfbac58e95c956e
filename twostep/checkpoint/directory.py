"""The files of a Hugging Face model directory: JSON, and where the weights are. Torch-free, shared by router and workers.

Layout of a safetensors file:

    | u64 little-endian: header bytes N | N bytes of JSON: name -> dtype, shape, data_offsets | data |
"""

from __future__ import annotations

import json
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from twostep.errors import SetupError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_EXPECTED = "config.json, safetensors, tokenizer.json"

FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# What a model directory may say at most. All of it is far beyond every model there is; what is read into Python's memory takes ten
# times as much there and more.
MAX_MODEL_LEN = 1 << 24
MAX_VOCAB_SIZE = 1 << 22
MAX_TOKENIZER_BYTES = 256 << 20
_MAX_JSON_BYTES = 16 << 20
_MAX_INDEX_BYTES = 64 << 20
_MAX_HEADER_BYTES = 16 << 20
_MAX_SHARDS = 4096
_SHOWN_NAMES = 8
_SHOWN_CHARS = 200
_MAX_DIMENSIONS = 8
_MAX_COUNT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """Parsed front of one safetensors file. `tensors` maps names to {"dtype", "shape", "data_offsets"}."""

    path: Path
    raw: bytes
    tensors: dict[str, dict[str, Any]]
    data_start: int
    num_bytes: int  # of the whole file


# Files that are none: reading them may never end, or change a device.
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def has_file(path: Path) -> bool:
    """Returns whether a model directory has this file. Raises SetupError where something else has its name."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    _check_regular(path, mode)
    return True


def open_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Opens a file of a model directory to be read. Raises what `open` raises, and SetupError for a FIFO, a socket, a device or a
    directory."""
    _check_regular(path, path.stat().st_mode)
    return path.open("rb", buffering)


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise SetupError(f"{path} is {kind}; put the model's own file there, or remove it")


def read_json(path: Path, *, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object of a model directory. Raises SetupError, naming the file, if it is missing, unreadable, too large or no object."""
    if not path.parent.is_dir():
        raise SetupError(
            f"{path.parent} is not a directory; give a Hugging Face model directory (config.json, safetensors, tokenizer.json)"
        )
    try:
        raw = json.loads(read_text(path, max_bytes=max_bytes))
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(raw, dict):
        raise SetupError(f"{path} holds a JSON {type(raw).__name__}, not an object; download it again")
    return raw


def read_optional_json(path: Path, *, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """Like read_json, but {} for a file that does not exist."""
    return read_json(path, max_bytes=max_bytes) if path.exists() else {}


def read_text(path: Path, *, max_bytes: int) -> str:
    """A file of a model directory. Raises SetupError, naming it, if it is missing, unreadable, no text or longer."""
    try:
        with open_file(path) as file:
            # No more than there is: a buffer is taken for all that is asked for.
            raw = file.read(min(path.stat().st_size, max_bytes) + 1)
    except FileNotFoundError as error:
        raise SetupError(f"{path} does not exist; give a Hugging Face model directory ({_EXPECTED}), or download it again") from error
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror or error}; check the file and its permissions") from error
    if len(raw) > max_bytes:
        raise SetupError(f"{path} is larger than {max_bytes} bytes, which no model's is; download it again")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SetupError(f"{path} cannot be read as text in UTF-8 ({error}); download it again") from error


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of the model, in name order: the single file, or the shards that the index names.

    Raises SetupError if there is neither, or a shard is missing."""
    single, index = model_dir / SINGLE, model_dir / INDEX
    if has_file(single):
        return [single]
    if not has_file(index):
        raise SetupError(
            f"{model_dir} has neither {SINGLE} nor {INDEX}; only safetensors weights are read: "
            "download them, or convert other formats with transformers' save_pretrained"
        )
    shards = [model_dir / name for name in sorted(set(read_weight_map(index).values()))]
    if len(shards) > _MAX_SHARDS:
        raise SetupError(f"{index} names {len(shards)} shards, more than {_MAX_SHARDS}; download it again")
    missing = [shard.name for shard in shards if not has_file(shard)]
    if missing:
        more = f" and {len(missing) - _SHOWN_NAMES} more" if len(missing) > _SHOWN_NAMES else ""
        raise SetupError(f"{index} names {', '.join(missing[:_SHOWN_NAMES])}{more}, not there; download the missing shards")
    return shards


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard file name, of a model.safetensors.index.json. Raises SetupError if it is not one."""
    weight_map = read_json(index, max_bytes=_MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SetupError(f"{index} has no weight_map; download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise SetupError(f"{index} puts {name} into {shard!r}; a shard is a .safetensors file beside the index: download it again")
    return weight_map


def read_header(path: Path) -> SafetensorsHeader:
    """Reads and checks the header of one safetensors file: it is JSON, and its tensors, each of a dtype, a shape and offsets, reach to the
    end of the file.

    Raises SetupError for a corrupt or truncated file."""
    try:
        num_bytes = path.stat().st_size
        with open_file(path) as file:
            front = file.read(8)
            size = struct.unpack("<Q", front)[0] if len(front) == 8 else 0
            if not 0 < size <= min(_MAX_HEADER_BYTES, num_bytes - 8):
                raise SetupError(
                    f"{path} is truncated or no safetensors file (header of {size} bytes, file of {num_bytes}, "
                    f"at most {_MAX_HEADER_BYTES} for the header); download it again"
                )
            raw = file.read(size)
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror or error}; check the file and its permissions") from error
    try:
        tensors: dict[str, dict[str, Any]] = json.loads(raw)
        tensors.pop("__metadata__", None)
        wrong = next((name for name, raw in tensors.items() if not _is_tensor(raw)), None)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        # Some errors hold all that was read in their representation.
        raise SetupError(f"{path} has a corrupt header ({type(error).__name__}: {str(error)[:_SHOWN_CHARS]}); download it again") from error
    if wrong is not None:
        shown = f"{wrong[:_SHOWN_CHARS]}: {str(tensors[wrong])[:_SHOWN_CHARS]}"
        raise SetupError(f"{path} has a corrupt header ({shown}); download it again")
    end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    if 8 + size + end != num_bytes:
        raise SetupError(
            f"{path} is truncated or corrupt: it has {num_bytes} bytes, its header describes {8 + size + end}; download it again"
        )
    return SafetensorsHeader(path=path, raw=raw, tensors=tensors, data_start=8 + size, num_bytes=num_bytes)


def _is_tensor(raw: object) -> bool:
    """Returns whether a header may say this of a tensor. Its sides are few and not too large: to multiply them takes no time."""
    if not isinstance(raw, dict) or not isinstance(raw.get("dtype"), str):
        return False
    offsets = raw.get("data_offsets")
    return _are_counts(raw.get("shape")) and _are_counts(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]


def _are_counts(numbers: object) -> TypeGuard[list[int]]:
    return (
        isinstance(numbers, list)
        and len(numbers) <= _MAX_DIMENSIONS
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < _MAX_COUNT for n in numbers)
    )


def stored_dtype(model_dir: Path) -> str:
    """torch's name of the dtype of the first floating-point tensor: what a config.json without one means. Raises SetupError."""
    for path in weight_files(model_dir):
        for tensor in read_header(path).tensors.values():
            if tensor.get("dtype") in FLOAT_DTYPES:
                return FLOAT_DTYPES[tensor["dtype"]]
    raise SetupError(f"{model_dir} holds no floating-point weights; download the model again")
