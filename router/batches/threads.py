"""Work that blocks for the disk, beside the event loop: in threads of its own, few, so that a volume that hangs holds up nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from twostep.errors import Unavailable
from twostep.process.bounded_threads import BoundedThreads

P = ParamSpec("P")
T = TypeVar("T")

_SHORT_S = 30.0


class Threads:
    def __init__(self, timeout_s: float = _SHORT_S) -> None:
        self._timeout_s = timeout_s
        self._short = BoundedThreads(4, "batches")
        # Whole files are read and written: small things need not wait for it.
        self._long = BoundedThreads(2, "batches-long")

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

    async def _in(self, threads: BoundedThreads, work: Callable[[], T]) -> T:
        try:
            return await threads.run(work)
        except OSError as error:
            raise Unavailable(
                f"the batch directory cannot be used ({error.strerror or error}); look after the volume and its room"
            ) from error

    def close(self) -> None:
        """What has begun ends by itself."""
        self._short.close()
        self._long.close()
