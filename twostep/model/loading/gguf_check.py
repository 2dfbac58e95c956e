"""What a GGUF file says of itself, held against its size before a library reads it: counts there may say anything, and the library believes
them.

    "GGUF" | u32 version | u64 tensors | u64 entries | entries: name, u32 type, value | tensors: name, u32 n, n * u64, u32 type, u64 offset
    a name or text: u64 bytes, then these      an array: u32 type of its items, u64 items, then these
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import BinaryIO

from twostep.errors import SetupError

_MAGIC = b"GGUF"
_HEAD = struct.Struct("<IQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")
_TENSOR_TAIL = struct.Struct("<IQ")
_TEXT, _ARRAY = 8, 9
# By number of the type: u8, i8, u16, i16, u32, i32, f32, bool, u64, i64, f64.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

_MAX_ENTRIES = 4096
_MAX_TENSORS = 1 << 16
_MAX_DIMENSIONS = 8
# Of all arrays together: the largest vocabularies have a quarter of a million tokens, with as many scores, types and merges.
_MAX_ITEMS = 1 << 22
# No quantization stores a weight in less than a bit.
_MAX_WEIGHTS_PER_BYTE = 8


def check_gguf(path: Path) -> None:
    """Raises SetupError for a file whose counts and sizes cannot be true, in time and memory that do not depend on them."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            _Walk(file, num_bytes).check()
    except (OSError, ValueError, struct.error) as error:
        raise SetupError(f"{path} cannot be read as GGUF ({error}); download it again") from error


class _Walk:
    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file = file
        self._num_bytes = num_bytes
        self._num_items = 0

    def check(self) -> None:
        if self._file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        _, num_tensors, num_entries = self._take(_HEAD)
        if num_entries > _MAX_ENTRIES or num_tensors > _MAX_TENSORS:
            raise ValueError(f"it says that it has {num_entries} entries and {num_tensors} tensors")
        for _ in range(num_entries):
            self._skip_text()
            self._skip_value(self._take(_U32)[0])
        for _ in range(num_tensors):
            self._skip_text()
            (num_dimensions,) = self._take(_U32)
            if num_dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {num_dimensions} dimensions")
            num_weights = math.prod(self._take(_U64)[0] for _ in range(num_dimensions))
            _, offset = self._take(_TENSOR_TAIL)
            if num_weights > _MAX_WEIGHTS_PER_BYTE * self._num_bytes or offset > self._num_bytes:
                raise ValueError(f"a tensor has {num_weights} weights at byte {offset}, the file {self._num_bytes} bytes")

    def _take(self, what: struct.Struct) -> tuple[int, ...]:
        return what.unpack(self._file.read(what.size))

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > self._num_bytes - self._file.tell():
            raise ValueError(f"{num_bytes} bytes are said to follow byte {self._file.tell()} of {self._num_bytes}")
        self._file.seek(num_bytes, 1)

    def _skip_text(self) -> None:
        self._skip(self._take(_U64)[0])

    def _skip_value(self, kind: int) -> None:
        if kind == _TEXT:
            self._skip_text()
        elif kind != _ARRAY:
            self._skip(self._scalar_bytes(kind))
        else:
            kind, num_items = self._take(_ARRAY_HEAD)
            self._num_items += num_items
            if self._num_items > _MAX_ITEMS:
                raise ValueError(f"its arrays are said to have {self._num_items} items")
            if kind == _TEXT:
                for _ in range(num_items):
                    self._skip_text()
            else:
                self._skip(num_items * self._scalar_bytes(kind))

    def _scalar_bytes(self, kind: int) -> int:
        """Arrays of arrays are no scalars either: no file of a model has any."""
        if kind not in _SCALAR_BYTES:
            raise ValueError(f"values of type {kind} are not known here")
        return _SCALAR_BYTES[kind]
