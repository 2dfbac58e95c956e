"""What files and batches of an owner take on disk: how many files, and what the volume gives them. Everything blocks.

A folder is looked through from time to time, and what this router changes is counted at once; what others change is known at the next look.
So a file more costs the same however many there are.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_LEAST_S = 2.0
# Looking takes this part of the time at most.
_SHARE = 1 / 50
_BLOCK_BYTES = 512


class Occupied(NamedTuple):
    num_files: int
    num_bytes: int


@dataclass(slots=True)
class _Seen:
    occupied: Occupied
    until: float


class Occupancy:
    """May be asked from several threads."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._seen: dict[Path, _Seen] = {}

    def of(self, folder: Path) -> Occupied:
        """All there is below it, as far as it is known."""
        seen, began = self._seen.get(folder), self._monotonic()
        if seen is not None:
            if began < seen.until:
                return seen.occupied
            seen.until = began + _LEAST_S  # others need not look as well
        occupied, ended = _look(folder, set()), self._monotonic()
        self._seen[folder] = _Seen(occupied, ended + max(_LEAST_S, (ended - began) / _SHARE))
        return occupied

    def changed(self, folder: Path, num_files: int, num_bytes: int) -> None:
        """So many more, or fewer."""
        for each, seen in list(self._seen.items()):
            if folder.is_relative_to(each):
                seen.occupied = Occupied(seen.occupied.num_files + num_files, seen.occupied.num_bytes + num_bytes)


def _look(folder: Path, known: set[tuple[int, int]]) -> Occupied:
    num_files = num_bytes = 0
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return Occupied(0, 0)
    with entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            num_files += 1
            if stat.S_ISDIR(found.st_mode):
                below = _look(folder / entry.name, known)
                num_files, num_bytes = num_files + below.num_files, num_bytes + below.num_bytes
            elif found.st_nlink > 1:
                # The same content under two names, in one of which it was counted.
                num_bytes += 0 if (found.st_dev, found.st_ino) in known else size_of(found)
                known.add((found.st_dev, found.st_ino))
            else:
                num_bytes += size_of(found)
    return Occupied(num_files, num_bytes)


def size_of(found: os.stat_result) -> int:
    """What a file takes. Not every volume tells its blocks."""
    return max(found.st_size, found.st_blocks * _BLOCK_BYTES)
