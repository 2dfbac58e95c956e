"""Safetensors files of a model directory: what they hold, checked before anything is read, and the way of it to its places.

Each byte is read once, and the host never holds more than the readers' slots.

    reader 0   read a piece into slot 0 ── copy it to the device ─┐
               read the next into slot 1 while that runs ─────────┴─ …      pinned slots, a stream to each reader
    reader 1   …

A piece is some of a tensor's elements, so that shards of any size keep all readers busy. On a CPU, pieces of the right dtype are read
to where they stay, without a slot.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch

from twostep.checkpoint.directory import INDEX, SINGLE, SafetensorsHeader, open_file, read_header, read_weight_map, weight_files
from twostep.errors import SetupError
from twostep.model.families.modules import Place

# Called with (bytes done, bytes in all), from one thread at a time.
ReadProgress = Callable[[int, int], None]

NUM_READERS = 8
_SLOT_BYTES = 8 << 20
_SLOTS = 2

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    # Of quantized layers.
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file, row-major from byte `offset` of the file on. `dtype` None: nothing a model has a place for. `stored_as`: the
    file's own name of it."""

    name: str
    path: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    stored_as: str


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
        shape, (start, stop), dtype = raw["shape"], raw["data_offsets"], _DTYPES.get(raw["dtype"])
        if dtype is not None and math.prod(shape) * dtype.itemsize != stop - start:
            raise SetupError(f"{header.path} has a corrupt header ({name} of shape {shape} in {stop - start} bytes); download it again")
        tensors.append(
            StoredTensor(
                name=name,
                path=header.path,
                dtype=dtype,
                shape=tuple(shape),
                offset=header.data_start + start,
                num_bytes=stop - start,
                stored_as=raw["dtype"],
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Rows [start, stop) of a stored matrix of `num_columns`, of which `columns` go to `target`, [stop - start, len(columns)].
    A tensor that is wanted in its full width is one column."""

    path: Path
    dtype: torch.dtype
    offset: int
    num_rows: int
    num_columns: int
    columns: slice
    target: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.num_columns * self.dtype.itemsize


def bytes_to_read(tensor: StoredTensor, num_rows: int) -> int:
    """Returns how much a place of so many of its rows takes from the file."""
    return tensor.num_bytes // max(1, tensor.shape[0] if tensor.shape else 1) * num_rows


def read_weights(
    work: Sequence[tuple[StoredTensor, Place]], progress: ReadProgress | None = None, *, num_readers: int = NUM_READERS
) -> None:
    """Fills places, all of one device, from tensors of their shapes, converting dtypes. Only what the places take is read (whole rows
    of it). Blocks until all of it is there.

    Raises SetupError, naming the file, if it cannot be read or has become shorter; what the places hold then is undefined.
    """
    pieces = [piece for tensor, place in work for piece in _pieces(tensor, place)]
    if not pieces:
        return
    with ExitStack() as stack:
        files = {path: stack.enter_context(_opened(path)) for path in dict.fromkeys(piece.path for piece in pieces)}
        share = _Share(pieces, progress)
        device = pieces[0].target.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the places' memory may still be in use by what was there before
        num_readers = min(num_readers, len(pieces))
        with ThreadPoolExecutor(num_readers, thread_name_prefix="weights") as pool:
            try:
                readers = [pool.submit(_read, share, files, device) for _ in range(num_readers)]
                for reader in readers:
                    reader.result()
            finally:
                share.stop()


class _Share:
    """Hands each piece to one reader, in order, until stopped."""

    def __init__(self, pieces: Sequence[_Piece], progress: ReadProgress | None) -> None:
        self._pieces = iter(pieces)
        self._progress = progress
        self._total = sum(piece.num_bytes for piece in pieces)
        self._done = 0
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[_Piece]:
        while True:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            yield piece

    def stop(self) -> None:
        with self._lock:
            self._pieces = iter(())

    def done(self, piece: _Piece) -> None:
        with self._lock:
            self._done += piece.num_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def _read(share: _Share, files: dict[Path, int], device: torch.device) -> None:
    """One reader's thread."""
    slots = [_Slot(device) for _ in range(_SLOTS)]
    try:
        with torch.inference_mode(), _own_stream(device):
            for piece, slot in zip(share, cycle(slots), strict=False):
                if device.type == "cpu" and piece.dtype == piece.target.dtype and piece.num_columns == 1 and piece.target.is_contiguous():
                    _fill(files[piece.path], piece, piece.target.view(-1))
                else:
                    slot.pass_on(files[piece.path], piece)
                share.done(piece)
            for slot in slots:
                slot.wait()
    except BaseException:
        share.stop()
        raise


class _Slot:
    """Memory of the host that one piece passes through at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._left: torch.cuda.Event | None = None

    def pass_on(self, file: int, piece: _Piece) -> None:
        """Returns when the piece is on its way."""
        self.wait()
        if self._memory.numel() < piece.num_bytes:
            # One row may be longer than a slot.
            self._memory = torch.empty(max(_SLOT_BYTES, piece.num_bytes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        staged = self._memory[: piece.num_bytes].view(piece.dtype)
        _fill(file, piece, staged)
        rows = staged.view(piece.num_rows, piece.num_columns)
        if self._device.type == "cpu":
            piece.target.copy_(rows[:, piece.columns])
            return
        if piece.num_columns > 1:  # columns are cut out on the device: one copy of whole rows runs at full rate
            rows = rows.to(self._device, non_blocking=True)
        piece.target.copy_(rows[:, piece.columns], non_blocking=True)
        self._left = torch.cuda.Event()
        self._left.record()

    def wait(self) -> None:
        """Until the last piece has left."""
        if self._left is not None:
            self._left.synchronize()


def _pieces(tensor: StoredTensor, place: Place) -> list[_Piece]:
    assert tensor.dtype is not None
    assert tensor.shape == place.shape
    assert place.tensor.is_contiguous() or place.tensor.t().is_contiguous()
    if not place.tensor.numel():
        return []
    rows = place.tensor if place.tensor.dim() == 2 else place.tensor.view(len(place.tensor) if place.tensor.dim() else 1, -1)
    num_columns = tensor.num_bytes // tensor.dtype.itemsize // max(tensor.shape[0] if tensor.shape else 1, 1)
    first_row = place.start[0] if place.start else 0
    first_column = place.start[1] if len(place.start) > 1 else 0
    offset = tensor.offset + first_row * num_columns * tensor.dtype.itemsize
    columns = slice(first_column, first_column + rows.shape[1])
    if rows.shape[1] == num_columns and rows.is_contiguous():
        rows, columns, num_columns = rows.view(-1, 1), slice(0, 1), 1
    at_once = max(1, _SLOT_BYTES // (num_columns * tensor.dtype.itemsize))
    return [
        _Piece(
            path=tensor.path,
            dtype=tensor.dtype,
            offset=offset + start * num_columns * tensor.dtype.itemsize,
            num_rows=min(at_once, len(rows) - start),
            num_columns=num_columns,
            columns=columns,
            target=rows[start : start + at_once],
        )
        for start in range(0, len(rows), at_once)
    ]


def _fill(file: int, piece: _Piece, into: torch.Tensor) -> None:
    """Reads the piece's bytes into dense memory of the host."""
    view = into.view(torch.uint8).numpy().data
    done = 0
    try:
        while done < len(view):
            count = os.preadv(file, [view[done:]], piece.offset + done)
            if not count:
                raise SetupError(f"{piece.path} has become shorter while it was read; download it again")
            done += count
    except OSError as error:
        raise _unreadable(piece.path, error) from error


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        file = open_file(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        yield file.fileno()


def _unreadable(path: Path, error: OSError) -> SetupError:
    return SetupError(f"{path} cannot be read: {error.strerror or error}; check the disk and the file's permissions, or download it again")


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
