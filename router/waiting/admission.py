"""How much the router takes on: requests served at once, prompt tokens among them, requests that wait, and how many of each may be one
tenant's. Whose turn it is says router/waiting/fair_queue.py."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from router.request.targets import Pace, Reason, Refused, out_of_time, retry_after
from router.waiting.fair_queue import AGEING_S, Claim, FairQueue
from router.waiting.quota import EVERYBODY_ALIKE, Quota
from twostep.errors import InvalidRequest, Unavailable
from twostep.request_class import RequestClass

# A client that finds the queue full is told to come back when so much of it has gone.
_ROOM_SHARE = 0.1


@dataclass(slots=True, eq=False)
class _Waiter:
    num_tokens: int
    admitted: asyncio.Future[None]


def _nothing(request_class: RequestClass, tenant: str, num_tokens: int) -> None:
    pass


class Admission:
    def __init__(
        self,
        *,
        max_inflight: int,
        max_waiting: int,
        max_prompt_tokens: int,
        quota: Quota = EVERYBODY_ALIKE,
        ageing_s: float = AGEING_S,
        on_charge: Callable[[RequestClass, str, int], None] = _nothing,
    ) -> None:
        """`on_charge` is told what tenants are given, and of corrections to it."""
        self._max_inflight = max_inflight
        self._max_waiting = max_waiting
        self._max_prompt_tokens = max_prompt_tokens
        self._quota = quota
        self._on_charge = on_charge
        self._num_inflight = 0
        self._num_tokens = 0
        self._inflight_of: Counter[str] = Counter()
        self._queue = FairQueue(quota, ageing_s=ageing_s)
        self._waiters: dict[Claim, _Waiter] = {}
        self._pace = Pace()
        self._closed = False

    @property
    def num_inflight(self) -> int:
        return self._num_inflight

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def close(self) -> None:
        """From now on nobody is admitted; those who wait get Unavailable."""
        self._closed = True
        for claim in list(self._waiters):
            self._send_away(claim, Unavailable("this router is draining; repeat the request on another one"))

    def elsewhere(self, tokens: Mapping[tuple[RequestClass, str], int]) -> None:
        """What tenants were given by other routers since the last call."""
        self._queue.elsewhere(tokens)

    @asynccontextmanager
    async def slot(self, claim: Claim, num_tokens: int, used: Callable[[], int] | None = None) -> AsyncIterator[None]:
        """Waits for its turn, then holds a place for a prompt of `num_tokens`. `used` says at the end how many tokens it really took.
        Raises Refused (too many wait already, or its target is lost), Unavailable (draining), InvalidRequest (it could never be let in)."""
        await self._enter(claim, num_tokens)
        try:
            yield
        finally:
            if used is not None:
                self._settle(claim, used())
            self._leave(claim, num_tokens)

    async def _enter(self, claim: Claim, num_tokens: int) -> None:
        if self._closed:
            raise Unavailable("this router is draining; repeat the request on another one")
        if num_tokens > self._max_prompt_tokens:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens and the router takes {self._max_prompt_tokens} in all; "
                "shorten it, or raise --max-inflight"
            )
        waiter = self._waiters[claim] = _Waiter(num_tokens, asyncio.get_running_loop().create_future())
        self._queue.join(claim)
        self._admit_waiting()
        try:
            if not waiter.admitted.done():
                self._check_bounds(claim)
                self._pace.begins(time.monotonic())
                await self._wait(claim, waiter)
        except BaseException:
            admitted = waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None
            if admitted:
                # Admitted and cancelled in the same turn of the loop: give the place on.
                self._settle(claim, 0)
                self._leave(claim, num_tokens)
            else:
                self._forget(claim)
                self._admit_waiting()
            raise

    async def _wait(self, claim: Claim, waiter: _Waiter) -> None:
        if claim.lapses is None:
            await waiter.admitted
            return
        left_s = claim.lapses - time.monotonic()
        queue_s = self._pace.seconds(self._queue.tokens_before(claim))
        if queue_s > left_s:
            raise out_of_time(queue_s - left_s)
        try:
            async with asyncio.timeout(left_s):
                await waiter.admitted
        except TimeoutError:
            raise out_of_time(self._pace.seconds(self._queue.tokens_before(claim))) from None

    def _check_bounds(self, claim: Claim) -> None:
        """Raises Refused, or sends somebody else away, if too many wait."""
        mine = self._queue.num_waiting(claim.tenant)
        if 0 < self._quota.max_waiting < mine:
            raise self._too_many(
                f"{mine - 1} requests of tenant {claim.tenant!r} wait already; repeat later, or raise --tenant-max-waiting"
            )
        if len(self._queue) <= self._max_waiting:
            return
        message = f"{self._num_inflight} requests are being served and {self._max_waiting} wait; repeat later, or raise --max-waiting"
        self._queue.leave(claim)
        other = self._queue.gives_way(claim)
        if other is None:
            raise self._too_many(message)
        self._queue.join(claim)
        self._send_away(other, self._too_many(message))

    def _too_many(self, message: str) -> Refused:
        tokens = sum(claim.num_tokens for claim in self._queue)
        return Refused(Reason.BOUNDED, message, retry_after_s=retry_after(self._pace.seconds(_ROOM_SHARE * tokens)))

    def _send_away(self, claim: Claim, error: Exception) -> None:
        waiter = self._waiters[claim]
        self._forget(claim)
        if not waiter.admitted.done():
            waiter.admitted.set_exception(error)

    def _forget(self, claim: Claim) -> None:
        self._queue.leave(claim)
        self._waiters.pop(claim, None)
        if not self._waiters:
            self._pace.ends()

    def _settle(self, claim: Claim, num_tokens: int) -> None:
        self._queue.settle(claim, num_tokens)
        self._on_charge(claim.request_class, claim.tenant, num_tokens - claim.num_tokens)

    def _leave(self, claim: Claim, num_tokens: int) -> None:
        self._num_inflight -= 1
        self._num_tokens -= num_tokens
        self._inflight_of[claim.tenant] -= 1
        if not self._inflight_of[claim.tenant]:
            del self._inflight_of[claim.tenant]
        self._admit_waiting()

    def _may_go(self, tenant: str) -> bool:
        return not 0 < self._quota.max_inflight <= self._inflight_of[tenant]

    def _admit_waiting(self) -> None:
        while self._num_inflight < self._max_inflight:
            claim = self._queue.first(self._may_go)
            if claim is None or self._num_tokens + self._waiters[claim].num_tokens > self._max_prompt_tokens:
                # A prompt too large for now is waited for: smaller ones would keep it out for ever.
                return
            waiter, now = self._waiters[claim], time.monotonic()
            if waiter.admitted.done():
                # Cancelled, and not yet out of here.
                self._forget(claim)
                continue
            self._queue.take(claim, now)
            self._pace.served(claim.num_tokens, now, waiting=len(self._waiters) > 1)
            self._forget(claim)
            self._on_charge(claim.request_class, claim.tenant, claim.num_tokens)
            self._num_inflight += 1
            self._num_tokens += waiter.num_tokens
            self._inflight_of[claim.tenant] += 1
            waiter.admitted.set_result(None)
