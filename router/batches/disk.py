"""Changes on disk that are there or not, whenever the power goes. Everything blocks, and raises OSError."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from twostep.errors import Unavailable
from twostep.process.bounded_threads import BoundedThreads


class Disk:
    """Changes one folder tree, which other routers may share: renames and exclusive creation are what they agree by."""

    def now(self, folder: Path) -> float:
        """Returns the volume's time, which its files are dated by."""
        probe = folder / f".now-{os.urandom(8).hex()}"
        try:
            self.create(probe, b"")
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        """Makes a folder, with those above it that are missing, all of them this user's alone: mkdir's own `parents` would be anybody's to
        list."""
        if not path.parent.is_dir():
            self.make_folder(path.parent)
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(path.parent)

    def write(self, path: Path, data: bytes) -> None:
        """Writes a file, whole or not at all."""
        temporary = path.with_name(f".{path.name}.{os.getpid():x}.{os.urandom(4).hex()}")
        try:
            _put(temporary, data, os.O_EXCL)
            self.rename(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def create(self, path: Path, data: bytes) -> None:
        """Creates a file exclusively: raises FileExistsError. A crash may leave less than `data`."""
        _put(path, data, os.O_EXCL)
        _sync_folder(path.parent)

    def create_whole(self, path: Path, data: bytes) -> None:
        """Creates a file exclusively, whole or not at all: raises FileExistsError."""
        temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        try:
            self.create(temporary, data)
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise
            except OSError:
                # Some shared volumes have no links.
                self.create(path, data)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def append(self, path: Path, data: bytes) -> None:
        """Adds to the end of a file. It is on disk when this returns. What fails may have left a part."""
        _put(path, data, os.O_APPEND)

    def rename(self, path: Path, to: Path) -> None:
        os.rename(path, to)
        _sync_folder(to.parent)

    def link(self, path: Path, to: Path) -> None:
        """Gives the same content under another name, also once the first is gone."""
        try:
            os.link(path, to)
        except FileNotFoundError:
            raise
        except OSError:
            # Some shared volumes have no links.
            shutil.copyfile(path, to)

    def delete(self, path: Path) -> None:
        """Deletes a file, which may be gone already."""
        path.unlink(missing_ok=True)

    def delete_folder(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


def _put(path: Path, data: bytes, how: int) -> None:
    """Writes to a file of this user's alone, which is on disk when it returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # not every shared volume can
    finally:
        os.close(descriptor)


P = ParamSpec("P")
T = TypeVar("T")

# What a volume is given to answer.
_TIMEOUT_S = 30.0


class Threads:
    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._short = BoundedThreads(4, "batches")
        # Whole files are read and written: small things need not wait for it.
        self._long = BoundedThreads(2, "batches-long")

    async def short(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises what `work` does; Unavailable for a disk that fails or does not answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._in(self._short, partial(work, *args, **kwargs))
        except TimeoutError:
            raise Unavailable(
                f"the batch directory did not answer within {self._timeout_s:.0f} s; repeat it, or look after the volume"
            ) from None

    async def long(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work as `__call__` does, however long it takes."""
        return await self._in(self._long, partial(work, *args, **kwargs))

    async def _in(self, threads: BoundedThreads, work: Callable[[], T]) -> T:
        try:
            return await threads.run(work)
        except OSError as error:
            raise Unavailable(
                f"the batch directory cannot be used ({error.strerror or error}); look after the volume and its room"
            ) from error

    def close(self) -> None:
        """Starts nothing more; what has begun ends by itself."""
        self._short.close()
        self._long.close()
