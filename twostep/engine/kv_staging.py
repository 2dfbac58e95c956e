"""Rows of device memory to and from host arrays: through pinned memory, on streams of their own, beside the running step.

    thread 1   memcpy ─▶ slot 0 ─copy engine─▶ rows        A transfer goes piece by piece through slots of pinned memory, each with a
    thread 1   memcpy ─▶ slot 1 ─copy engine─▶ rows        stream; while one piece is on its way, the next is filled. Several threads
    thread 2   memcpy ─▶ slot 2 ─copy engine─▶ rows        share the slots: a memcpy is a fifth of the copy engine's speed.

Reading is the other way round. A host array that is pinned itself is copied to and from directly.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

_SLOT_BYTES = 8 << 20
_NUM_SLOTS = 6


class _Slot:
    """Pinned memory for one piece, uint8 [num_rows, row_bytes], and the stream it travels on."""

    def __init__(self, num_rows: int, row_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_rows, row_bytes, dtype=torch.uint8, pin_memory=True)
        self.host: npt.NDArray[np.uint8] = self.memory.numpy()
        self.stream = torch.cuda.Stream(device)

    def wait(self) -> None:
        self.stream.synchronize()


class PinnedStaging:
    """Safe from any thread. A transfer waits for no step and no step waits for it: the caller sees to it that no running step touches
    the rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        """rows  uint8 [num_rows, row_bytes] on a GPU, rows dense"""
        self._rows = rows
        self._at_once = max(1, _SLOT_BYTES // rows.shape[1])
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._making = threading.Lock()
        self._num_made = 0
        self._direct = threading.Lock()
        self._stream = torch.cuda.Stream(rows.device)

    def read(self, ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """Fills out [len(ids), row_bytes]; it is complete on return."""
        pinned = torch.from_numpy(out)
        if pinned.is_pinned():
            with self._direct, torch.cuda.device(self._rows.device), torch.cuda.stream(self._stream):
                for place, first, count in _runs(ids):
                    pinned[place : place + count].copy_(self._rows[first : first + count], non_blocking=True)
                self._stream.synchronize()
            return
        on_way: deque[tuple[_Slot, npt.NDArray[np.uint8]]] = deque()

        def land() -> None:
            slot, part = on_way.popleft()
            try:
                slot.wait()
                part[...] = slot.host[: len(part)]
            finally:
                self._slots.put(slot)

        try:
            for start in range(0, len(ids), self._at_once):
                while (slot := self._idle_slot(block=not on_way)) is None:
                    land()
                on_way.append((slot, out[start : start + self._at_once]))
                with torch.cuda.device(self._rows.device), torch.cuda.stream(slot.stream):
                    for place, first, count in _runs(ids[start : start + self._at_once]):
                        slot.memory[place : place + count].copy_(self._rows[first : first + count], non_blocking=True)
        finally:
            while on_way:
                land()

    def write(self, ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """The inverse; the rows are written on return. `data` may be read-only."""
        # (torch warns of read-only arrays, which no pinned one is.)
        if data.flags.writeable and (pinned := torch.from_numpy(data)).is_pinned():
            with self._direct, torch.cuda.device(self._rows.device), torch.cuda.stream(self._stream):
                for place, first, count in _runs(ids):
                    self._rows[first : first + count].copy_(pinned[place : place + count], non_blocking=True)
                self._stream.synchronize()
            return
        on_way: deque[_Slot] = deque()

        def land() -> None:
            slot = on_way.popleft()
            try:
                slot.wait()
            finally:
                self._slots.put(slot)

        try:
            for start in range(0, len(ids), self._at_once):
                while (slot := self._idle_slot(block=not on_way)) is None:
                    land()
                on_way.append(slot)
                part = data[start : start + self._at_once]
                slot.host[: len(part)] = part
                with torch.cuda.device(self._rows.device), torch.cuda.stream(slot.stream):
                    for place, first, count in _runs(ids[start : start + self._at_once]):
                        self._rows[first : first + count].copy_(slot.memory[place : place + count], non_blocking=True)
        finally:
            while on_way:
                land()

    def _idle_slot(self, *, block: bool) -> _Slot | None:
        """A slot that nobody uses. None: all are in use, and `block` is False because the caller has some of them under way, which it
        lands first: nobody waits for slots while holding any."""
        try:
            return self._slots.get_nowait()
        except queue.Empty:
            pass
        with self._making:
            if self._num_made < _NUM_SLOTS:
                slot = _Slot(self._at_once, self._rows.shape[1], self._rows.device)
                self._num_made += 1
                return slot
        return self._slots.get() if block else None


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in ids, first id, count) of each run of consecutive ids: a run is one copy."""
    place = 0
    while place < len(ids):
        count = 1
        while place + count < len(ids) and ids[place + count] == ids[place] + count:
            count += 1
        yield place, ids[place], count
        place += count
