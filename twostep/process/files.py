"""Tries the files and folders of settings before anything is started or loaded."""

from __future__ import annotations

import errno
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twostep.errors import SetupError, WrongSettings
from twostep.settings.table import FileKind, Settings, settings_of

_ADVICE = {
    FileKind.READ: "give a file that this user may read",
    FileKind.WRITTEN: "give a file in a folder that this user may write to",
    FileKind.FOLDER: "give a folder that this user may write to",
}


def check_files(settings: Settings) -> None:
    """Raises SetupError, naming all of them, for files and folders of a process that cannot be read or written. Leaves nothing behind."""
    if problems := list(file_problems(settings)):
        raise SetupError(WrongSettings(problems).message)


def file_problems(settings: Settings) -> Iterator[str]:
    """Yields what is wrong with each file or folder."""
    for row in settings_of(type(settings)):
        path: Any = functools.reduce(getattr, row.path, settings)
        if row.file is None or path is None:
            continue
        try:
            _TRIES[row.file](path)
        except OSError as error:
            yield f"{row.flag} {path} cannot be used ({error.strerror or error}); {_ADVICE[row.file]}"


def _read(path: Path) -> None:
    # Not opened: what a shell passes as <(...) is a pipe, which can be read once.
    path.stat()
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _written(path: Path) -> None:
    if path.exists():
        path.open("ab").close()
    else:
        _writable(path.absolute().parent)


def _folder(path: Path) -> None:
    """A folder that is missing is made later, by its process."""
    path = path.absolute()
    _writable(next((each for each in (path, *path.parents) if os.path.lexists(each)), path))


def _writable(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass


_TRIES = {FileKind.READ: _read, FileKind.WRITTEN: _written, FileKind.FOLDER: _folder}
