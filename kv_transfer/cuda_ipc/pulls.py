"""Pulls: kernels that copy and sum blocks, in lanes; and fetches that wait at the same time become one pull, since a launch costs more
than the copy of a chunk.

fetch ─┐
fetch ─┼─▶ batch (one source, one range of layers) ── a lane is free ──▶ pull ──▶ each fetch has its chunk's sum
fetch ─┘        joined until it starts

A lane is one thread's: a stream and the small buffers of its calls, which return when the GPU is done.

host            ids ──▶ ┌ lane's stream: ids in │ sums := 0 │ pull and sum │ sums out ┐ ──▶ event, waited for without the GIL
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.cuda_ipc.endpoint import IpcEndpoint
from kv_transfer.gpu_pool import WITHIN_GPU, add_block_sums, launching
from kv_transfer.waiting import finish
from twostep.errors import ResourceExhausted
from twostep.model.kernels.triton_pull import PullShape, pull_blocks
from twostep.model.step.kv_cache import KvCache

# A batch larger than this would keep others waiting: 8 GB of 2 MiB blocks take 25 ms.
_MAX_BLOCKS = 4096

Sums = npt.NDArray[np.uint64]


class Lane:
    """Not thread-safe. `blocking`: the thread sleeps while it waits, instead of spinning."""

    def __init__(self, device: torch.device, *, blocking: bool = True) -> None:
        self._device = device
        # Its kernels are small and somebody's next token waits for them: they go before those of steps that have not begun.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._done = torch.cuda.Event(blocking=blocking) if self._stream is not None else None
        self._grow(256)

    def pull(
        self, source: int, target: int, source_ids: Sequence[int], target_ids: Sequence[int], *, block_bytes: int, part: slice,
        shape: PullShape,
    ) -> Sums:  # fmt: skip
        """Copies bytes `part` of blocks between pools at these addresses, and returns their sums, [n]."""
        count = len(source_ids)
        with launching(self._stream):
            ids, sums = self._send(source_ids, target_ids)
            pull_blocks(
                source, target, ids.view(2, count), sums, block_bytes=block_bytes, first_byte=part.start,
                num_bytes=part.stop - part.start, shape=shape,
            )  # fmt: skip
        return self._receive(count)

    def sums_of(self, cache: KvCache, block_ids: Sequence[int], part: slice, *, of_bytes: bool = False) -> Sums:
        """Returns those of whole layers of blocks, [n]: out of what steps have kept, else, or `of_bytes`, out of the bytes."""
        with launching(self._stream):
            ids, sums = self._send(block_ids)
            size = cache.shape.block_bytes
            kept = None if of_bytes else cache.sums
            add_block_sums(cache.tensor, kept, block_ids, ids, sums, part, block_bytes=size, shape=WITHIN_GPU)
        return self._receive(len(block_ids))

    def _send(self, *rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns int32 [all ids], and int64 [n] zeros."""
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


@dataclass(frozen=True, slots=True, eq=False)
class WaitingFetch:
    """One chunk: blocks of the source, and where they go. `done`: its sum."""

    source_blocks: Sequence[int]
    target_blocks: Sequence[int]
    done: asyncio.Future[int]


@dataclass(slots=True, eq=False)
class PullBatch:
    source: IpcEndpoint
    part: slice
    fetches: list[WaitingFetch] = field(default_factory=list)
    num_blocks: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)


class PullBatches:
    """Belongs to one event loop."""

    def __init__(self, run: Callable[[PullBatch], Awaitable[list[int]]]) -> None:
        """`run` waits for its turn, calls `begin`, and returns the sums of the batch's fetches, in order."""
        self._run = run
        self._open: dict[tuple[str, int, int], PullBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def pull(
        self, source: IpcEndpoint, part: slice, source_blocks: Sequence[int], target_blocks: Sequence[int], *, deadline: float
    ) -> int:
        """Returns the chunk's sum, once it is copied. Raises ResourceExhausted if it has not begun by the deadline, and what `run` raises.
        Once begun it goes on to its end, also when the caller is cancelled, which is raised then."""
        fetch = WaitingFetch(source_blocks, target_blocks, asyncio.get_running_loop().create_future())
        # A caller that was cancelled meanwhile does not look at it.
        fetch.done.add_done_callback(lambda done: done.exception())
        batch = self._join(source, part, fetch)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await batch.started.wait()
        except TimeoutError:
            if self._leave(batch, fetch):
                raise ResourceExhausted("other transfers over cuda_ipc took until the deadline; try again, or another worker") from None
        except asyncio.CancelledError:
            if not self._leave(batch, fetch):
                await finish(_ended(fetch))
            raise
        await finish(_ended(fetch))
        return fetch.done.result()

    async def close(self) -> None:
        """Waits for what was begun or still waits."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def begin(self, batch: PullBatch) -> list[WaitingFetch]:
        """Closes the batch to those who would join or leave it. Returns what there is to do; may be nothing."""
        self._open = {key: other for key, other in self._open.items() if other is not batch}
        batch.started.set()
        return batch.fetches

    def _join(self, source: IpcEndpoint, part: slice, fetch: WaitingFetch) -> PullBatch:
        key = source.incarnation, part.start, part.stop
        batch = self._open.get(key)
        if batch is None or batch.source != source or batch.num_blocks + len(fetch.source_blocks) > _MAX_BLOCKS:
            batch = self._open[key] = PullBatch(source, part)
            # It runs after what is ready to run now, so that chunks announced together travel together.
            task = asyncio.create_task(self._drive(batch), name="cuda_ipc pull")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        batch.fetches.append(fetch)
        batch.num_blocks += len(fetch.source_blocks)
        return batch

    def _leave(self, batch: PullBatch, fetch: WaitingFetch) -> bool:
        """Returns False if it has begun."""
        if batch.started.is_set():
            return False
        batch.fetches.remove(fetch)
        batch.num_blocks -= len(fetch.source_blocks)
        return True

    async def _drive(self, batch: PullBatch) -> None:
        try:
            sums = await self._run(batch)
        except Exception as error:  # noqa: BLE001 - each of those who wait raises it
            for fetch in self.begin(batch):
                fetch.done.set_exception(error)
        else:
            for fetch, found in zip(batch.fetches, sums, strict=True):
                fetch.done.set_result(found)


async def _ended(fetch: WaitingFetch) -> None:
    await asyncio.wait([fetch.done])
