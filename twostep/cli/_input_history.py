"""What was typed at a prompt, kept from one session to the next: a file of JSON strings, one a line, readable by its owner alone."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

MAX_ENTRIES = 1000
MAX_BYTES = 1 << 20
_MAX_ENTRY_BYTES = 64 << 10


def default_path(environ: Mapping[str, str]) -> Path:
    """In the state directory of the XDG base directory specification."""
    given = environ.get("XDG_STATE_HOME", "")
    base = Path(given) if given.startswith("/") else Path.home() / ".local" / "state"
    return base / "twostep" / "chat_history"


def load(path: Path) -> list[str]:
    """Oldest first. A file that is not there, or not ours, has nothing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_BYTES))
            lines = file.read(MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, str) and entry:
            entries.append(entry)
    return entries[-MAX_ENTRIES:]


def merged(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The newest of both within the bounds; what is the same as the one before it, or very long, is left out."""
    kept: list[str] = []
    num_bytes = 0
    for entry in reversed([*old, *new]):
        line = len(_line(entry))
        if not entry or line > _MAX_ENTRY_BYTES or (kept and kept[-1] == entry):
            continue
        num_bytes += line
        if num_bytes > MAX_BYTES or len(kept) == MAX_ENTRIES:
            break
        kept.append(entry)
    return kept[::-1]


def save(path: Path, new: Sequence[str]) -> None:
    """Adds to what is there by now, another session's lines included. A history that cannot be written is no reason to fail."""
    if not new:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp's files are their owner's alone.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(handle, "wb") as file:
                file.write(b"".join(map(_line, merged(load(path), new))))
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError:
        return


def _line(entry: str) -> bytes:
    # What a terminal sent may be no valid Unicode: escapes are.
    return json.dumps(entry).encode("ascii") + b"\n"
