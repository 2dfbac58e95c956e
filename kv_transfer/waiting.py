"""Small asyncio tools of the transports: a fair queue for room that frees up, work that a cancel cannot leave behind, and threads."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from twostep.errors import ResourceExhausted, Unavailable

T = TypeVar("T")


class FifoGate:
    """Waiters take room in the order in which they came, so that a large request is not starved by small ones."""

    def __init__(self, what: str, *, max_waiting: int = 4096) -> None:
        self._what = what
        self._max_waiting = max_waiting
        self._waiters: deque[asyncio.Event] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    async def take(self, attempt: Callable[[], T | None], *, deadline: float) -> T:
        """Returns what `attempt` returns, once it is not None. It runs on the event loop, now and after a `pump`; what it raises is raised.

        Raises ResourceExhausted when `deadline` (time.monotonic seconds) passes or too many wait. A cancelled caller has taken nothing.
        """
        if len(self._waiters) >= self._max_waiting:
            raise ResourceExhausted(f"{self._max_waiting} wait for {self._what} already; try another worker, or later")
        turn = asyncio.Event()
        self._waiters.append(turn)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                while True:
                    if self._waiters[0] is turn and (taken := attempt()) is not None:
                        return taken
                    turn.clear()
                    await turn.wait()
        except TimeoutError:
            raise ResourceExhausted(f"no room for {self._what} before the deadline; try another worker, or later") from None
        finally:
            self._waiters.remove(turn)
            self.pump()

    def pump(self) -> None:
        """Lets the first in the queue try again. Call it after room was freed."""
        if self._waiters:
            self._waiters[0].set()


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work` to its end even if the caller is cancelled meanwhile; the cancellation is raised then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()
        raise


class TransportThreads:
    """Threads in which a transport's calls may block, and a task that sweeps beside them. Belongs to one event loop."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        *,
        sweep: Callable[[], Coroutine[Any, Any, object]],
        sweep_s: float,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        """`enter` runs first in every thread; `sweep` is awaited every `sweep_s` seconds."""
        self._name = name
        self._num_threads = num_threads
        self._sweep = sweep
        self._sweep_s = sweep_s
        self._enter = enter
        self._threads: ThreadPoolExecutor | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._threads is not None

    def check(self) -> None:
        """Raises Unavailable unless they run."""
        if self._threads is None:
            raise Unavailable(f"the {self._name} transport is not running; try another worker")

    def start(self) -> None:
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix=f"kv-{self._name}", initializer=self._enter)
        self._sweeper = asyncio.create_task(self._sweep_for_ever(), name=f"kv-{self._name}-sweep")

    async def close(self) -> None:
        """Waits for the calls under way. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeper
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Ends when the thread's work has ended, cancelled or not: memory that it uses is free then. Raises Unavailable if closed."""
        self.check()

        async def work() -> T:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args))

        return await finish(work())

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            await self._sweep()
