"""How much the router takes on: requests served at once, prompt tokens among them, requests that wait. First come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from twostep.errors import InvalidRequest, ResourceExhausted, Unavailable


@dataclass(slots=True, eq=False)
class _Waiter:
    num_tokens: int
    admitted: asyncio.Future[None]


class Admission:
    def __init__(self, *, max_inflight: int, max_waiting: int, max_prompt_tokens: int) -> None:
        self._max_inflight = max_inflight
        self._max_waiting = max_waiting
        self._max_prompt_tokens = max_prompt_tokens
        self._num_inflight = 0
        self._num_tokens = 0
        self._waiting: deque[_Waiter] = deque()
        self._closed = False

    @property
    def num_inflight(self) -> int:
        return self._num_inflight

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """From now on nobody is admitted; those who wait get Unavailable."""
        self._closed = True
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.admitted.done():
                waiter.admitted.set_exception(Unavailable("this router is draining; repeat the request on another one"))

    @asynccontextmanager
    async def slot(self, num_tokens: int) -> AsyncIterator[None]:
        """Waits for its turn, then holds a place for a prompt of `num_tokens`. Raises ResourceExhausted (too many wait already),
        Unavailable (draining), InvalidRequest (it could never be let in)."""
        await self._enter(num_tokens)
        try:
            yield
        finally:
            self._num_inflight -= 1
            self._num_tokens -= num_tokens
            self._admit_waiting()

    async def _enter(self, num_tokens: int) -> None:
        if self._closed:
            raise Unavailable("this router is draining; repeat the request on another one")
        if num_tokens > self._max_prompt_tokens:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens and the router takes {self._max_prompt_tokens} in all; "
                "shorten it, or raise --max-inflight-prompt-tokens"
            )
        if not self._waiting and self._fits(num_tokens):
            self._take(num_tokens)
            return
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhausted(
                f"{self._num_inflight} requests are being served and {len(self._waiting)} wait; repeat later, or raise --max-waiting"
            )
        waiter = _Waiter(num_tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
                # Admitted and cancelled in the same turn of the loop: give the place on.
                self._num_inflight -= 1
                self._num_tokens -= num_tokens
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            self._admit_waiting()
            raise

    def _fits(self, num_tokens: int) -> bool:
        return self._num_inflight < self._max_inflight and self._num_tokens + num_tokens <= self._max_prompt_tokens

    def _take(self, num_tokens: int) -> None:
        self._num_inflight += 1
        self._num_tokens += num_tokens

    def _admit_waiting(self) -> None:
        while self._waiting and self._fits(self._waiting[0].num_tokens):
            waiter = self._waiting.popleft()
            if waiter.admitted.done():
                continue
            self._take(waiter.num_tokens)
            waiter.admitted.set_result(None)
