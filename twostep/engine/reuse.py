"""Which prefixes are worth host memory: a segmented LRU whose admission is by reuse.

    asked for once so far     once    a tenth of the room at least; here whatever is new passes through, oldest first
    asked for again           reused  the rest, least recently used first; what is never asked for twice never gets here

Plain LRU lets every long document that is read once push out what conversations come back for. Blocks that were asked for at least
twice are out of such a document's reach here. That a block was asked for before is remembered past its eviction, for the hashes asked for
lately; the segments are those of SLRU (Karedla, Love and Wherry, 1994) and 2Q (Johnson and Shasha, 1994). Comparing the newcomer's count
with the victim's, as TinyLFU does, kept less of conversations that are new: docs/prefix-cache.md has the figures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

# Share of the room that blocks asked for once get at least.
ONCE_SHARE = 0.1
# Of each generation, hashes remembered for each block there is room for: some hundred bytes each, beside a block's hundreds of thousands.
_REMEMBERED = 4


class ReuseOrder:
    """Knows which hashes are in, in which segment, and which one goes next."""

    def __init__(self, capacity: int, *, once_share: float = ONCE_SHARE) -> None:
        self.capacity = capacity
        self._least_once = max(1, int(capacity * once_share))
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._reused: OrderedDict[bytes, None] = OrderedDict()
        # Asked for in this generation and in the one before; True: more than once.
        self._asked: dict[bytes, bool] = {}
        self._asked_before: dict[bytes, bool] = {}

    def __len__(self) -> int:
        return len(self._once) + len(self._reused)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._once or digest in self._reused

    def __iter__(self) -> Iterator[bytes]:
        yield from self._once
        yield from self._reused

    def asked(self, hashes: Sequence[bytes]) -> None:
        """Counts that a prompt asked for these prefixes, which are here or not."""
        for digest in hashes:
            self._asked[digest] = digest in self._asked or digest in self._asked_before
        if len(self._asked) > _REMEMBERED * self.capacity:
            self._asked, self._asked_before = {}, self._asked

    def used(self, hashes: Sequence[bytes]) -> None:
        """Notes that these, all of which are in, were read from here, in the sequence's order: they have been asked for twice. The head is
        the last to go."""
        for digest in reversed(hashes):
            self._once.pop(digest, None)
            self._reused[digest] = None
            self._reused.move_to_end(digest)

    def reused(self, digest: bytes) -> bool:
        """Returns whether it was asked for at least twice lately."""
        return self._asked.get(digest) or self._asked_before.get(digest, False)

    def put(self, digest: bytes, *, reused: bool) -> None:
        """Takes a hash in, as the one used most recently. The caller has made room."""
        assert digest not in self
        assert len(self) < self.capacity
        (self._reused if reused else self._once)[digest] = None

    def drop(self, digest: bytes) -> None:
        """Takes a hash out."""
        if digest in self._once:
            del self._once[digest]
        else:
            del self._reused[digest]

    def victims(self, *, reused: bool) -> Iterator[bytes]:
        """Yields those that may go for a newcomer, first choice first."""
        of_once = len(self._once) >= self._least_once + reused or not self._reused
        yield from self._once if of_once else self._reused
        yield from self._reused if of_once else self._once
