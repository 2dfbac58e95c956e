"""Work that blocks, beside the event loop, in a few threads that may hang: whoever has to wait for one waits on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class BoundedThreads:
    """At most `num_threads` calls at once, and none that nobody waits for any more: behind threads that hang, the pool's own queue would
    keep the calls of all who gave up."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(num_threads)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises what `work` does. What has begun goes on when its caller is cancelled, and has its thread until it ends."""
        await self._free.acquire()
        try:
            call = asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args, **kwargs))
        except RuntimeError:
            # Closed meanwhile: the next in line is told so too.
            self._free.release()
            raise
        call.add_done_callback(self._over)
        # A wait that is cancelled leaves the call alone.
        await asyncio.wait((call,))
        return call.result()

    def close(self) -> None:
        """Takes no more calls and cancels those that wait; those that have begun end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _over(self, call: asyncio.Future[Any]) -> None:
        self._free.release()
        if not call.cancelled():
            # Seen, so that nobody logs what it may quote if its caller is gone.
            call.exception()
