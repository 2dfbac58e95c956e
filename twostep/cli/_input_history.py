"""Keeps what was typed at a prompt from one session to the next: a file of JSON strings, one a line, readable by its owner alone.

readline's own file would do but for messages of several lines, which it gives back as several."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

MAX_ENTRIES = 1000
MAX_BYTES = 1 << 20


def default_path(environ: Mapping[str, str]) -> Path:
    """Returns the file in the state directory of the XDG base directory specification."""
    given = environ.get("XDG_STATE_HOME", "")
    base = Path(given) if given.startswith("/") else Path.home() / ".local" / "state"
    return base / "twostep" / "chat_history"


def load(path: Path) -> list[str]:
    """Returns the newest entries, oldest first. A file that is not there, or not ours, has nothing."""
    entries: list[str] = []
    with suppress(OSError):
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_BYTES))
            lines = file.read(MAX_BYTES).splitlines()
        for line in lines:
            with suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, str) and entry and entry not in entries[-1:]:
                    entries.append(entry)
    return entries[-MAX_ENTRIES:]


def save(path: Path, new: Sequence[str]) -> None:
    """Adds to what is there by now, another session's lines included, and forgets the oldest where there is too much. A history that cannot
    be written is no reason to fail."""
    # What a terminal sent may be no valid Unicode: escapes are.
    added = b"".join(json.dumps(entry).encode("ascii") + b"\n" for entry in new)
    if not added or len(added) > MAX_BYTES:
        return
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(added)
            file.flush()
            if os.fstat(file.fileno()).st_size > 2 * MAX_BYTES:
                file.seek(-MAX_BYTES, os.SEEK_END)
                kept = file.read().partition(b"\n")[2]
                file.truncate(0)
                file.write(kept)
