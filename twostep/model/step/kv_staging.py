"""Rows of device memory, or a range of their columns, to and from host arrays: on streams of their own, beside the running step.

    thread 1   memcpy ─▶ slot 0 ─copy engine─▶ rows        A transfer goes piece by piece through slots of pinned memory, each with a
    thread 1   memcpy ─▶ slot 1 ─copy engine─▶ rows        stream; while one piece is on its way, the next is filled. Several threads
    thread 2   memcpy ─▶ slot 2 ─copy engine─▶ rows        share the slots: a memcpy is a fifth of the copy engine's speed.
    thread 3   array that is pinned itself ───▶ rows       Such an array needs only a slot's stream.

Reading is the other way round. Columns of rows lie scattered in small pieces: a kernel gathers them into the slot's device memory (or
scatters them from there), and the copy engine moves them as one. Whole rows need no kernel.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

_SLOT_BYTES = 8 << 20
_NUM_SLOTS = 6
# cudaHostRegisterPortable: pinned for every GPU of the process.
_PORTABLE = 1


class _Slot:
    """A stream, and memory for one piece at both of its ends, made when first needed."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes = num_bytes
        self._device = device
        self._pinned: torch.Tensor | None = None
        self._gathered: torch.Tensor | None = None
        # Of the last piece, which most are like: making views gives the interpreter away and waits for it, once for each.
        self._memory = torch.empty(0, 0, dtype=torch.uint8)
        self._host = self._memory.numpy()
        self.stream = torch.cuda.Stream(device, priority=-1)

    def memory(self, num_rows: int, width: int) -> torch.Tensor:
        """Pinned, uint8 [num_rows, width]."""
        if self._pinned is None:
            self._pinned = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True)
        if self._host.shape != (num_rows, width):
            self._memory = self._pinned[: num_rows * width].view(num_rows, width)
            self._host = self._memory.numpy()
        return self._memory

    def host(self, num_rows: int, width: int) -> npt.NDArray[np.uint8]:
        """The same memory, for the host; nothing may be on its way there."""
        self.memory(num_rows, width)
        return self._host

    def gathered(self, num_rows: int, width: int) -> torch.Tensor:
        """On the device, uint8 [num_rows, width]. To be asked for on the slot's stream."""
        if self._gathered is None:
            self._gathered = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        return self._gathered[: num_rows * width].view(num_rows, width)

    def wait(self) -> None:
        self.stream.synchronize()


class PinnedStaging:
    """Safe from any thread. A transfer waits for no step and no step waits for it: the caller sees to it that no running step touches
    what is moved."""

    def __init__(self, rows: torch.Tensor) -> None:
        """rows  uint8 [num_rows, row_bytes] on a GPU, rows dense"""
        self._rows = rows
        self._slot_bytes = max(_SLOT_BYTES, rows.shape[1])
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self._making = threading.Lock()
        self._num_made = 0

    def read(self, ids: Sequence[int], out: npt.NDArray[np.uint8], columns: slice | None = None) -> None:
        """Fills out [len(ids), width] with the rows, or with their bytes columns.start to columns.stop; it is complete on return."""
        self._move(ids, out, columns, to_host=True)

    def write(self, ids: Sequence[int], data: npt.NDArray[np.uint8], columns: slice | None = None) -> None:
        """The inverse; the rows are written on return. `data` may be read-only."""
        self._move(ids, data, columns, to_host=False)

    def _move(self, ids: Sequence[int], array: npt.NDArray[np.uint8], columns: slice | None, *, to_host: bool) -> None:
        width: int = array.shape[1]
        at_once = max(1, self._slot_bytes // width)
        pinned = _as_pinned(array)
        on_way: deque[tuple[_Slot, npt.NDArray[np.uint8]]] = deque()

        def land() -> None:
            slot, part = on_way.popleft()
            try:
                slot.wait()
                if to_host and pinned is None:
                    part[...] = slot.host(*part.shape)
            finally:
                self._slots.put(slot)

        try:
            for start in range(0, len(ids), at_once):
                while (slot := self._idle_slot(block=not on_way)) is None:
                    land()
                piece, part = ids[start : start + at_once], array[start : start + at_once]
                on_way.append((slot, part))
                if not to_host and pinned is None:
                    slot.host(*part.shape)[...] = part
                with torch.cuda.device(self._rows.device), torch.cuda.stream(slot.stream):
                    host = slot.memory(len(piece), width) if pinned is None else pinned[start : start + at_once]
                    if columns is None:
                        for place, first, count in _runs(piece):
                            here, there = host[place : place + count], self._rows[first : first + count]
                            (here if to_host else there).copy_(there if to_host else here, non_blocking=True)
                        continue
                    gathered = slot.gathered(len(piece), width)
                    rows, words = _words(self._rows, columns, gathered)
                    # So few bytes are taken off the host at once: nothing is waited for.
                    index = torch.tensor(piece, dtype=torch.int64).to(self._rows.device, non_blocking=True)
                    if to_host:
                        torch.index_select(rows, 0, index, out=words)
                        host.copy_(gathered, non_blocking=True)
                    else:
                        gathered.copy_(host, non_blocking=True)
                        rows.index_copy_(0, index, words)
        finally:
            while on_way:
                land()

    def _idle_slot(self, *, block: bool) -> _Slot | None:
        """Returns an idle slot. None: all are in use, and `block` is False because the caller has some of them under way, which it
        lands first: no thread waits for slots while it holds any."""
        try:
            return self._slots.get_nowait()
        except queue.Empty:
            pass
        with self._making:
            if self._num_made < _NUM_SLOTS:
                slot = _Slot(self._slot_bytes, self._rows.device)
                self._num_made += 1
                return slot
        return self._slots.get() if block else None


def pin(memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
    """Pins host memory that exists, such as a mapping that is shared with another process; the function returned undoes it, before the
    memory is unmapped and when nothing is on its way. Both take a millisecond per 10 MB or so. Raises RuntimeError."""
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    torch.cuda.check_error(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE))

    def unpin() -> None:
        torch.cuda.check_error(runtime.cudaHostUnregister(address))

    return unpin


def _as_pinned(array: npt.NDArray[np.uint8]) -> torch.Tensor | None:
    """The array as a tensor, if its memory is pinned. (torch warns of read-only arrays, which no pinned one is.)"""
    if not array.flags.writeable:
        return None
    tensor = torch.from_numpy(array)
    return tensor if tensor.is_pinned() else None


def _words(rows: torch.Tensor, columns: slice, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' columns and `part`, uint8 [n, width], as the longest words that divide them: kernels move a word per thread."""
    start, stop = columns.start, columns.stop
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        if not (start % size or stop % size or rows.shape[1] % size):
            return rows.view(dtype)[:, start // size : stop // size], part.view(dtype)
    return rows[:, start:stop], part


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in ids, first id, count) of each run of consecutive ids: a run is one copy."""
    place = 0
    while place < len(ids):
        count = 1
        while place + count < len(ids) and ids[place + count] == ids[place] + count:
            count += 1
        yield place, ids[place], count
        place += count
