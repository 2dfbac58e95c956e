"""Requests that found every worker full wait here; router/waiting/fair_queue.py says whose turn it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from router.request.targets import Pace, out_of_time
from router.waiting.fair_queue import AGEING_S, Claim, FairQueue, Turn
from router.waiting.quota import EVERYBODY_ALIKE, Quota
from twostep.request_class import RequestClass

# Where it is not the workers that refuse, so many try at once: each is some round trips long.
_MAX_TRYING = 16


class Room:
    """While workers refuse, one tries at a time: whoever's turn it is, when something of this router's was released, else every `retry_s`.
    One that comes and is first tries at once, and so does the next one when somebody leaves: what is too much for one may not be for
    another. After many tries that succeeded, or where this router itself holds requests back, several are made at once.

        async with room.place(claim):
            await room.turn(claim)                       raises Refused once its target is lost
            while not (begun := await try_workers()):
                await room.again(claim, refused=...)
            room.took(claim)

    Requests that find room without waiting tell it by `took` too: turns are dealt by what everybody was given.
    """

    def __init__(self, quota: Quota = EVERYBODY_ALIKE, *, ageing_s: float = AGEING_S, retry_s: float = 0.1) -> None:
        self._retry_s = retry_s
        self._queue = FairQueue(quota, ageing_s=ageing_s)
        self._waiters: dict[Claim, asyncio.Future[None]] = {}
        self._trying: dict[Claim, Turn] = {}
        self._num_successes = 0  # since a worker refused
        self._released = False
        self._rest: asyncio.TimerHandle | None = None
        self._next: asyncio.Handle | None = None
        self._pace = Pace()

    @property
    def num_queued(self) -> int:
        """Requests waiting, those that try included. While there are any, newcomers go to the queue."""
        return len(self._queue) + len(self._trying)

    def queue_s(self, claim: Claim) -> float:
        """How long `claim`, which need not be here, will wait for its turn, as far as can be told."""
        return self._pace.seconds(self._queue.tokens_before(claim)) if len(self._queue) else 0.0

    def elsewhere(self, tokens: Mapping[tuple[RequestClass, str], int]) -> None:
        """What tenants were given by other routers since the last call."""
        self._queue.elsewhere(tokens)

    def took(self, claim: Claim) -> None:
        """Workers have accepted it."""
        now = time.monotonic()
        if self._trying.pop(claim, None) is None:
            self._queue.take(claim, now)
        else:
            self._num_successes += 1
        self._pace.served(claim.num_tokens, now, waiting=bool(self.num_queued))
        self._pass_on()

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
            if self._trying.pop(claim, None) is not None:
                self._queue.settle(claim, 0)
            if not self.num_queued:
                self._pace.ends()
            self._wake()

    async def turn(self, claim: Claim) -> None:
        """Until it is first and may try. Raises Refused once its target is lost."""
        if self._queue.first() is claim:
            self._end_rest()
        await self._wait(claim)

    async def again(self, claim: Claim, *, refused: bool) -> None:
        """After a try that failed: until it is its turn, and makes sense to try again. A release since the try began counts. `refused`: by
        workers."""
        self._queue.give_back(claim, self._trying.pop(claim))
        self._num_successes = 0 if refused else _MAX_TRYING
        if not self._released and self._rest is None:
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
        """Gives a turn to whoever is first. Where several may try at once, the next one's comes when this one has looked around: what holds
        it back, without any worker asked, holds back the others too, and choosing workers for each of them would cost the loop its time."""
        most = 1 if self._num_successes < _MAX_TRYING else _MAX_TRYING
        if self._next is not None or self._rest is not None or len(self._trying) >= most:
            return
        first = self._queue.first()
        waiter = None if first is None else self._waiters.get(first)
        if first is None or waiter is None or waiter.done():
            return
        self._trying[first] = self._queue.take(first, time.monotonic())
        self._released = False
        waiter.set_result(None)
        # Behind the one that was just woken.
        self._next = asyncio.get_running_loop().call_soon(self._after_that)

    def _after_that(self) -> None:
        self._next = None
        self._pass_on()
