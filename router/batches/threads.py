"""Work that blocks for the disk, beside the event loop: in threads of its own, few, so that a volume that hangs holds up nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from twostep.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")

_SHORT_S = 30.0


class Threads:
    def __init__(self, timeout_s: float = _SHORT_S) -> None:
        self._timeout_s = timeout_s
        self._short = ThreadPoolExecutor(4, thread_name_prefix="batches")
        # Whole files are read and written: small things need not wait for it.
        self._long = ThreadPoolExecutor(2, thread_name_prefix="batches-long")

    async def short(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises what `work` does; Unavailable for a disk that fails or does not answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._in(self._short, partial(work, *args, **kwargs))
        except TimeoutError:
            raise Unavailable(
                f"the batch directory did not answer within {self._timeout_s:.0f} s; repeat it, or look after the volume"
            ) from None

    async def long(self, work: Callable[[], T]) -> T:
        """The same, however long it takes."""
        return await self._in(self._long, work)

    async def _in(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work)
        except OSError as error:
            raise Unavailable(
                f"the batch directory cannot be used ({error.strerror or error}); look after the volume and its room"
            ) from error

    def close(self) -> None:
        """What has begun ends by itself."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)
