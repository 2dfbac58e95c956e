"""API keys in a file: a JSON object a line; empty lines and those that begin with # are left as they are.

It is replaced whole when it is written, keeping its owner and mode, and writers take turns by a lock beside it. Where its name is a link,
that is what the link points to. All of it blocks for the disk.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from twostep.errors import InvalidRequest
from twostep.keys.api_keys import MAX_KEYS, BadKey, Key

# Another writer has the lock for as long as a small file takes: one that has it for longer hangs.
_LOCK_S = 4.0


def read_file(path: Path) -> list[Key]:
    """Raises OSError; BadKey, which names the line."""
    return [key for _, key in _lines(path) if key is not None]


def put_in_file(path: Path, key: Key) -> None:
    """Makes the file if there is none, for its owner alone. Raises OSError, BadKey."""
    with _changing(path, create=True) as lines:
        at = next((i for i, (_, old) in enumerate(lines) if old is not None and old.id == key.id), len(lines))
        lines[at : at + 1] = [(key.to_json(), key)]


def remove_from_file(path: Path, key_id: str) -> bool:
    """Returns whether it was there. Raises OSError, BadKey."""
    with _changing(path) as lines:
        kept = [(line, old) for line, old in lines if old is None or old.id != key_id]
        found = len(kept) < len(lines)
        lines[:] = kept
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


@contextmanager
def _changing(path: Path, *, create: bool = False) -> Iterator[list[tuple[str, Key | None]]]:
    """Its lines, which are written anew as they are in the end."""
    path = path.resolve()
    with _alone(path):
        exists = path.exists()
        if not exists and not create:
            raise InvalidRequest(f"{path} does not exist; give the file that holds the API keys")
        lines = _lines(path) if exists else []
        yield lines
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line, _ in lines))
                file.flush()
                os.fsync(file.fileno())
            if exists:
                _take_after(path, name)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _take_after(path: Path, name: str) -> None:
    """The new file's owner and mode are the old one's: a router that may read it still may when root has changed a key."""
    old = path.stat()
    with suppress(OSError):
        os.chown(name, old.st_uid, old.st_gid)
    os.chmod(name, old.st_mode & 0o777)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other writer meanwhile. The lock is a file of its own, because the other one is replaced. Raises TimeoutError."""
    lock = path.with_name(f".{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + _LOCK_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"another process is writing it, and has the lock {lock}") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
