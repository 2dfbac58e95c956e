"""Which prefixes are worth host memory: a segmented LRU whose admission is by reuse.

    asked for once so far     once    a tenth of the room at least; here whatever is new passes through, oldest first
    asked for again           reused  the rest, least recently used first; what nobody asks for twice never gets here

Plain LRU lets every long document that is read once push out what conversations come back for. Blocks that were asked for at least
twice are out of such a document's reach here. That a block was asked for before is remembered past its eviction, in a count-min sketch
(Cormode and Muthukrishnan, 2005) that ages by halving, as in TinyLFU (Einziger, Friedman and Manes, 2017); the segments are those of SLRU
(Karedla, Love and Wherry, 1994) and 2Q (Johnson and Shasha, 1994). Comparing the newcomer's count with the victim's, as TinyLFU does, kept
less of conversations that are new: docs/prefix-cache.md has the figures.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

# Share of the room that blocks asked for once get at least.
ONCE_SHARE = 0.1
# Asked for so often, by what the sketch remembers, a block is a reused one.
_REUSED = 2
# Blocks that the sketch counts before it halves, for each block there is room for.
_WINDOW = 8
_DEPTH = 4
_MAX_COUNT = 15
# Counting one hash takes a hundred times as long as each further one, and many hold up whoever wants the lock.
_COUNTED_AT_ONCE = 1024


class CountSketch:
    """How often each hash was counted lately: never too few but for the halving, too many rarely.

    counts  uint8 [4, width]; a hash's four places are four words of it, which as an HMAC's are as good as random"""

    def __init__(self, window: int) -> None:
        """Halves everything after so many counts."""
        self._window = max(1, window)
        # Twice the window and more: of what was never counted, 2 % seem to have been.
        width = 2 << max(4, (self._window - 1).bit_length())
        self._counts = np.zeros((_DEPTH, width), np.uint8)
        self._num_counted = 0

    def count(self, hashes: Sequence[bytes]) -> None:
        """Each of them once more; hashes of 16 bytes at least."""
        for start in range(0, len(hashes), self._window):
            part = hashes[start : start + self._window]
            rows, columns = self._places(part)
            counts = self._counts[rows, columns]
            # Only the least of a hash's counts is its own for certain (conservative update).
            raised = np.where(counts == counts.min(axis=0), np.minimum(counts + 1, _MAX_COUNT), counts)
            np.maximum.at(self._counts, (rows, columns), raised.astype(np.uint8))
            self._num_counted += len(part)
            if self._num_counted >= self._window:
                self._counts >>= 1
                self._num_counted //= 2

    def estimate(self, hashes: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """uint8 [len(hashes)], at most 15 each."""
        least: npt.NDArray[np.uint8] = self._counts[self._places(hashes)].min(axis=0)
        return least

    def _places(self, hashes: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Row and column [4, n]."""
        words = np.frombuffer(b"".join(digest[: 4 * _DEPTH] for digest in hashes), "<u4").reshape(len(hashes), _DEPTH)
        columns = (words.T & (self._counts.shape[1] - 1)).astype(np.int64)
        return np.arange(_DEPTH)[:, None], columns


class ReuseOrder:
    """Who is in, in which segment, and who goes next. Knows hashes only."""

    def __init__(self, capacity: int, *, once_share: float = ONCE_SHARE) -> None:
        self.capacity = capacity
        self._least_once = max(1, int(capacity * once_share))
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._reused: OrderedDict[bytes, None] = OrderedDict()
        self._sketch = CountSketch(_WINDOW * capacity)
        # Asked for and not yet in the sketch: counting many at once costs hardly more than one.
        self._asked: list[bytes] = []

    def __len__(self) -> int:
        return len(self._once) + len(self._reused)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._once or digest in self._reused

    def __iter__(self) -> Iterator[bytes]:
        yield from self._once
        yield from self._reused

    def asked(self, hashes: Sequence[bytes]) -> None:
        """A prompt had these prefixes, here or not."""
        self._asked.extend(hashes)
        if len(self._asked) >= _COUNTED_AT_ONCE:
            self._count()

    def used(self, hashes: Sequence[bytes]) -> None:
        """These, all of which are in, were read from here, in the sequence's order: they have been asked for twice. The head is the last
        to go."""
        for digest in reversed(hashes):
            self._once.pop(digest, None)
            self._reused[digest] = None
            self._reused.move_to_end(digest)

    def reused(self, hashes: Sequence[bytes]) -> Sequence[bool]:
        """Of each, whether it was asked for at least twice lately."""
        if self._asked:
            self._count()
        reused: list[bool] = (self._sketch.estimate(hashes) >= _REUSED).tolist()
        return reused

    def put(self, digest: bytes, *, reused: bool) -> None:
        """It is in from now on, used most recently. The caller has made room."""
        assert digest not in self
        assert len(self) < self.capacity
        (self._reused if reused else self._once)[digest] = None

    def drop(self, digest: bytes) -> None:
        """It is in no more."""
        if digest in self._once:
            del self._once[digest]
        else:
            del self._reused[digest]

    def victims(self, *, reused: bool) -> Iterator[bytes]:
        """Who may go for a newcomer, first choice first."""
        of_once = len(self._once) >= self._least_once + reused or not self._reused
        yield from self._once if of_once else self._reused
        yield from self._reused if of_once else self._once

    def check(self) -> str:
        """What does not add up, or nothing."""
        both = self._once.keys() & self._reused.keys()
        return f"{len(both)} hashes are in both segments" if both else ""

    def _count(self) -> None:
        self._sketch.count(self._asked)
        self._asked.clear()
