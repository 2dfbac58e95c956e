"""Pulls and checksums as calls that return when the GPU is done. A lane is one thread's: a stream and the small buffers of its calls.

host            ids ──▶ ┌ lane's stream: ids in │ sums := 0 │ pull and sum │ sums out ┐ ──▶ event, waited for without the GIL
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from twostep.model.kernels.triton_pull import PullShape, add_slot_sums, pull_blocks, sum_blocks
from twostep.model.step.kv_cache import KvCache

# Of one GPU's own memory, which is ten times as fast as a link: more programs, for a shorter time.
_OWN = PullShape(num_programs=128)

# Triton's interpreter, which stands in where there is no GPU, runs one kernel at a time.
_interpreter = threading.Lock()

Sums = npt.NDArray[np.uint64]


class Lane:
    """Not thread-safe. `blocking`: the thread sleeps while it waits, instead of spinning."""

    def __init__(self, device: torch.device, *, blocking: bool = True) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done = torch.cuda.Event(blocking=blocking) if self._stream is not None else None
        self._grow(256)

    def pull(
        self, source: int, target: int, source_ids: Sequence[int], target_ids: Sequence[int], *, block_bytes: int, part: slice,
        shape: PullShape,
    ) -> Sums:  # fmt: skip
        """Copies bytes `part` of blocks between pools at these addresses, and returns their sums, [n]."""
        count = len(source_ids)
        with self._launching():
            ids, sums = self._send(source_ids, target_ids)
            pull_blocks(
                source, target, ids.view(2, count), sums, block_bytes=block_bytes, first_byte=part.start,
                num_bytes=part.stop - part.start, shape=shape,
            )  # fmt: skip
        return self._receive(count)

    def sums_of(self, cache: KvCache, block_ids: Sequence[int], part: slice) -> Sums:
        """Of whole layers of blocks, [n]: out of what steps have kept, else out of the bytes."""
        with self._launching():
            ids, sums = self._send(block_ids)
            if cache.sums is not None:
                layer_bytes = cache.shape.layer_bytes
                first, stop = part.start // layer_bytes, part.stop // layer_bytes
                add_slot_sums(cache.sums.tensor, ids, sums, first_layer=first, num_layers=stop - first)
            else:
                sum_blocks(
                    cache.tensor.data_ptr(), ids, sums, block_bytes=cache.shape.block_bytes, first_byte=part.start,
                    num_bytes=part.stop - part.start, shape=_OWN,
                )  # fmt: skip
        return self._receive(len(block_ids))

    @contextmanager
    def _launching(self) -> Iterator[None]:
        """Kernels are launched on the thread's current device, which is that of the stream."""
        with _interpreter if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def _send(self, *rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [all ids], and int64 [n] zeros."""
        count = len(rows[0])
        if count > len(self._sums):
            self._grow(2 * count)
        total = 0
        for row in rows:
            self._ids_host.numpy()[total : total + count] = row
            total += count
        ids, sums = self._ids[:total], self._sums[:count]
        ids.copy_(self._ids_host[:total], non_blocking=True)
        return ids, sums.zero_()

    def _receive(self, count: int) -> Sums:
        if self._stream is None or self._done is None:
            return self._sums[:count].numpy().view(np.uint64).copy()
        with torch.cuda.stream(self._stream):
            self._sums_host[:count].copy_(self._sums[:count], non_blocking=True)
            self._done.record()
        self._done.synchronize()
        return self._sums_host.numpy()[:count].view(np.uint64).copy()

    def _grow(self, capacity: int) -> None:
        pinned = self._stream is not None
        with torch.cuda.stream(self._stream):
            self._ids = torch.empty(2 * capacity, dtype=torch.int32, device=self._device)
            self._sums = torch.empty(capacity, dtype=torch.int64, device=self._device)
        self._ids_host = torch.empty(2 * capacity, dtype=torch.int32, pin_memory=pinned)
        self._sums_host = torch.empty(capacity, dtype=torch.int64, pin_memory=pinned)
