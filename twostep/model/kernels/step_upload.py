"""A step's arrays on their way to the device: packed into pinned memory, sent in one copy that the host does not wait for.

`send` copies in order of the current stream, `ahead` on a stream of its own while the step before still runs: nothing is left between
two steps then, however busy the copy engine is with KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

# Each array starts at a multiple of this many bytes, for any dtype and for wide loads.
_ALIGNMENT = 16
# A step's copies wait on the stream behind the step before it. Sends of two steps and more are under way without the host waiting.
_NUM_BUFFERS = 16
_NUM_AHEAD = 3

_TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


@dataclass(slots=True)
class _Buffer:
    pinned: torch.Tensor
    sent: torch.cuda.Event


class _Ahead:
    """Device memory that is written on the copies' stream and read on the steps'."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.consumed = torch.cuda.Event()


class StepUpload:
    """Sends arrays to one device, from one thread. Its pinned buffers take turns, and each grows to the largest send; on a CPU the
    arrays are only copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []
        self._next = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: list[_Ahead] = []

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """The arrays on the device in one new tensor, in order of the current stream. They may be changed on return."""
        starts, total = _starts(arrays)
        if self._device.type == "cpu":
            return [torch.from_numpy(array.copy()) for array in arrays]
        memory = torch.empty(total, dtype=torch.uint8, device=self._device)
        self._send(arrays, starts, total, memory, self.current_stream())
        return _parts(arrays, starts, memory)

    @contextmanager
    def ahead(self, arrays: Sequence[npt.NDArray[Any]]) -> Iterator[list[torch.Tensor]]:
        """As `send`, but the copy waits for no step. The tensors may be read by what is launched on the current stream inside the
        context: others' arrays are in their memory some sends later."""
        if self._stream is None:
            yield self.send(arrays)
            return
        starts, total = _starts(arrays)
        if len(self._ahead) < _NUM_AHEAD:
            self._ahead.append(_Ahead())
            slot = self._ahead[-1]
        else:
            self._ahead.append(slot := self._ahead.pop(0))
        steps = self.current_stream()
        if slot.memory is None or slot.memory.numel() < total:
            # Memory that the allocator hands out may still be used by what is queued on the steps' stream.
            slot.memory = torch.empty(2 * total, dtype=torch.uint8, device=self._device)
            slot.consumed.record(steps)
        self._stream.wait_event(slot.consumed)
        # As torch.cuda.stream does, which takes several times as long.
        torch.cuda.set_stream(self._stream)
        try:
            sent = self._send(arrays, starts, total, slot.memory[:total], self._stream)
        finally:
            torch.cuda.set_stream(steps)
        steps.wait_event(sent)
        try:
            yield _parts(arrays, starts, slot.memory)
        finally:
            slot.consumed.record(steps)

    def current_stream(self) -> torch.cuda.Stream:
        """Returns the one that steps are queued on, of a GPU."""
        assert self._stream is not None
        # With the number, which torch would look up otherwise, in several times as long.
        return torch.cuda.current_stream(self._stream.device_index)

    def _send(
        self, arrays: Sequence[npt.NDArray[Any]], starts: Sequence[int], total: int, target: torch.Tensor, stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        """`stream`: the current one."""
        buffer = self._take(total)
        host = buffer.pinned.numpy()
        for array, start in zip(arrays, starts, strict=True):
            host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        target.copy_(buffer.pinned[:total], non_blocking=True)
        buffer.sent.record(stream)
        return buffer.sent

    def _take(self, num_bytes: int) -> _Buffer:
        if len(self._buffers) < _NUM_BUFFERS:
            buffer = _Buffer(torch.empty(0, dtype=torch.uint8), torch.cuda.Event())
            self._buffers.append(buffer)
        else:
            buffer = self._buffers[self._next]
            self._next = (self._next + 1) % _NUM_BUFFERS
            buffer.sent.synchronize()  # its last copy still reads the pinned memory; seldom true
        if buffer.pinned.numel() < num_bytes:
            buffer.pinned = torch.empty(2 * num_bytes, dtype=torch.uint8, pin_memory=True)
        return buffer


def _parts(arrays: Sequence[npt.NDArray[Any]], starts: Sequence[int], memory: torch.Tensor) -> list[torch.Tensor]:
    return [
        memory[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype.name]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def _starts(arrays: Sequence[npt.NDArray[Any]]) -> tuple[list[int], int]:
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, total
