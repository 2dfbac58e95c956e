"""Many that wait for the disk, one that writes: what comes while a write is under way goes with the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from router.batches.journal import Entry


class GroupWriter:
    """`write_all` puts entries on disk. As many may wait as ask: each does for its own."""

    def __init__(self, write_all: Callable[[list[Entry]], Awaitable[None]]) -> None:
        self._write_all = write_all
        self._waiting: list[Entry] = []
        self._next: asyncio.Future[None] | None = None
        self._turn = asyncio.Lock()

    async def write(self, entry: Entry) -> None:
        """On disk when it returns. Raises what `write_all` does, to everybody whose entry it was."""
        self._waiting.append(entry)
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        mine = self._next
        async with self._turn:
            if mine.done():
                mine.result()
                return
            entries, self._waiting, self._next = self._waiting, [], None
            try:
                await self._write_all(entries)
            except BaseException as error:
                # Cancelled while it wrote for others too: none of them knows whether it is on disk.
                mine.set_exception(error if isinstance(error, Exception) else asyncio.InvalidStateError("the writer was cancelled"))
                mine.exception()
                raise
            mine.set_result(None)
