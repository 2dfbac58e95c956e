"""A step's index arrays on their way to the device: packed into pinned memory, sent in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Each array starts at a multiple of this many bytes, for any dtype and for wide loads.
_ALIGNMENT = 16


class StepUpload:
    """Sends arrays to one device, from one thread. Its pinned memory grows to the largest step and is used again by each; on a CPU
    the arrays are only wrapped."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._sent: torch.cuda.Event | None = None

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """The arrays on the device in one new tensor, in order of the current stream. They may be changed on return."""
        starts, total = _starts(arrays)
        if self._device.type == "cpu":
            return [torch.from_numpy(array.copy()) for array in arrays]
        memory = torch.empty(total, dtype=torch.uint8, device=self._device)
        self._send(arrays, starts, total, memory)
        return [
            memory[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def _send(self, arrays: Sequence[npt.NDArray[Any]], starts: Sequence[int], total: int, target: torch.Tensor) -> None:
        if self._sent is not None:
            self._sent.synchronize()  # the last step's copy still reads the pinned memory; seldom true
        if self._pinned.numel() < total:
            self._pinned = torch.empty(2 * total, dtype=torch.uint8, pin_memory=True)
        host = self._pinned.numpy()
        for array, start in zip(arrays, starts, strict=True):
            host[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        target.copy_(self._pinned[:total], non_blocking=True)
        if self._sent is None:
            self._sent = torch.cuda.Event()
        self._sent.record()


def _starts(arrays: Sequence[npt.NDArray[Any]]) -> tuple[list[int], int]:
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, total


def _torch_dtype(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.int64 if array.dtype == np.int64 else torch.int32
