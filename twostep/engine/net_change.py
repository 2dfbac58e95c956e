"""What came and went in a set of prefixes since somebody last asked: net, and so bounded by the set however rarely that is."""

from __future__ import annotations


class NetChange:
    """A hash that came and went again, or the other way round, is in neither list."""

    def __init__(self) -> None:
        # Dicts for their order. `_removed` holds only hashes that were once taken as added.
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def add(self, digest: bytes) -> None:
        """It was not there and is now."""
        if digest in self._removed:
            del self._removed[digest]
        else:
            self._added[digest] = None

    def remove(self, digest: bytes) -> None:
        """It was there and is no more."""
        if digest in self._added:
            del self._added[digest]
        else:
            self._removed[digest] = None

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """What was added, and what was removed, since the last call."""
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed
