"""Where API keys are kept: a file, or Redis. Both are asked once a second, beside the requests and never on their way.

The file has a JSON object a line; empty lines and those that begin with # are left as they are. It is replaced whole when it is written,
and writers take turns by a lock beside it.

    twostep:v1:api-keys           hash: id -> the same JSON object
    twostep:v1:api-keys:version   another one after every change, so that asking costs one word as long as there is none

A Redis that has lost its keys is not one whose keys were all deleted, which leaves the version: routers go on with those they know, and
write them back.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from redis.asyncio import Redis

from router.access_keys import MAX_KEYS, BadKey, Key
from twostep.errors import InvalidRequest, SetupError, TwostepError, Unavailable

log = logging.getLogger(__name__)

KEYS = "twostep:v1:api-keys"
VERSION = "twostep:v1:api-keys:version"
_MAX_FILE_BYTES = 64 << 20


class KeySource(Protocol):
    """Raises TwostepError, OSError and RedisError where it cannot be reached or does not hold what it should."""

    async def read(self) -> Sequence[Key] | None:
        """All keys; None: they are those of the last time."""
        ...

    async def put(self, key: Key) -> None:
        """A new key, or another state of one that is there."""
        ...

    async def remove(self, key_id: str) -> bool:
        """False: it was not there."""
        ...


def source_of(path: Path | None, where: str, redis: Redis) -> KeySource | None:
    """Of --api-keys-file and --api-keys; None: without either everybody may ask. Raises SetupError."""
    if path is not None and where:
        raise SetupError("--api-keys-file and --api-keys contradict each other; keep the keys in one place")
    return FileKeys(path) if path is not None else RedisKeys(redis) if where else None


class FileKeys:
    """Everything but the constructor may block for the disk, and so runs in a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    async def read(self) -> Sequence[Key] | None:
        return await asyncio.to_thread(self._read)

    async def put(self, key: Key) -> None:
        await asyncio.to_thread(put_in_file, self._path, key)

    async def remove(self, key_id: str) -> bool:
        return await asyncio.to_thread(remove_from_file, self._path, key_id)

    def _read(self) -> Sequence[Key] | None:
        stat = os.stat(self._path)
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return None
        if stat.st_size > _MAX_FILE_BYTES:
            raise BadKey(f"{self._path} has {stat.st_size} bytes; give a file of API keys, of {_MAX_FILE_BYTES} at most")
        keys = read_file(self._path)
        # Only what could be read is done with: a broken file is complained of until it is mended.
        self._seen = seen
        return keys


def read_file(path: Path) -> list[Key]:
    """Raises OSError; BadKey, which names the line."""
    return [key for _, key in _lines(path) if key is not None]


def put_in_file(path: Path, key: Key) -> None:
    """Makes the file if there is none, for its owner alone. Raises OSError, BadKey."""

    def change(lines: list[tuple[str, Key | None]]) -> list[str]:
        if any(old is not None and old.id == key.id for _, old in lines):
            return [key.to_json() if old is not None and old.id == key.id else line for line, old in lines]
        return [*(line for line, _ in lines), key.to_json()]

    _rewrite(path, change, create=True)


def remove_from_file(path: Path, key_id: str) -> bool:
    """Raises OSError, BadKey."""
    found = False

    def change(lines: list[tuple[str, Key | None]]) -> list[str]:
        nonlocal found
        found = any(old is not None and old.id == key_id for _, old in lines)
        return [line for line, old in lines if old is None or old.id != key_id]

    _rewrite(path, change)
    return found


def _lines(path: Path) -> list[tuple[str, Key | None]]:
    """None: a line that has no key."""
    found: list[tuple[str, Key | None]] = []
    ids: set[str] = set()
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise BadKey(f"{path} is not UTF-8; give a file as `twostep keys create` writes it") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            found.append((line, None))
            continue
        try:
            key = Key.from_json(line)
        except BadKey as error:
            raise BadKey(f"{path}, line {number}: {error.message}") from None
        if key.id in ids:
            raise BadKey(f"{path}, line {number}: there is a key {key.id} already; leave one of them out")
        ids.add(key.id)
        found.append((line, key))
    if len(ids) > MAX_KEYS:
        raise BadKey(f"{path} has {len(ids)} keys; keep at most {MAX_KEYS}")
    return found


def _rewrite(path: Path, change: Callable[[list[tuple[str, Key | None]]], list[str]], *, create: bool = False) -> None:
    with _alone(path):
        exists = path.exists()
        if not exists and not create:
            raise InvalidRequest(f"{path} does not exist; give the file that holds the API keys")
        lines = change(_lines(path) if exists else [])
        mode = path.stat().st_mode & 0o777 if exists else 0o600
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, mode)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other writer meanwhile. The lock is a file of its own, because the other one is replaced."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class RedisKeys:
    """Of every deployment on this Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._version: bytes | str | None = None
        self._known: dict[str, Key] | None = None

    async def read(self) -> Sequence[Key] | None:
        version = await self._redis.get(VERSION)
        if version is None and self._known:
            await self._write_back(self._known)
            return None
        if self._known is not None and version == self._version:
            return None
        # Both change at once: what is read now is at least as new as the version.
        records = await self._redis.hgetall(KEYS)
        known: dict[str, Key] = {}
        for name, record in list(records.items())[:MAX_KEYS]:
            try:
                key = Key.from_json(record)
            except BadKey as error:
                log.warning("the API key %.64r in Redis is passed over: %s", name, error.message)
                continue
            known[key.id] = key
        self._version, self._known = version, known
        return list(known.values())

    async def put(self, key: Key) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(KEYS, key.id, key.to_json())
            pipe.set(VERSION, secrets.token_hex(8))
            await pipe.execute()

    async def remove(self, key_id: str) -> bool:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(KEYS, key_id)
            pipe.set(VERSION, secrets.token_hex(8))
            return bool((await pipe.execute())[0])

    async def _write_back(self, known: dict[str, Key]) -> None:
        log.warning("Redis has lost its API keys; this router goes on with the %d that it knows, and writes them back", len(known))
        async with self._redis.pipeline(transaction=True) as pipe:
            for key in known.values():
                pipe.hsetnx(KEYS, key.id, key.to_json())
            pipe.set(VERSION, secrets.token_hex(8))
            await pipe.execute()


def unreachable(error: Exception) -> TwostepError:
    """What an operator is told who wanted to change something."""
    if isinstance(error, TwostepError):
        return error
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return Unavailable(f"the API keys cannot be reached ({why}); look after their file or Redis, and repeat it")
