"""Looks up the prefill workers in Redis, so that the paths from them are tried before their first ticket comes."""

from __future__ import annotations

import asyncio
import logging

from redis.exceptions import RedisError

from decode_worker.paths import Paths
from decode_worker.peers import Source
from twostep import __version__
from twostep.cluster.connection import connect
from twostep.cluster.look import look
from twostep.cluster.records import HEARTBEAT_S, WorkerRecord
from twostep.cluster.signed import RECORDS, Signer
from twostep.errors import InvalidRequest, Unauthenticated
from twostep.version_skew import together

log = logging.getLogger(__name__)

_EVERY_S = 2 * HEARTBEAT_S
# Records that were not there for so many looks in a row are of workers that are gone: one look may fall between two beats.
_MISSED = 3


class Discovery:
    """start(), then it looks by itself until close(). Without Redis only tickets say which workers there are."""

    def __init__(self, redis_url: str, paths: Paths, *, secret: bytes) -> None:
        self._redis = connect(redis_url)
        self._paths = paths
        self._signer = Signer(secret, RECORDS)
        self._missed: dict[tuple[str, int], int] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_forever(), name="discovery")

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self._redis.aclose()

    async def _look_forever(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        # The Redis client can take a cancellation for a lost connection: then it is up to us to remember it.
        while not task.cancelling():
            try:
                await self._look()
            except (RedisError, OSError) as error:
                log.debug("prefill workers could not be looked up: %s", error)
            await asyncio.sleep(_EVERY_S)

    async def _look(self) -> None:
        texts = (await look(self._redis, [worker_id for worker_id, _ in self._missed])).records.values()
        found = {(r.worker_id, r.epoch): r for text in texts if (r := self._read(text)) is not None}
        ours = {key: r for key, r in found.items() if r.role == "prefill" and r.address}
        # The others are no sources: their workers would refuse to be asked.
        ours = {key: r for key, r in ours.items() if together(__version__, r.version)}
        for record in ours.values():
            self._paths.learn(Source(worker_id=record.worker_id, epoch=record.epoch, address=record.address))
        self._missed = {key: count + 1 for key, count in self._missed.items()} | dict.fromkeys(ours, 0)
        gone = [key for key, count in self._missed.items() if count >= _MISSED]
        for key in gone:
            del self._missed[key]
        await self._paths.forget(gone)

    def _read(self, text: bytes) -> WorkerRecord | None:
        """None: of another deployment or version, or forged."""
        try:
            return WorkerRecord.from_json(self._signer.read_object(text))
        except (Unauthenticated, InvalidRequest):
            return None
