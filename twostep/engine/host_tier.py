"""Prefixes in host memory, below the pool: what the pool may soon have to give up is copied out beforehand, and copied back when a prompt
comes that begins with it.

    pool    cached, about to be given out ──save──▶ host ──▶ its row given to others, by reuse (reuse.py)
              ▲                                      │
              └── found: a sequence's own blocks ◀─load┘         a saved block stays here while the pool has it too

Saving runs ahead: the cached blocks that are given out next are copied while they are still findable, so that giving them out waits for
nothing.

    the pool's cached blocks, oldest first    |─ front: saved, or not worth it ─|─ rest: not looked at, or saved when they were here last ─|
    given out next  ◀── free blocks ──────────◀ together at least `ahead`        the front takes the oldest of the rest when it is short

They have no owner meanwhile. If one was given to new content before its copy was done, its generation tells, and the copy is
dropped. What is found here is copied into blocks that the sequence owns already; it is in no step until that is done.

Only blocks that are findable in the pool come here, under the same keys (BlockPool.hash_of): so neither KV that is not what this engine
would compute, nor that of another tenant, model or number format, is ever found.

This is the bookkeeping; host_copies.py moves the bytes.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import NamedTuple

from twostep.engine.block_pool import BlockPool, NetChange, group_key
from twostep.engine.reuse import ReuseOrder
from twostep.engine.sequence import EngineSequence
from twostep.errors import InternalError
from twostep.prefix import HASH_BYTES

# Of the pool's blocks, so many can be given out at any time without losing what is worth keeping.
_AHEAD_SHARE = 0.125


@dataclass(slots=True, eq=False, kw_only=True)
class _Entry:
    row: int
    # Its hash stands at a hash-unit boundary.
    announced: bool
    # Loads under way that read the row.
    num_readers: int = 0
    # No hash leads to it any more; its last reader gives the row back.
    dropped: bool = False


class SavedBlock(NamedTuple):
    """A block of the pool that is to be copied to a row. It has no owner: what counts is its generation afterwards."""

    row: int
    block: int
    generation: int
    digest: bytes
    reused: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostLoad:
    """`rows` are to be copied to the pool's `blocks`, which are those of a sequence from the `first` to before the `end` of each group of
    layers, of those with windows as far as they are in reach of what follows. `is_new`: it has not been here before, so what it finds
    counts."""

    sequence: EngineSequence
    is_new: bool
    first: int
    end: int
    blocks: Sequence[int]
    rows: Sequence[int]
    hashes: Sequence[bytes]
    entries: Sequence[_Entry] = field(repr=False)


class HostTier:
    """The engine's lock guards it. With no rows it does nothing and costs nothing."""

    def __init__(self, pool: BlockPool, num_rows: int, *, block_bytes: int = 0, ahead_share: float = _AHEAD_SHARE) -> None:
        self.num_rows = num_rows
        # Copied out and back, ever.
        self.copied_bytes = 0
        self._block_bytes = block_bytes
        self._pool = pool
        # A heap: the lowest are taken first, so that there are few slabs, and long runs to copy.
        self._free_rows = list(range(num_rows))
        self._entries: dict[bytes, _Entry] = {}
        self._order = ReuseOrder(max(1, num_rows))
        self._change = NetChange()
        # See above.
        self._front: dict[int, None] = {}
        self._rest: OrderedDict[int, None] = OrderedDict()
        self._ahead = max(1, int(pool.num_blocks * ahead_share))
        self._saving: dict[bytes, int] = {}
        self._to_load: deque[HostLoad] = deque()
        self._loading: dict[str, HostLoad] = {}
        if num_rows:
            pool.watch(self)

    @property
    def num_blocks(self) -> int:
        """How many can be found here."""
        return len(self._entries)

    @property
    def num_loading(self) -> int:
        """Sequences that wait for blocks from here."""
        return len(self._loading)

    @property
    def has_loads(self) -> bool:
        return bool(self._to_load)

    @property
    def has_copies(self) -> bool:
        """Returns whether something is to be copied, either way."""
        return bool(self._to_load) or self._is_short

    @property
    def _is_short(self) -> bool:
        """Returns whether fewer blocks than wanted can be given out without a loss."""
        return bool(self._rest) and self._pool.num_free + len(self._front) < self._ahead

    def on_cached(self, block: int) -> None:
        """Notes that a findable block has lost its last owner."""
        self._rest[block] = None

    def on_taken(self, block: int) -> None:
        """Notes that such a block has an owner again, or is about to be given out."""
        if block in self._front:
            del self._front[block]
        else:
            del self._rest[block]

    def take_saves(self, max_blocks: int) -> Sequence[SavedBlock]:
        """Returns what is to be copied out next, at most so many blocks; then comes `saved` if there are any."""
        copies: list[SavedBlock] = []
        while self._is_short and len(copies) < max_blocks:
            block, _ = self._rest.popitem(last=False)
            self._front[block] = None
            digest = self._pool.hash_of(block)
            assert digest is not None
            if digest in self._entries or digest in self._saving:
                continue
            reused = self._order.reused(digest)
            row = self._row_for(reused=reused)
            if row is not None:
                self._saving[digest] = row
                copies.append(SavedBlock(row, block, self._pool.generation(block), digest, reused))
        # In the order of rows: neighbours are one copy.
        return sorted(copies)

    def saved(self, copies: Sequence[SavedBlock], *, ok: bool) -> None:
        """Notes that these blocks are copied, or that the copy failed: it is tried again when a block is cached the next time."""
        if ok:
            self.copied_bytes += len(copies) * self._block_bytes
        for row, block, generation, digest, reused in copies:
            del self._saving[digest]
            # A block that was withdrawn meanwhile has no hash any more.
            if ok and self._pool.hash_of(block) == digest and self._pool.generation(block) == generation:
                announced = self._pool.announces(block)
                self._entries[digest] = _Entry(row=row, announced=announced)
                self._order.put(digest, reused=reused)
                if announced and self._all_have(digest[:HASH_BYTES]):
                    self._change.add(digest[:HASH_BYTES])
            else:
                heapq.heappush(self._free_rows, row)

    def withdraw(self, hashes: Iterable[bytes]) -> None:
        """Does as BlockPool.withdraw does, which comes first."""
        for digest, group in product(hashes, range(self._pool.num_groups)):
            if (key := group_key(digest, group)) in self._entries:
                self._drop(key)

    def _all_have(self, digest: bytes) -> bool:
        """Returns whether there is a block of each group of layers under a hash."""
        return all(group_key(digest, group) in self._entries for group in range(self._pool.num_groups))

    def _row_for(self, *, reused: bool) -> int | None:
        if not self._free_rows:
            victim = next((digest for digest in self._order.victims(reused=reused) if not self._entries[digest].num_readers), None)
            if victim is None:
                return None
            self._drop(victim)
        return heapq.heappop(self._free_rows)

    def _drop(self, digest: bytes) -> None:
        all_had = self._entries[digest].announced and self._all_have(digest[:HASH_BYTES])
        entry = self._entries.pop(digest)
        self._order.drop(digest)
        if all_had:
            self._change.remove(digest[:HASH_BYTES])
        entry.dropped = True
        if not entry.num_readers:
            heapq.heappush(self._free_rows, entry.row)

    def asked(self, hashes: Sequence[bytes]) -> None:
        """Counts that a sequence has asked for these blocks, which are in the pool, here or nowhere yet."""
        if self.num_rows:
            for group in range(self._pool.num_groups):
                self._order.asked(hashes if group == 0 else [group_key(digest, group) for digest in hashes])

    def has(self, digest: bytes, group: int = 0) -> bool:
        """Returns whether a group's block is here."""
        return group_key(digest, group) in self._entries

    def lookup(self, hashes: Sequence[bytes], first: int, group: int = 0) -> int:
        """Returns how many blocks of a group from the `first` on are here, up to one that is not."""
        end = first
        while end < len(hashes) and self.has(hashes[end], group):
            end += 1
        return end - first

    def load(self, sequence: EngineSequence, first: int, end: int, keys: Sequence[Sequence[bytes]], *, is_new: bool) -> None:
        """Has what is here under these keys of each group, just looked up, copied to as many blocks of the sequence's own before the
        `end` of that group; none before the `first`. Until `loaded` it counts one use more than it is in steps. Nothing happens if there
        are none."""
        if not keys:
            return
        hashes = list(chain.from_iterable(keys))
        entries = [self._entries[digest] for digest in hashes]
        for entry in entries:
            entry.num_readers += 1
        self._order.used(hashes)
        load = HostLoad(
            sequence=sequence,
            is_new=is_new,
            first=first,
            end=end,
            blocks=[block for blocks, some in zip(sequence.blocks, keys, strict=True) for block in blocks[end - len(some) : end]],
            rows=[entry.row for entry in entries],
            hashes=hashes,
            entries=entries,
        )
        sequence.loading = True
        sequence.num_steps += 1
        self._loading[sequence.seq_id] = load
        self._to_load.append(load)

    def take_load(self) -> HostLoad | None:
        """Returns what is to be copied back next; then comes `loaded`."""
        return self._to_load.popleft() if self._to_load else None

    def loaded(self, load: HostLoad, *, ok: bool) -> None:
        """Notes that a load is copied. Not `ok`: it cannot be, and its blocks are not found here again."""
        del self._loading[load.sequence.seq_id]
        load.sequence.loading = False
        load.sequence.num_steps -= 1
        if ok:
            self.copied_bytes += len(load.blocks) * self._block_bytes
        for digest, entry in zip(load.hashes, load.entries, strict=True):
            entry.num_readers -= 1
            if entry.dropped and not entry.num_readers:
                heapq.heappush(self._free_rows, entry.row)
            elif not ok and not entry.dropped:
                self._drop(digest)

    def take_change(self) -> tuple[list[bytes], list[bytes]]:
        """Returns hashes at hash-unit boundaries that came and went since the last call; net."""
        return self._change.take()

    def findable(self) -> list[bytes]:
        """Returns all hashes at hash-unit boundaries."""
        return [key for key, entry in self._entries.items() if entry.announced and len(key) <= HASH_BYTES and self._all_have(key)]

    def check_integrity(self, loading: Iterable[EngineSequence]) -> None:
        """`loading`: the sequences that say they are being loaded. O(rows + blocks). Raises InternalError."""
        if sorted(self._order) != sorted(self._entries):
            raise InternalError(f"the host tier holds {len(self._entries)} blocks and orders {len(self._order)}, or others")
        if {sequence.seq_id for sequence in loading} != self._loading.keys():
            raise InternalError(f"{len(self._loading)} sequences are loaded from the host, and others say they are")
        readers = Counter(entry for load in self._loading.values() for entry in load.entries)
        entries = {*self._entries.values(), *readers}
        rows = [*(entry.row for entry in entries), *self._saving.values(), *self._free_rows]
        if sorted(rows) != list(range(self.num_rows)):
            raise InternalError(f"of {self.num_rows} rows of the host tier {len(set(rows))} are accounted for, {len(rows)} times in all")
        for entry in entries:
            if entry.num_readers != readers[entry]:
                raise InternalError(f"row {entry.row} of the host tier counts {entry.num_readers} readers and has {readers[entry]}")
        if self.num_rows and [*self._front, *self._rest] != self._pool.cached():
            raise InternalError(
                f"the host tier looks at {len(self._front)} + {len(self._rest)} blocks, which are not those cached, in order"
            )
