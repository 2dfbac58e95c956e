"""Deals the few places where a router works for its callers (processes, threads) among those callers.

question ─ too many wait? ─┬─ yes ─ its caller has most of them? ─┬─ yes ──▶ refused
                           │                                      └─ no ───▶ the last of the caller who has most is refused
                           └─ no ── the caller's turn, and it holds fewer places than one may ──▶ a place, until it is over

Callers take turns by the processor's time that they have used (router/waiting/fair_queue.py): one whose questions take long waits longer
for the next one, and delays nobody else by more than the questions that are being answered.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from router.waiting.fair_queue import EVERYBODY_ALIKE, FairQueue, QueueEntry, Quota
from twostep.errors import ResourceExhausted
from twostep.request_class import RequestClass

# What a question is charged until it is known what it took.
_GUESS_S = 0.01
# Seconds of the processor are charged in these.
_UNITS_PER_S = 1e6
_RETRY_S = 1.0


class Turn:
    """A place that is held. over() must be called once."""

    def __init__(self, turns: Turns, entry: QueueEntry) -> None:
        self._turns, self._entry = turns, entry

    def over(self, cpu_s: float) -> None:
        """Gives the place on. `cpu_s`: what the answer took of the processor."""
        self._turns.leave(self._entry, cpu_s)


class Turns:
    """Belongs to one event loop."""

    def __init__(self, what: str, *, most: int, at_once: int, each: int, quota: Quota = EVERYBODY_ALIKE) -> None:
        """`what`: those who wait, as a message says it. `most`: how many may wait or be answered, half of them of one caller; `at_once`:
        how many are answered, `each` of them of one caller."""
        self._what, self._most, self._at_once, self._each = what, most, at_once, each
        self._queue = FairQueue(quota)
        self._waiting: dict[QueueEntry, asyncio.Future[None]] = {}
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        """Returns how many wait or are answered."""
        return len(self._waiting) + self._held.total()

    async def take(self, caller: str) -> Turn:
        """Waits for a turn. Raises ResourceExhausted."""
        now = time.monotonic()
        units = round(_GUESS_S * _UNITS_PER_S)
        entry = QueueEntry(request_class=RequestClass.STANDARD, tenant=caller, num_tokens=units, arrived=now, due=now)
        self._make_room(entry)
        its_turn = self._waiting[entry] = asyncio.get_running_loop().create_future()
        self._queue.join(entry)
        self._pass_on()
        try:
            await its_turn
        except BaseException:
            if self._waiting.pop(entry, None) is not None:
                self._queue.leave(entry)
            elif its_turn.done() and not its_turn.cancelled() and its_turn.exception() is None:
                # It got its turn and was cancelled before it knew.
                self.leave(entry, 0.0)
            raise
        return Turn(self, entry)

    def leave(self, entry: QueueEntry, cpu_s: float) -> None:
        """Charges the caller, and gives the place on. See Turn.over()."""
        self._queue.settle(entry, round(cpu_s * _UNITS_PER_S))
        self._held[entry.tenant] -= 1
        if not self._held[entry.tenant]:
            del self._held[entry.tenant]
        self._pass_on()

    def _make_room(self, entry: QueueEntry) -> None:
        """Raises ResourceExhausted, or sends another one away."""
        mine = self._queue.num_waiting(entry.tenant) + self._held[entry.tenant]
        if mine >= max(1, self._most // 2):
            raise ResourceExhausted(f"{mine} of your {self._what}; repeat later", retry_after_s=_RETRY_S)
        if len(self) < self._most:
            return
        full = ResourceExhausted(f"{len(self)} {self._what}; repeat later", retry_after_s=_RETRY_S)
        other = self._queue.gives_way(entry)
        if other is None:
            raise full
        self._queue.leave(other)
        its_turn = self._waiting.pop(other)
        if not its_turn.done():
            its_turn.set_exception(full)

    def _pass_on(self) -> None:
        while self._held.total() < self._at_once:
            entry = self._queue.first(lambda caller: self._held[caller] < self._each)
            if entry is None:
                return
            its_turn = self._waiting.pop(entry)
            if its_turn.done():
                # Cancelled, and not yet out of here.
                self._queue.leave(entry)
                continue
            self._queue.take(entry, time.monotonic())
            self._held[entry.tenant] += 1
            its_turn.set_result(None)
