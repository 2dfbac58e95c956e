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

Only blocks that are findable in the pool come here, under the same hashes: so neither KV that is not what this engine would compute, nor
that of another tenant, model or number format, is ever found.

HostTier is the bookkeeping; HostCopies moves the bytes, on a thread of its own, so that no step waits for a copy; without one, between
steps:

    thread   load ── load ── save ── save ── load ──▶      what a sequence waits for goes first, the rest in small batches
    steps    ──── n ──── n+1 ──── n+2 ──── n+3 ──────▶      the sequence joins the first step after its load
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twostep.engine.batch import Runner
from twostep.engine.block_pool import BlockPool, NetChange
from twostep.engine.host_memory import HostRows, HostSlabs
from twostep.engine.reuse import ReuseOrder
from twostep.engine.sequence import EngineSequence
from twostep.errors import InternalError

# Of the pool's blocks, so many can be given out at any time without losing what is worth keeping.
_AHEAD_SHARE = 0.125
# A batch that is saved has so many bytes and blocks at most: a sequence that comes to wait for a load waits no longer than for this; and
# a thread that wants the engine's lock, no longer than choosing so many blocks takes.
_BATCH_BYTES = 32 << 20
_BATCH_BLOCKS = 128
_POLL_S = 0.5

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class _Entry:
    row: int
    # Its hash stands at a hash-unit boundary.
    announced: bool
    # Loads under way that read the row.
    num_readers: int = 0
    # No hash leads to it any more; its last reader gives the row back.
    dropped: bool = False


class _SavedBlock(NamedTuple):
    row: int
    block: int
    generation: int
    digest: bytes
    reused: bool


@dataclass(frozen=True, slots=True, eq=False)
class HostSave:
    """Blocks of the pool that are to be copied to rows. They have no owner: what counts are their generations afterwards."""

    copies: Sequence[_SavedBlock]

    @property
    def blocks(self) -> Sequence[int]:
        return [copy.block for copy in self.copies]

    @property
    def rows(self) -> Sequence[int]:
        return [copy.row for copy in self.copies]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostLoad:
    """`rows` are to be copied to the pool's `blocks`, which are those of a sequence from the `first` on. `is_new`: it has not been here
    before, so what it finds counts."""

    sequence: EngineSequence
    is_new: bool
    first: int
    blocks: Sequence[int]
    rows: Sequence[int]
    hashes: Sequence[bytes]
    entries: Sequence[_Entry] = field(repr=False)


class HostTier:
    """The engine's lock guards it. With no rows it does nothing and costs nothing."""

    def __init__(self, pool: BlockPool, num_rows: int, *, ahead_share: float = _AHEAD_SHARE) -> None:
        self.num_rows = num_rows
        self._pool = pool
        self._rows = HostRows(num_rows)
        self._entries: dict[bytes, _Entry] = {}
        self._order = ReuseOrder(max(1, num_rows))
        self._change = NetChange()
        # See above. In front, True: saved, or not worth it; False: on its way.
        self._front: dict[int, bool] = {}
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

    # ---- what the pool tells ----------------------------------------------------------------------------------------

    def on_cached(self, block: int) -> None:
        """A findable block has lost its last owner."""
        self._rest[block] = None

    def on_taken(self, block: int) -> None:
        """It has an owner again, or is about to be given out."""
        if self._front.pop(block, None) is None:
            del self._rest[block]

    # ---- out --------------------------------------------------------------------------------------------------------

    def take_save(self, max_blocks: int) -> HostSave | None:
        """Returns what is to be copied out next, at most so many blocks; then comes `saved`. None: nothing."""
        copies: list[_SavedBlock] = []
        while self._is_short and max_blocks:
            block, _ = self._rest.popitem(last=False)
            digest = self._hash(block)
            self._front[block] = digest in self._entries or digest in self._saving
            if not self._front[block]:
                max_blocks -= 1
                (reused,) = self._order.reused((digest,))
                row = self._room_for(reused=reused)
                self._front[block] = row is None
                if row is not None:
                    self._saving[digest] = row
                    copies.append(_SavedBlock(row, block, self._pool.generation(block), digest, reused))
        # In the order of rows: neighbours are one copy.
        return HostSave(sorted(copies)) if copies else None

    def saved(self, save: HostSave, *, ok: bool) -> None:
        """It is copied, or that failed."""
        for row, block, generation, digest, reused in save.copies:
            del self._saving[digest]
            # A block that was withdrawn meanwhile has no hash any more.
            is_there = self._pool.hash_of(block) == digest
            if ok and is_there and self._pool.generation(block) == generation:
                announced = self._pool.announces(block)
                self._entries[digest] = _Entry(row=row, announced=announced)
                self._order.put(digest, reused=reused)
                if announced:
                    self._change.add(digest)
            else:
                self._rows.give((row,))
            # After a failure too: the next time it is cached it is tried again.
            if is_there and block in self._front:
                self._front[block] = True

    def withdraw(self, hashes: Iterable[bytes]) -> None:
        """Does as BlockPool.withdraw does, which comes first."""
        for digest in hashes:
            if digest in self._entries:
                self._drop(digest)

    def _room_for(self, *, reused: bool) -> int | None:
        taken = self._rows.take(1)
        if taken is None:
            victim = next((digest for digest in self._order.victims(reused=reused) if not self._entries[digest].num_readers), None)
            if victim is None:
                return None
            self._drop(victim)
            taken = self._rows.take(1)
            assert taken is not None
        return taken[0]

    def _drop(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        self._order.drop(digest)
        if entry.announced:
            self._change.remove(digest)
        entry.dropped = True
        if not entry.num_readers:
            self._rows.give((entry.row,))

    def _hash(self, block: int) -> bytes:
        digest = self._pool.hash_of(block)
        assert digest is not None
        return digest

    # ---- back -------------------------------------------------------------------------------------------------------

    def asked(self, hashes: Sequence[bytes]) -> None:
        """A sequence has these blocks, in the pool, here or nowhere yet."""
        if self.num_rows:
            self._order.asked(hashes)

    def lookup(self, hashes: Sequence[bytes], first: int) -> Sequence[bytes]:
        """Returns those of the hashes from the `first` on that are here, up to one that is not."""
        end = first
        while end < len(hashes) and hashes[end] in self._entries:
            end += 1
        return hashes[first:end]

    def load(self, sequence: EngineSequence, first: int, hashes: Sequence[bytes], *, is_new: bool) -> None:
        """`hashes`, just looked up, are to be copied to the sequence's own blocks from the `first` on. Until `loaded` it counts one use
        more than it is in steps. Nothing happens if there are none."""
        if not hashes:
            return
        entries = [self._entries[digest] for digest in hashes]
        for entry in entries:
            entry.num_readers += 1
        self._order.used(hashes)
        load = HostLoad(
            sequence=sequence,
            is_new=is_new,
            first=first,
            blocks=sequence.blocks[first : first + len(hashes)].tolist(),
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
        """It is copied. Not `ok`: it cannot be, and is not found here again."""
        del self._loading[load.sequence.seq_id]
        load.sequence.loading = False
        load.sequence.num_steps -= 1
        for digest, entry in zip(load.hashes, load.entries, strict=True):
            entry.num_readers -= 1
            if entry.dropped and not entry.num_readers:
                self._rows.give((entry.row,))
            elif not ok and not entry.dropped:
                self._drop(digest)

    # ---- changes ----------------------------------------------------------------------------------------------------

    def take_change(self) -> tuple[list[bytes], list[bytes]]:
        """Returns hashes at hash-unit boundaries that came and went since the last call; net."""
        return self._change.take()

    def findable(self) -> list[bytes]:
        """Returns all hashes at hash-unit boundaries."""
        return [digest for digest, entry in self._entries.items() if entry.announced]

    # ---- proof ------------------------------------------------------------------------------------------------------

    def check_integrity(self, loading: Iterable[EngineSequence]) -> None:
        """`loading`: the sequences that say they are being loaded. O(rows + blocks). Raises InternalError."""
        if (wrong := self._order.check()) or set(self._order) != self._entries.keys():
            raise InternalError(f"the host tier holds {len(self._entries)} blocks and orders {len(self._order)}; {wrong}")
        if {sequence.seq_id for sequence in loading} != self._loading.keys():
            raise InternalError(f"{len(self._loading)} sequences are loaded from the host, and others say they are")
        readers: dict[int, int] = {}
        leaving: dict[int, int] = {}
        for load in self._loading.values():
            for entry in load.entries:
                readers[entry.row] = readers.get(entry.row, 0) + 1
                if entry.dropped:
                    leaving[id(entry)] = entry.row
        rows = [*(entry.row for entry in self._entries.values()), *self._saving.values(), *leaving.values()]
        if len(set(rows)) != len(rows) or len(rows) != self._rows.num_used:
            raise InternalError(f"{self._rows.num_used} rows of the host tier are taken, and {len(rows)} are accounted for")
        for entry in self._entries.values():
            if entry.num_readers != readers.get(entry.row, 0):
                raise InternalError(
                    f"row {entry.row} of the host tier counts {entry.num_readers} readers and has {readers.get(entry.row, 0)}"
                )
        if not self.num_rows:
            return
        if [*self._front, *self._rest] != self._pool.cached():
            raise InternalError(
                f"the host tier looks at {len(self._front)} + {len(self._rest)} blocks, which are not those cached, in order"
            )


class HostCopies:
    """Between start() and stop() a thread copies; otherwise the thread that steps the engine calls `copy_all` between steps."""

    def __init__(self, runner: Runner, tier: HostTier, changed: threading.Condition, on_loaded: Callable[[HostLoad, bool], None]) -> None:
        """`changed` is the engine's lock, notified when there may be something to copy. `on_loaded(load, ok)` is called under it."""
        self._tier = tier
        self._changed = changed
        self._on_loaded = on_loaded
        self._slabs = HostSlabs(runner)
        self._max_blocks = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // runner.kv_shape.block_bytes))
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failing = False
        # What ended the thread before its time: the books cannot be trusted, and what waits for a copy would wait for ever.
        self.failure: Exception | None = None

    @property
    def by_itself(self) -> bool:
        """Returns whether a thread copies."""
        return self._thread is not None

    def start(self) -> None:
        """Does nothing where the tier has no room."""
        if self._tier.num_rows and self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="engine-host-cache", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """After the copy under way. Idempotent; what is still to be copied is left to `copy_all`."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning("a copy between the KV pool and host memory did not finish within %g s; leaving it behind", timeout_s)
        else:
            self._thread = None

    def copy_all(self) -> bool:
        """Copies all there is, where no thread does it, and returns whether that was anything."""
        if self._thread is not None or not self._copy_next():
            return False
        while self._copy_next():
            pass
        return True

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._tier.has_copies, _POLL_S)
                    if self._stopping:
                        return
                self._copy_next()
        except Exception as error:  # a failing copy is none: see _tried
            log.exception("the thread that copies prefixes to the host and back ended")
            with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _copy_next(self) -> bool:
        """One load or a batch of saves. False: there is nothing."""
        if not self._tier.num_rows:
            return False
        with self._changed:
            load = self._tier.take_load()
            save = self._tier.take_save(self._max_blocks) if load is None else None
        if load is not None:
            ok = self._tried(lambda: self._slabs.copy_back(load.rows, load.blocks))
            with self._changed:
                self._on_loaded(load, ok)
        elif save is not None:
            ok = self._tried(lambda: self._slabs.copy_out(save.blocks, save.rows))
            with self._changed:
                self._tier.saved(save, ok=ok)
        return load is not None or save is not None

    def _tried(self, copy: Callable[[], None]) -> bool:
        """Returns whether it succeeded; the first of several failures in a row is logged."""
        try:
            copy()
        except Exception:
            if not self._failing:
                log.exception("KV blocks cannot be copied between the pool and host memory: prefixes are computed again instead")
            self._failing = True
            return False
        self._failing = False
        return True
