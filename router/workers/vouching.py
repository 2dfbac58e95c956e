"""Asks workers themselves whether they live, for the registry: where Redis answers and says nothing of them, or what it says is doubtful.

A worker's record may be missing because Redis takes no heartbeats (its memory or disk is full, it has become a replica), and it may be an
old one that somebody has put back. A process that was killed refuses connections at once; one that is frozen does not answer in time; what
has taken its address has another name or epoch, or not the secret.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection

import grpc
import grpc.aio

from router.workers.prefix_index import WorkerLife
from twostep.cluster.records import WorkerRecord
from twostep.keys.secret import CHALLENGE_BYTES, is_vouched
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 3.0
# Between two questions to one worker.
_EVERY_S = 1.0
# Asked at the same time; the others' turn comes with a later poll.
_MAX_ASKED = 64

Lives = Callable[[WorkerRecord], Awaitable[bool]]


class Vouching:
    """`channel_of` gives the channel to a life that is used already, or None; `open_to` makes one."""

    def __init__(
        self,
        secret: bytes,
        channel_of: Callable[[WorkerLife], grpc.aio.Channel | None],
        open_to: Callable[[WorkerRecord], grpc.aio.Channel],
    ) -> None:
        self._secret = secret
        self._channel_of = channel_of
        self._open_to = open_to

    async def lives(self, record: WorkerRecord) -> bool:
        """Says whether the life that the record names answers at its address. Takes a few seconds at most, and never raises for
        what that does."""
        channel = self._channel_of(WorkerLife.of(record))
        if channel is not None:
            return await self._ask(channel, record)
        async with self._open_to(record) as made:
            return await self._ask(made, record)

    async def _ask(self, channel: grpc.aio.Channel, record: WorkerRecord) -> bool:
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        request = worker_pb2.WorkerStatsRequest(challenge=challenge)
        try:
            stats: worker_pb2.WorkerStats = await worker_pb2_grpc.WorkerStub(channel).Stats(request, timeout=_TIMEOUT_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return False
        return is_vouched(stats.vouched, self._secret, challenge, worker_id=record.worker_id, address=record.address, epoch=record.epoch)


class Witnesses:
    """`lives` answers in a few seconds and raises nothing. `clock` in seconds, does not go back."""

    def __init__(self, lives: Lives, clock: Callable[[], float]) -> None:
        self._lives = lives
        self._clock = clock
        self._heard: dict[WorkerLife, float] = {}
        self._asked: dict[WorkerLife, float] = {}
        self._tasks: dict[WorkerLife, asyncio.Task[None]] = {}

    def heard_at(self, life: WorkerLife) -> float:
        """Returns when its last answered question was asked; long ago if there is none."""
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
