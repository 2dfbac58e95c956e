"""Asks workers themselves whether they live, for the registry: where Redis answers and says nothing of them, or what it says is doubtful.

A worker's record may be missing because Redis takes no heartbeats (its memory or disk is full, it has become a replica), and it may be an
old one that somebody has put back. A process that was killed refuses connections at once; one that is frozen does not answer in time; what
has taken its address has another name or epoch, or not the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import grpc
import grpc.aio

from router.workers.prefix_index import WorkerLife
from twostep.cluster.records import WorkerRecord
from twostep.keys.vouch import CHALLENGE_BYTES, is_vouched
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 3.0


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
        """Whether the life that the record names answers at its address. Takes a few seconds at most; never raises for what it does."""
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
