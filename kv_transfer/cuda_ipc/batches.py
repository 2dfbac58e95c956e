"""Fetches that wait at the same time become one pull: a launch costs more than the copy of a chunk.

fetch ─┐
fetch ─┼─▶ batch (one source, one range of layers) ── a lane is free ──▶ pull ──▶ each fetch has its chunk's sum
fetch ─┘        joined until it starts
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from kv_transfer.cuda_ipc.endpoint import IpcEndpoint
from kv_transfer.waiting import finish
from twostep.errors import ResourceExhausted

# A batch larger than this would keep others waiting: 8 GB of 2 MiB blocks take 25 ms.
_MAX_BLOCKS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One chunk: blocks of the source, and where they go. `done`: its sum."""

    source_blocks: Sequence[int]
    target_blocks: Sequence[int]
    done: asyncio.Future[int]


@dataclass(slots=True, eq=False)
class Batch:
    source: IpcEndpoint
    part: slice
    asks: list[Ask] = field(default_factory=list)
    num_blocks: int = 0
    started: asyncio.Event = field(default_factory=asyncio.Event)


class PullBatches:
    """Belongs to one event loop."""

    def __init__(self, run: Callable[[Batch], Awaitable[list[int]]]) -> None:
        """`run` waits for its turn, calls `begin`, and returns the sums of the batch's asks, in order."""
        self._run = run
        self._open: dict[tuple[str, int, int], Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def pull(
        self, source: IpcEndpoint, part: slice, source_blocks: Sequence[int], target_blocks: Sequence[int], *, deadline: float
    ) -> int:
        """The chunk's sum, once it is copied. Raises ResourceExhausted if it has not begun by the deadline, and what `run` raises. Once
        begun it goes on to its end, also when the caller is cancelled, who is told then."""
        ask = Ask(source_blocks, target_blocks, asyncio.get_running_loop().create_future())
        # Who was cancelled meanwhile does not look at it.
        ask.done.add_done_callback(lambda done: done.exception())
        batch = self._join(source, part, ask)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await batch.started.wait()
        except TimeoutError:
            if self._leave(batch, ask):
                raise ResourceExhausted("other transfers over cuda_ipc took until the deadline; try again, or another worker") from None
        except asyncio.CancelledError:
            if not self._leave(batch, ask):
                await finish(_ended(ask))
            raise
        await finish(_ended(ask))
        return ask.done.result()

    async def close(self) -> None:
        """Waits for what was begun or still waits."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def begin(self, batch: Batch) -> list[Ask]:
        """Nobody joins or leaves it any more. What there is to do; may be nothing."""
        self._open = {key: other for key, other in self._open.items() if other is not batch}
        batch.started.set()
        return batch.asks

    def _join(self, source: IpcEndpoint, part: slice, ask: Ask) -> Batch:
        key = source.life, part.start, part.stop
        batch = self._open.get(key)
        if batch is None or batch.source != source or batch.num_blocks + len(ask.source_blocks) > _MAX_BLOCKS:
            batch = self._open[key] = Batch(source, part)
            # It runs after what is ready to run now, so that chunks announced together travel together.
            task = asyncio.create_task(self._drive(batch), name="cuda_ipc pull")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        batch.asks.append(ask)
        batch.num_blocks += len(ask.source_blocks)
        return batch

    def _leave(self, batch: Batch, ask: Ask) -> bool:
        """False: it has begun."""
        if batch.started.is_set():
            return False
        batch.asks.remove(ask)
        batch.num_blocks -= len(ask.source_blocks)
        return True

    async def _drive(self, batch: Batch) -> None:
        try:
            sums = await self._run(batch)
        except Exception as error:  # noqa: BLE001 - each of those who wait raises it
            for ask in self.begin(batch):
                ask.done.set_exception(error)
        else:
            for ask, found in zip(batch.asks, sums, strict=True):
                ask.done.set_result(found)


async def _ended(ask: Ask) -> None:
    await asyncio.wait([ask.done])
