"""The two queues that a request stands in: Admission bounds what is served at once, and behind it those that found every worker full wait
in the WorkerQueue. router/waiting/fair_queue.py says whose turn it is in either."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from router.request.targets import Reason, Refused, out_of_time, retry_after
from router.waiting.fair_queue import AGEING_S, EVERYBODY_ALIKE, FairQueue, QueueEntry, QueueTurn, Quota
from twostep.errors import InvalidRequest, Unavailable
from twostep.request_class import RequestClass

# Over how long a queue's rate is averaged, of the time in which requests wait.
_RATE_S = 5.0
# A client that finds the queue full is asked to come back when so much of it has gone.
_FREED_SHARE = 0.1
# Where it is not the workers that refuse, so many try at once: each try is some round trips long.
_MAX_TRYING = 16


class QueueRate:
    """Measures how fast a queue is being served, in tokens a second, learnt while requests wait. Pure: `now` is an argument."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def served(self, num_tokens: int, now: float, *, waiting: bool) -> None:
        """Notes that a turn was given. `waiting`: others still wait, so that the time until the next turn counts."""
        if self._since is not None:
            span = max(0.0, now - self._since)
            keep = math.exp(-span / _RATE_S)
            self._tokens = self._tokens * keep + num_tokens
            self._seconds = self._seconds * keep + span
        self._since = now if waiting else None

    def begins(self, now: float) -> None:
        """Notes that a request waits, where none did."""
        if self._since is None:
            self._since = now

    def ends(self) -> None:
        """Notes that no request waits any more."""
        self._since = None

    def seconds(self, num_tokens: float) -> float:
        """Predicts how long so many tokens will take. 0 while nothing is known: then no request is refused for it."""
        return num_tokens * self._seconds / self._tokens if self._tokens > 0.0 else 0.0


class _RequestQueue:
    """Entries of a FairQueue, each with the future that its request waits for."""

    def __init__(self, quota: Quota, ageing_s: float) -> None:
        self._queue = FairQueue(quota, ageing_s=ageing_s)
        self._waiting: dict[QueueEntry, asyncio.Future[None]] = {}
        self._rate = QueueRate()

    def elsewhere(self, tokens: Mapping[tuple[RequestClass, str], int]) -> None:
        """Takes note of what tenants were given by other routers since the last call."""
        self._queue.elsewhere(tokens)

    def queue_s(self, entry: QueueEntry) -> float:
        """Predicts how long `entry`, which need not be here, will wait for its turn."""
        return self._rate.seconds(self._queue.tokens_before(entry)) if len(self._queue) else 0.0

    async def _wait(self, entry: QueueEntry, its_turn: asyncio.Future[None]) -> None:
        """Raises Refused once a turn would be of no use."""
        try:
            async with asyncio.timeout(None if entry.lapses is None else entry.lapses - time.monotonic()):
                await its_turn
        except TimeoutError:
            raise out_of_time(self.queue_s(entry)) from None


class Admission(_RequestQueue):
    """Bounds the requests served at once, the prompt tokens among them, the requests that wait, and how many of each are one tenant's."""

    def __init__(
        self,
        *,
        max_inflight: int,
        max_waiting: int,
        max_prompt_tokens: int,
        quota: Quota = EVERYBODY_ALIKE,
        ageing_s: float = AGEING_S,
        on_charge: Callable[[RequestClass, str, int], None] = lambda request_class, tenant, num_tokens: None,
    ) -> None:
        """`on_charge` gets what tenants are given, and corrections to it."""
        super().__init__(quota, ageing_s)
        self._max_inflight = max_inflight
        self._max_waiting = max_waiting
        self._max_prompt_tokens = max_prompt_tokens
        self._quota = quota
        self._on_charge = on_charge
        self.num_inflight = 0
        self._num_tokens = 0
        self._inflight_of: Counter[str] = Counter()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """Admits no request from now on; those that wait get Unavailable."""
        self._closed = True
        for entry in list(self._waiting):
            self._send_away(entry, Unavailable("this router is draining; repeat the request on another one"))

    @asynccontextmanager
    async def slot(self, entry: QueueEntry, used: Callable[[], int] | None = None) -> AsyncIterator[None]:
        """Waits for its turn, then holds a place. `used` says at the end how many tokens it really took.
        Raises Refused (too many wait already, or its target is lost), Unavailable (draining), InvalidRequest (it could never be let in)."""
        await self._enter(entry)
        try:
            yield
        finally:
            if used is not None:
                self._settle(entry, used())
            self._leave(entry)

    async def _enter(self, entry: QueueEntry) -> None:
        if self._closed:
            raise Unavailable("this router is draining; repeat the request on another one")
        if entry.num_prompt_tokens > self._max_prompt_tokens:
            raise InvalidRequest(
                f"the prompt has {entry.num_prompt_tokens} tokens and the router takes {self._max_prompt_tokens} in all; "
                "shorten it, or raise --max-inflight"
            )
        admitted = self._waiting[entry] = asyncio.get_running_loop().create_future()
        self._queue.join(entry)
        self._admit()
        try:
            if not admitted.done():
                self._check_bounds(entry)
                now = time.monotonic()
                self._rate.begins(now)
                if entry.lapses is not None and (late_s := now + self.queue_s(entry) - entry.lapses) > 0.0:
                    raise out_of_time(late_s)
                await self._wait(entry, admitted)
        except BaseException:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                # Admitted and cancelled in the same turn of the loop: give the place on.
                self._settle(entry, 0)
                self._leave(entry)
            else:
                self._forget(entry)
                self._admit()
            raise

    def _check_bounds(self, entry: QueueEntry) -> None:
        """Raises Refused, or sends another one away, if too many wait."""
        mine = self._queue.num_waiting(entry.tenant)
        if 0 < self._quota.max_waiting < mine:
            raise self._too_many(
                f"{mine - 1} requests of tenant {entry.tenant!r} wait already; repeat later, or raise --tenant-max-waiting"
            )
        if len(self._queue) <= self._max_waiting:
            return
        message = f"{self.num_inflight} requests are being served and {self._max_waiting} wait; repeat later, or raise --max-waiting"
        self._queue.leave(entry)
        other = self._queue.gives_way(entry)
        if other is None:
            raise self._too_many(message)
        self._queue.join(entry)
        self._send_away(other, self._too_many(message))

    def _too_many(self, message: str) -> Refused:
        tokens = sum(entry.num_tokens for entry in self._queue)
        return Refused(Reason.BOUNDED, message, retry_after_s=retry_after(self._rate.seconds(_FREED_SHARE * tokens)))

    def _send_away(self, entry: QueueEntry, error: Exception) -> None:
        admitted = self._waiting[entry]
        self._forget(entry)
        if not admitted.done():
            admitted.set_exception(error)

    def _forget(self, entry: QueueEntry) -> None:
        self._queue.leave(entry)
        self._waiting.pop(entry, None)
        if not self._waiting:
            self._rate.ends()

    def _settle(self, entry: QueueEntry, num_tokens: int) -> None:
        self._queue.settle(entry, num_tokens)
        self._on_charge(entry.request_class, entry.tenant, num_tokens - entry.num_tokens)

    def _leave(self, entry: QueueEntry) -> None:
        self.num_inflight -= 1
        self._num_tokens -= entry.num_prompt_tokens
        self._inflight_of[entry.tenant] -= 1
        if not self._inflight_of[entry.tenant]:
            del self._inflight_of[entry.tenant]
        self._admit()

    def _may_go(self, tenant: str) -> bool:
        return not 0 < self._quota.max_inflight <= self._inflight_of[tenant]

    def _admit(self) -> None:
        while self.num_inflight < self._max_inflight:
            entry = self._queue.first(self._may_go)
            if entry is None or self._num_tokens + entry.num_prompt_tokens > self._max_prompt_tokens:
                # A prompt too large for now is waited for: smaller ones would keep it out for ever.
                return
            admitted, now = self._waiting[entry], time.monotonic()
            if admitted.done():
                # Cancelled, and not yet out of here.
                self._forget(entry)
                continue
            self._queue.take(entry, now)
            self._rate.served(entry.num_tokens, now, waiting=len(self._waiting) > 1)
            self._forget(entry)
            self._on_charge(entry.request_class, entry.tenant, entry.num_tokens)
            self.num_inflight += 1
            self._num_tokens += entry.num_prompt_tokens
            self._inflight_of[entry.tenant] += 1
            admitted.set_result(None)


class WorkerQueue(_RequestQueue):
    """Holds admitted requests that found every worker full. While workers refuse, one tries at a time: the one whose turn it is, when
    something of this router's was released, else every `retry_s`. One that comes and is first tries at once, and so does the next one
    when one leaves: what is too much for one may not be for another. After many tries that succeeded, or where this router itself holds
    requests back, several are made at once.

        async with queue.place(entry):
            await queue.turn(entry)                       raises Refused once its target is lost
            while not (begun := await try_workers()):
                await queue.again(entry, refused=...)
            queue.took(entry)

    Requests that find workers without waiting call `took` too: turns are dealt by what all were given.
    """

    def __init__(self, quota: Quota = EVERYBODY_ALIKE, *, ageing_s: float = AGEING_S, retry_s: float = 0.1) -> None:
        super().__init__(quota, ageing_s)
        self._retry_s = retry_s
        self._trying: dict[QueueEntry, QueueTurn] = {}
        self._num_successes = 0  # since a worker refused
        self._released = False
        self._rest: asyncio.TimerHandle | None = None
        self._next: asyncio.Handle | None = None

    @property
    def num_queued(self) -> int:
        """Requests waiting, those that try included. While there are any, newcomers go to the queue."""
        return len(self._queue) + len(self._trying)

    def took(self, entry: QueueEntry) -> None:
        """Notes that workers have accepted it."""
        now = time.monotonic()
        if self._trying.pop(entry, None) is None:
            self._queue.take(entry, now)
        else:
            self._num_successes += 1
        self._rate.served(entry.num_tokens, now, waiting=bool(self.num_queued))
        self._pass_on()

    def settle(self, entry: QueueEntry, num_tokens: int) -> None:
        """Notes that one that was taken is over, and took so many tokens."""
        self._queue.settle(entry, num_tokens)

    @asynccontextmanager
    async def place(self, entry: QueueEntry) -> AsyncIterator[None]:
        self._queue.join(entry)
        self._rate.begins(time.monotonic())
        try:
            yield
        finally:
            self._queue.leave(entry)
            if self._trying.pop(entry, None) is not None:
                self._queue.settle(entry, 0)
            if not self.num_queued:
                self._rate.ends()
            self._wake()

    async def turn(self, entry: QueueEntry) -> None:
        """Waits until it is first and may try. Raises Refused once its target is lost."""
        if self._queue.first() is entry:
            self._end_rest()
        await self._until_turn(entry)

    async def again(self, entry: QueueEntry, *, refused: bool) -> None:
        """Waits after a try that failed until it is its turn, and makes sense to try again. A release since the try began counts.
        `refused`: by workers."""
        self._queue.give_back(entry, self._trying.pop(entry))
        self._num_successes = 0 if refused else _MAX_TRYING
        if not self._released and self._rest is None:
            self._rest = asyncio.get_running_loop().call_later(self._retry_s, self._wake)
        await self._until_turn(entry)

    def release(self) -> None:
        """Wakes the queue: something was given back that the first in it may want."""
        self._released = True
        if self._rest is not None:
            self._wake()

    async def _until_turn(self, entry: QueueEntry) -> None:
        its_turn = self._waiting[entry] = asyncio.get_running_loop().create_future()
        self._pass_on()
        try:
            await self._wait(entry, its_turn)
        finally:
            self._waiting.pop(entry, None)

    def _wake(self) -> None:
        self._end_rest()
        self._pass_on()

    def _end_rest(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _pass_on(self) -> None:
        """Gives the first one its turn. Where several may try at once, the next one's comes when this one has looked around: what holds it
        back, without any worker asked, holds back the others too, and choosing workers for each of them would cost the loop its time."""
        most = 1 if self._num_successes < _MAX_TRYING else _MAX_TRYING
        if self._next is not None or self._rest is not None or len(self._trying) >= most:
            return
        first = self._queue.first()
        its_turn = None if first is None else self._waiting.get(first)
        if first is None or its_turn is None or its_turn.done():
            return
        self._trying[first] = self._queue.take(first, time.monotonic())
        self._released = False
        its_turn.set_result(None)
        # Behind the one that was just woken.
        self._next = asyncio.get_running_loop().call_soon(self._after_that)

    def _after_that(self) -> None:
        self._next = None
        self._pass_on()
