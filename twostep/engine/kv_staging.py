"""Rows of device memory to and from host arrays: through pinned memory, on a stream of its own, beside the running step.

read     device ─copy engine→ pinned half 0 ─memcpy→ host array
                              pinned half 1           (one half is filled while the other is emptied)
write    the other way round

A host array that is pinned itself is copied to and from directly.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

_HALF_BYTES = 16 << 20


class PinnedStaging:
    """Safe from any thread; transfers run one after another. A transfer waits for no step and no step waits for it: the caller sees
    to it that no running step touches the rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        """rows  uint8 [num_rows, row_bytes] on a GPU, rows dense"""
        self._rows = rows
        self._at_once = max(1, _HALF_BYTES // rows.shape[1])
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(rows.device)
        self._halves: list[torch.Tensor] = []
        self._done: list[torch.cuda.Event] = []

    def read(self, ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """Fills out [len(ids), row_bytes]; it is complete on return."""
        with self._lock, torch.cuda.device(self._rows.device), torch.cuda.stream(self._stream):
            pinned = torch.from_numpy(out)
            if pinned.is_pinned():
                for place, first, count in _runs(ids):
                    pinned[place : place + count].copy_(self._rows[first : first + count], non_blocking=True)
                self._stream.synchronize()
                return
            self._allocate(len(ids))
            starts = list(range(0, len(ids), self._at_once))
            for i, start in enumerate(starts):
                half = self._halves[i % 2]
                for place, first, count in _runs(ids[start : start + self._at_once]):
                    half[place : place + count].copy_(self._rows[first : first + count], non_blocking=True)
                self._done[i % 2].record()
                if i:
                    self._empty(i - 1, starts[i - 1], out)
            if starts:
                self._empty(len(starts) - 1, starts[-1], out)

    def write(self, ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """The inverse; the rows are written on return. `data` may be read-only."""
        with self._lock, torch.cuda.device(self._rows.device), torch.cuda.stream(self._stream):
            # (torch warns of read-only arrays, which no pinned one is.)
            if data.flags.writeable and (pinned := torch.from_numpy(data)).is_pinned():
                for place, first, count in _runs(ids):
                    self._rows[first : first + count].copy_(pinned[place : place + count], non_blocking=True)
                self._stream.synchronize()
                return
            self._allocate(len(ids))
            for i, start in enumerate(range(0, len(ids), self._at_once)):
                half, part = self._halves[i % 2], data[start : start + self._at_once]
                self._done[i % 2].synchronize()
                half.numpy()[: len(part)] = part
                for place, first, count in _runs(ids[start : start + self._at_once]):
                    self._rows[first : first + count].copy_(half[place : place + count], non_blocking=True)
                self._done[i % 2].record()
            self._stream.synchronize()

    def _empty(self, i: int, start: int, out: npt.NDArray[np.uint8]) -> None:
        part = out[start : start + self._at_once]
        self._done[i % 2].synchronize()
        part[...] = self._halves[i % 2].numpy()[: len(part)]

    def _allocate(self, num_rows: int) -> None:
        """Pinned memory for transfers of so many rows: no more than they need, for that takes time too."""
        wanted = min(num_rows, self._at_once)
        if not self._halves or len(self._halves[0]) < wanted:
            self._halves = [torch.empty(wanted, self._rows.shape[1], dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._done = [torch.cuda.Event() for _ in range(2)]


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in ids, first id, count) of each run of consecutive ids: a run is one copy."""
    place = 0
    while place < len(ids):
        count = 1
        while place + count < len(ids) and ids[place + count] == ids[place] + count:
            count += 1
        yield place, ids[place], count
        place += count
