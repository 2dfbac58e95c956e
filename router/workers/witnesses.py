"""Whom the registry has asked whether they live, and who has answered: beside its polls, each a second apart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from router.workers.prefix_index import WorkerLife
from twostep.cluster.records import WorkerRecord

_EVERY_S = 1.0
# Asked at the same time; the others' turn comes with a later poll.
_MAX_ASKED = 64

Lives = Callable[[WorkerRecord], Awaitable[bool]]


class Witnesses:
    """`lives` answers in a few seconds and raises nothing. `clock` in seconds, does not go back."""

    def __init__(self, lives: Lives, clock: Callable[[], float]) -> None:
        self._lives = lives
        self._clock = clock
        self._heard: dict[WorkerLife, float] = {}
        self._asked: dict[WorkerLife, float] = {}
        self._tasks: dict[WorkerLife, asyncio.Task[None]] = {}

    def heard_at(self, life: WorkerLife) -> float:
        """When it was asked whose answer came last; long ago if none has."""
        return self._heard.get(life, -float("inf"))

    def ask(self, record: WorkerRecord) -> None:
        """Returns at once."""
        life, now = WorkerLife.of(record), self._clock()
        if life in self._tasks or len(self._tasks) >= _MAX_ASKED or now - self._asked.get(life, -float("inf")) < _EVERY_S:
            return
        self._asked[life] = now
        task = asyncio.create_task(self._ask(record, life, now))
        self._tasks[life] = task
        task.add_done_callback(lambda _: self._tasks.pop(life, None))

    def forget_all_but(self, lives: Collection[WorkerLife]) -> None:
        for memory in (self._heard, self._asked):
            for life in [known for known in memory if known not in lives]:
                del memory[life]

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, record: WorkerRecord, life: WorkerLife, now: float) -> None:
        if await self._lives(record):
            self._heard[life] = now
