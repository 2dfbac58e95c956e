"""API keys in a file: a JSON object a line; empty lines and those that begin with # are left as they are.

It is replaced whole when it is written, and writers take turns by a lock beside it. All of it blocks for the disk.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from twostep.api_keys import MAX_KEYS, BadKey, Key
from twostep.errors import InvalidRequest


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
