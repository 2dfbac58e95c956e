"""Where the ranks of one worker agree on something while they start: each leaves a note, each reads all of them.

The notes are files of a private directory (torch's FileStore): nothing listens on a port. Whoever waits looks for the note of a rank
that failed, so that one rank's error is everybody's, at once, and nobody is left inside a collective.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from twostep.errors import SetupError

_FAILED = "failed"
_POLL_S = 0.005
# Of single look-ups, which never wait for a note.
_STORE_TIMEOUT = timedelta(seconds=60)


class Meeting:
    """Of rank `rank` of `size`. Not thread-safe but for `fail`."""

    def __init__(self, directory: Path, rank: int, size: int, *, timeout_s: float = 900.0) -> None:
        """`directory` is the same for all ranks and nobody else's. Waiting ends after `timeout_s`: loading a model takes minutes."""
        self.rank = rank
        self.size = size
        self._path = directory / "notes"
        self._timeout_s = timeout_s
        self._notes = self.store("notes")
        self._round = 0

    def store(self, name: str) -> Store:
        """A store of its own for a process group."""
        store = FileStore(str(self._path.with_name(name)), self.size)
        store.set_timeout(_STORE_TIMEOUT)
        return PrefixStore(name, store)

    def exchange(self, note: bytes) -> list[bytes]:
        """Every rank's note of this round, in order of rank; all ranks call it the same number of times. Raises SetupError with what
        another rank failed with, or if one does not come."""
        self._round += 1
        keys = [f"{self._round}.{rank}" for rank in range(self.size)]
        self._notes.set(keys[self.rank], note.hex())
        give_up = time.monotonic() + self._timeout_s
        while not self._notes.check(keys):
            if self._notes.check([_FAILED]):
                raise SetupError(self._notes.get(_FAILED).decode())
            if time.monotonic() > give_up:
                raise SetupError(f"not all {self.size} tensor-parallel ranks were ready within {self._timeout_s:g} s; see their log above")
            time.sleep(_POLL_S)
        return [bytes.fromhex(self._notes.get(key).decode()) for key in keys]

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return min(int(note) for note in self.exchange(str(value).encode()))

    def fail(self, message: str) -> None:
        """Ends the waiting of all others with this message."""
        self._notes.set(_FAILED, message)
