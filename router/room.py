"""Requests that found every worker full wait here; router/fair_queue.py says whose turn it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from router.fair_queue import AGEING_S, Claim, FairQueue
from router.quota import EVERYBODY_ALIKE, Quota
from router.targets import Pace, out_of_time
from twostep.request_class import RequestClass


class Room:
    """Only the one whose turn it is tries; if it fails, whoever's turn it is then tries again when something of this router's was released,
    else after `retry_s`. One that comes and is first tries at once, and so does the next one when somebody leaves: what is too much for one
    may not be for another.

        async with room.place(claim):
            await room.turn(claim)                       raises Refused once its target is lost
            while not (begun := await try_workers()):
                await room.again(claim)
            room.took(claim)

    Requests that find room without waiting tell it by `took` too: turns are dealt by what everybody was given.
    """

    def __init__(self, quota: Quota = EVERYBODY_ALIKE, *, ageing_s: float = AGEING_S, retry_s: float = 0.1) -> None:
        self._retry_s = retry_s
        self._queue = FairQueue(quota, ageing_s=ageing_s)
        self._waiters: dict[Claim, asyncio.Future[None]] = {}
        self._trying: Claim | None = None
        self._released = False
        self._rest: asyncio.TimerHandle | None = None
        self._pace = Pace()

    @property
    def num_queued(self) -> int:
        """Requests waiting, the one whose turn it is included. While there are any, newcomers go to the queue."""
        return len(self._queue)

    def queue_s(self, claim: Claim) -> float:
        """How long `claim`, which need not be here, will wait for its turn, as far as can be told."""
        return self._pace.seconds(self._queue.tokens_before(claim)) if len(self._queue) else 0.0

    def elsewhere(self, tokens: Mapping[tuple[RequestClass, str], int]) -> None:
        """What tenants were given by other routers since the last call."""
        self._queue.elsewhere(tokens)

    def took(self, claim: Claim) -> None:
        """Workers have accepted it."""
        now = time.monotonic()
        self._queue.take(claim, now)
        self._pace.served(claim.num_tokens, now, waiting=bool(self.num_queued))

    def settle(self, claim: Claim, num_tokens: int) -> None:
        """One that was taken is over, and took so many tokens."""
        self._queue.settle(claim, num_tokens)

    @asynccontextmanager
    async def place(self, claim: Claim) -> AsyncIterator[None]:
        self._queue.join(claim)
        self._pace.begins(time.monotonic())
        try:
            yield
        finally:
            self._queue.leave(claim)
            if not self.num_queued:
                self._pace.ends()
            if self._trying is claim:
                self._trying = None
            self._wake()

    async def turn(self, claim: Claim) -> None:
        """Until it is first and nobody else is trying. Raises Refused once its target is lost."""
        if self._queue.first() is claim:
            self._end_rest()
        await self._wait(claim)

    async def again(self, claim: Claim) -> None:
        """After a try that failed: until it is its turn, and makes sense to try again. A release since the try began counts."""
        assert self._trying is claim, "who tries has the turn"
        self._trying = None
        if not self._released:
            self._rest = asyncio.get_running_loop().call_later(self._retry_s, self._wake)
        await self._wait(claim)

    def release(self) -> None:
        """Somebody gave back what the first in the queue may want."""
        self._released = True
        if self._rest is not None:
            self._wake()

    async def _wait(self, claim: Claim) -> None:
        waiter = self._waiters[claim] = asyncio.get_running_loop().create_future()
        self._pass_on()
        try:
            left_s = None if claim.lapses is None else claim.lapses - time.monotonic()
            async with asyncio.timeout(left_s):
                await waiter
        except TimeoutError:
            raise out_of_time(self.queue_s(claim)) from None
        finally:
            self._waiters.pop(claim, None)

    def _wake(self) -> None:
        self._end_rest()
        self._pass_on()

    def _end_rest(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _pass_on(self) -> None:
        """Gives the turn to whoever is first, if nobody has it."""
        if self._trying is not None or self._rest is not None:
            return
        first = self._queue.first()
        waiter = None if first is None else self._waiters.get(first)
        if waiter is not None and not waiter.done():
            self._trying, self._released = first, False
            waiter.set_result(None)
