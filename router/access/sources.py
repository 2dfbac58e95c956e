"""Where API keys are kept: a file, or Redis. Both are asked once a second, beside the requests and never on their way.

    twostep:v1:api-keys           hash: id -> the same JSON object
    twostep:v1:api-keys:signatures  hash: id -> what signs that object (twostep/cluster/signed.py)
    twostep:v1:api-keys:version   another one after every change, so that asking costs one word as long as there is none

A Redis that has lost its keys is not one whose keys were all deleted, which leaves the version: routers go on with those they know, and
write them back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from redis.asyncio import Redis

from twostep.cluster.hashes import hashes_in, read_hashes
from twostep.cluster.signed import API_KEYS, Signer
from twostep.errors import TwostepError, Unauthenticated, Unavailable
from twostep.keys.api_key_file import put_in_file, read_file, remove_from_file
from twostep.keys.api_keys import MAX_KEYS, BadKey, Key
from twostep.process.bounded_threads import BoundedThreads

log = logging.getLogger(__name__)

KEYS = "twostep:v1:api-keys"
SIGNATURES = "twostep:v1:api-keys:signatures"
VERSION = "twostep:v1:api-keys:version"
_MAX_FILE_BYTES = 64 << 20
# By which a file that has changed is known: when it was, its size, its number.
_Seen = tuple[int, int, int]


class KeySource(Protocol):
    """Raises TwostepError, OSError and RedisError where it cannot be reached or does not hold what it should."""

    async def read(self) -> Sequence[Key] | None:
        """Returns all keys; None: they are those of the last time."""
        ...

    async def put(self, key: Key) -> None:
        """Stores a new key, or another state of one that is there."""
        ...

    async def remove(self, key_id: str) -> bool:
        """Removes a key. False: it was not there."""
        ...


def source_of(path: Path | None, where: str, redis: Redis, secret: bytes) -> KeySource | None:
    """Returns the source that --api-keys-file or --api-keys names; None: without either everybody may ask."""
    return FileKeys(path) if path is not None else RedisKeys(redis, secret, adopt=where == "redis-adopt") if where else None


class FileKeys:
    """Everything but the constructor may block for the disk, and so runs in a thread of its own: one, however often a volume that hangs
    is asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = BoundedThreads(1, "api-keys")
        self._seen: _Seen | None = None

    async def read(self) -> Sequence[Key] | None:
        # Only what was received is done with: a broken file is complained of until it is mended, and one that came too late is read again.
        self._seen, keys = await self._thread.run(self._read, self._seen)
        return keys

    async def put(self, key: Key) -> None:
        await self._thread.run(put_in_file, self._path, key)

    async def remove(self, key_id: str) -> bool:
        return await self._thread.run(remove_from_file, self._path, key_id)

    def _read(self, before: _Seen | None) -> tuple[_Seen, Sequence[Key] | None]:
        stat = os.stat(self._path)
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == before:
            return seen, None
        if stat.st_size > _MAX_FILE_BYTES:
            raise BadKey(f"{self._path} has {stat.st_size} bytes; give a file of API keys, of {_MAX_FILE_BYTES} at most")
        return seen, read_file(self._path)


class RedisKeys:
    """Keeps the keys of one deployment: a key counts if somebody with the deployment's secret has signed it. `adopt`: those are signed that
    nobody has."""

    def __init__(self, redis: Redis, secret: bytes, *, adopt: bool = False) -> None:
        self._redis = redis
        self._signer = Signer(secret, API_KEYS)
        self._adopt = adopt
        self._version: bytes | str | None = None
        self._known: dict[str, Key] | None = None

    async def read(self) -> Sequence[Key] | None:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(VERSION)
        pipeline.exists(KEYS, SIGNATURES)
        version, num_there = await pipeline.execute()
        unchanged = self._known is not None and version == self._version
        if self._known and (version is None or (unchanged and num_there < 2)):
            known = self._known
            log.warning("Redis has lost its API keys; this router goes on with the %d that it knows, and writes them back", len(known))
            await self._write(known.values())
            return None
        if unchanged:
            return None
        # All change at once: what is read now is at least as new as the version.
        pipeline = self._redis.pipeline(transaction=True)
        read_hashes(pipeline, [KEYS, SIGNATURES], max_fields=MAX_KEYS + 1)
        records, signatures = hashes_in((await pipeline.execute())[0])
        if self._adopt and (added := await self._sign_all(records, signatures)):
            log.warning("%d API keys that nobody had signed are this deployment's from now on; go back to --api-keys redis", added)
            return None
        # A hundred thousand of them take a second.
        known = await asyncio.to_thread(_usable, records, signatures, self._signer)
        self._version, self._known = version, known
        return list(known.values())

    async def put(self, key: Key) -> None:
        await self._write([key])

    async def remove(self, key_id: str) -> bool:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(KEYS, key_id)
            pipe.hdel(SIGNATURES, key_id)
            pipe.set(VERSION, secrets.token_hex(8))
            return bool((await pipe.execute())[0])

    def _signature(self, key_id: str, record: str) -> str:
        """Returns what follows the record where it is signed."""
        return self._signer.sign_value(record, key_id)[len(record) :]

    async def _write(self, keys: Iterable[Key]) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            for key in keys:
                record = key.to_json()
                pipe.hset(KEYS, key.id, record)
                pipe.hset(SIGNATURES, key.id, self._signature(key.id, record))
            pipe.set(VERSION, secrets.token_hex(8))
            await pipe.execute()

    async def _sign_all(self, records: Mapping[bytes, bytes], signatures: Mapping[bytes, bytes]) -> int:
        """Returns how many it has signed."""
        unsigned = {name: record for name, record in records.items() if name not in signatures}
        async with self._redis.pipeline(transaction=True) as pipe:
            for name, record in unsigned.items():
                signature = self._signature(name.decode(errors="replace"), record.decode(errors="replace"))
                pipe.hsetnx(SIGNATURES, name.decode(errors="replace"), signature)
            if unsigned:
                pipe.set(VERSION, secrets.token_hex(8))
                await pipe.execute()
        return len(unsigned)


def _usable(records: Mapping[bytes, bytes], signatures: Mapping[bytes, bytes], signer: Signer) -> dict[str, Key]:
    if len(records) > MAX_KEYS:
        log.error("Redis has %d API keys or more, and %d of them are known here; revoke those that nobody uses", len(records), MAX_KEYS)
    known: dict[str, Key] = {}
    num_unsigned = 0
    for name, record in islice(records.items(), MAX_KEYS):
        try:
            key = Key.from_json(signer.read_value(record + signatures.get(name, b""), name.decode(errors="replace")))
        except Unauthenticated:
            num_unsigned += 1
            continue
        except BadKey as error:
            log.warning("the API key %.64r in Redis is passed over: %s", name, error.message)
            continue
        known[key.id] = key
    if num_unsigned:
        log.error(
            "%d API keys in Redis are not signed with this deployment's secret and open nothing: an older version wrote them, or somebody "
            "who should not; if all of them are yours, start one router with --api-keys redis-adopt, once (docs/access.md)",
            num_unsigned,
        )
    return known


def unreachable(error: Exception) -> TwostepError:
    """Returns what an operator is told who wanted to change something."""
    if isinstance(error, TwostepError):
        return error
    return Unavailable(f"the API keys cannot be reached ({why(error)}); look after their file or Redis, and repeat it")


def why(error: Exception) -> str:
    """Says what is wrong, for whatever a source raises."""
    if isinstance(error, TwostepError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
