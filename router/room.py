"""Requests that found every worker full wait here, first come, first served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """Only the one whose turn it is tries again: when something of this router's was released, else every `retry_s`."""

    def __init__(self, *, retry_s: float = 0.1) -> None:
        self._retry_s = retry_s
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()
        self._num_queued = 0

    @property
    def num_queued(self) -> int:
        """Requests waiting, the one whose turn it is included. While there are any, newcomers go behind them."""
        return self._num_queued

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        self._num_queued += 1
        try:
            async with self._turn:
                yield
        finally:
            self._num_queued -= 1

    def release(self) -> None:
        """Somebody gave back what the first in the queue may want."""
        self._released.set()

    async def wait(self) -> None:
        """In one's turn: until it makes sense to try again. A release since the last wait counts."""
        try:
            async with asyncio.timeout(self._retry_s):
                await self._released.wait()
        except TimeoutError:
            pass
        self._released.clear()
