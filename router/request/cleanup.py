"""Work that must still be done for requests that are over: awaited in the background, bounded in number and time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import grpc.aio

log = logging.getLogger(__name__)

_MAX_PENDING = 4096
_TIMEOUT_S = 10.0


class Cleanup:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs `work` for 10 s at most; what it raises is logged. Beyond the bound it is not run: leases on the workers end what
        it would have ended."""
        if len(self._tasks) >= _MAX_PENDING:
            work.close()
            log.warning("%d clean-ups are under way: one more is left to the workers' leases", len(self._tasks))
            return
        self.watch(asyncio.create_task(_bounded(work)))

    def watch(self, task: asyncio.Future[Any]) -> None:
        """Keeps a reference to a cancelled task until it has ended, and takes its result."""
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def drain(self, timeout_s: float) -> None:
        """Waits for what is under way, then cancels it."""
        pending = set(self._tasks)
        if pending:
            _, late = await asyncio.wait(pending, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, grpc.aio.AioRpcError | TimeoutError):
            log.error("clean-up failed", exc_info=error)


async def _bounded(work: Coroutine[Any, Any, Any]) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        await work
