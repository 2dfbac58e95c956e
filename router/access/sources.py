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
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Protocol, cast

from redis.asyncio import Redis

from twostep.cluster.hashes import hashes_in, read_hashes
from twostep.cluster.signed import API_KEYS, Signer
from twostep.errors import TwostepError, Unauthenticated, Unavailable
from twostep.keys.api_key_file import put_in_file, read_file, remove_from_file
from twostep.keys.api_keys import MAX_KEYS, BadKey, Key
from twostep.keys.secret import DeploymentSecret
from twostep.process.bounded_threads import BoundedThreads

log = logging.getLogger(__name__)

KEYS = "twostep:v1:api-keys"
SIGNATURES = "twostep:v1:api-keys:signatures"
VERSION = "twostep:v1:api-keys:version"
_MAX_FILE_BYTES = 64 << 20
_SIGNED_AT_ONCE = 500
# KEYS: records, signatures, version. ARGV: the next version, then name, record and signature of each. Others may be changing keys.
_SIGN = """
local signed = 0
for at = 2, #ARGV, 3 do
  if redis.call('HGET', KEYS[1], ARGV[at]) == ARGV[at + 1] then
    redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 2])
    signed = signed + 1
  end
end
if signed > 0 then redis.call('SET', KEYS[3], ARGV[1]) end
return signed
"""
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


def source_of(path: Path | None, where: str, redis: Redis, secret: DeploymentSecret) -> KeySource | None:
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
    """Keeps the keys of one deployment: a key counts if somebody with the deployment's secret has signed it, or with the former one, and
    then it is signed again. `adopt`: those are signed that nobody has, or somebody with another secret."""

    def __init__(self, redis: Redis, secret: DeploymentSecret, *, adopt: bool = False) -> None:
        self._redis = redis
        self._signer = Signer(secret, API_KEYS)
        # The former secret goes once all is changed: what it alone has signed must not stay.
        self._lasting = Signer(DeploymentSecret(secret.own), API_KEYS)
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
        # A hundred thousand of them take a second.
        signed = await asyncio.to_thread(_signed, records, signatures, self._signer)
        lasting = await asyncio.to_thread(_signed, records, signatures, self._lasting)
        if self._adopt and (added := await self._sign(records, records.keys() - signed)):
            log.warning("%d API keys that this deployment had not signed are its own from now on; go back to --api-keys redis", added)
            return None
        if again := await self._sign(records, signed - lasting):
            log.info("%d API keys that the former secret had signed are signed with the new one", again)
        known = await asyncio.to_thread(_usable, {name: record for name, record in records.items() if name in signed}, len(records))
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

    async def _sign(self, records: Mapping[bytes, bytes], names: AbstractSet[bytes]) -> int:
        """Signs these records, unless they have changed since they were read. Returns how many it has signed."""
        num_signed = 0
        for some in _batches(sorted(names)):
            arguments = [secrets.token_hex(8).encode()]
            for name in some:
                signature = self._signature(name.decode(errors="replace"), records[name].decode(errors="replace"))
                arguments += [name, records[name], signature.encode()]
            num_signed += int(await cast(Awaitable[int], self._redis.eval(_SIGN, 3, KEYS, SIGNATURES, VERSION, *arguments)))
        return num_signed


def _batches(names: Sequence[bytes]) -> Iterable[Sequence[bytes]]:
    return (names[start : start + _SIGNED_AT_ONCE] for start in range(0, len(names), _SIGNED_AT_ONCE))


def _signed(records: Mapping[bytes, bytes], signatures: Mapping[bytes, bytes], signer: Signer) -> set[bytes]:
    """Returns the names of the records that are signed as `signer` would."""
    found = set()
    for name, record in records.items():
        with suppress(Unauthenticated):
            signer.read_value(record + signatures.get(name, b""), name.decode(errors="replace"))
            found.add(name)
    return found


def _usable(records: Mapping[bytes, bytes], num_there: int) -> dict[str, Key]:
    """Returns the keys of the records, which are signed, of as many as there are in Redis."""
    if num_there > MAX_KEYS:
        log.error("Redis has %d API keys or more, and %d of them are known here; revoke those that nobody uses", num_there, MAX_KEYS)
    known: dict[str, Key] = {}
    for name, record in islice(records.items(), MAX_KEYS):
        try:
            key = Key.from_json(record)
        except BadKey as error:
            log.warning("the API key %.64r in Redis is passed over: %s", name, error.message)
            continue
        known[key.id] = key
    if num_foreign := num_there - len(records):
        log.error(
            "%d API keys in Redis are not signed with this deployment's secret and open nothing. If it was changed, give the former "
            "one as --former-secret-file; if it is lost, or an older version wrote them, and all of them are yours, start one router with "
            "--api-keys redis-adopt, once (docs/access.md)",
            num_foreign,
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
