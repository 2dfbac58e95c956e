"""Who owns which block of the KV pool: reference counts, prefix reuse and eviction. Bookkeeping only, no bytes.

                 allocate                        free (last owner)
       free ───────────────▶ owned (1..n owners) ──────────────────▶ cached, if registered   (LRU, findable, evictable)
        ▲                      ▲        │                                │   │
        │                      └────────┼───── share (prefix found) ─────┘   │
        └───── free (last owner) ◀──────┘ if not registered                  │ allocate takes the oldest when
                                                                             ▼ nothing is free: evicted, owned anew

A full block is registered under the hash of all tokens up to its end. Its parent is the block of the unit before. An owner of a
registered block owns its registered parents too (see `register`), and `free` lets go of tails first; so plain LRU order never
evicts a head before its tail, and every registered hash can be found from the sequence's start. But where sequences leave blocks behind
(windows, block_manager.py), a head may be evicted first: its tail is found by those who do not need that head, and else goes in its turn.

Where layers are in several groups, each has a block under a hash, found and evicted by itself.

Where the model has a state of each sequence, that at the end of a registered block may be kept too, in blocks of its own (`keep_state`):
owned, cached and evicted like the others, all of them together. They go with the block at whose end they are; that may stay without them,
and is evicted after them: they are as recently used as it is.

A block's generation is one more each time `allocate` gives the block to new content; sharing what it holds changes nothing. A
reader that does not own the block compares generations afterwards: equal ones mean that the content was not replaced meanwhile.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, product
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostep.engine.types import PrefixDelta
from twostep.errors import InternalError, ResourceExhausted
from twostep.prefix import HASH_BYTES


class NetChange:
    """Collects which hashes came to a set and went since the last `take`. Net, and so bounded by the set however rarely that is: a hash
    that came and went again, or the other way round, is in neither list."""

    def __init__(self) -> None:
        # Dicts for their order. `_removed` holds only hashes that were once taken as added.
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def add(self, digest: bytes) -> None:
        """Notes a hash that was not there and is now."""
        if digest in self._removed:
            del self._removed[digest]
        else:
            self._added[digest] = None

    def remove(self, digest: bytes) -> None:
        """Notes a hash that was there and is no more."""
        if digest in self._added:
            del self._added[digest]
        else:
            self._removed[digest] = None

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Returns what was added, and what was removed, since the last call."""
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed


class CacheWatcher(Protocol):
    """Keeps what the pool gives up. Called in the midst of it: it looks, and changes nothing in the pool."""

    def on_cached(self, block: int) -> None:
        """Is called when a findable block has lost its last owner."""
        ...

    def on_taken(self, block: int) -> None:
        """Is called when such a block has an owner again, or is about to be given to new content; its hash leads to it still."""
        ...


# Generations wrap like this unsigned integer: no reader is late by four thousand million reuses of one block.
_GENERATIONS = 1 << 32
# Blocks that are looked at in one go, in which no other thread runs: a millisecond.
_PART = 1 << 14


class BlockPool:
    """Not thread-safe: the engine's lock guards it."""

    def __init__(self, num_blocks: int, *, block_size: int, hash_unit: int, has_states: bool = False, num_groups: int = 1) -> None:
        """`hash_unit`: tokens between boundaries that the prefix delta speaks of, a multiple of `block_size`. `has_states`: a prefix is of
        use only with the state at its end, and the delta speaks of no other. `num_groups`: of layers, each of which has a block under a
        hash; the delta speaks of those that all of them have."""
        self.num_blocks = num_blocks
        self._num_groups = num_groups
        self._announced_every = hash_unit // block_size
        # Arrays, which cost a look no more than lists do, and are summed in a moment however many blocks there are.
        self._free = array("i", np.arange(num_blocks - 1, -1, -1, dtype=np.int32).tobytes())
        self._num_owners = array("i", bytes(4 * num_blocks))
        self._generations = array("I", bytes(4 * num_blocks))
        # The sum of all generations, counted apart from them.
        self._num_given = 0
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._boundary = bytearray(num_blocks)  # 1: the block ends at a hash-unit boundary
        self._block_of: dict[bytes, int] = {}
        self._has_states = has_states
        # Blocks of the states that are kept, by the hash of the KV block that ends where they do.
        self._states: dict[bytes, Sequence[int]] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._change = NetChange()
        self._watcher: CacheWatcher | None = None

    @property
    def num_groups(self) -> int:
        """Groups of layers, each of which has a block under a hash."""
        return self._num_groups

    @property
    def num_free(self) -> int:
        """Blocks with neither owner nor content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without owner that hold a findable prefix."""
        return len(self._lru)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give now."""
        return len(self._free) + len(self._lru)

    def num_owners(self, block: int) -> int:
        return self._num_owners[block]

    def generation(self, block: int) -> int:
        """Returns the block's generation, uint32; see above."""
        return self._generations[block]

    def hash_of(self, block: int) -> bytes | None:
        """Returns the key under which it, or the state that it is of, is findable: its hash, and after that its group of layers, but for
        the first. None: it is not."""
        return self._hash_of[block]

    def cached(self) -> list[int]:
        """Returns the blocks without owner that hold a findable prefix: those given out first come first."""
        return list(self._lru)

    def announces(self, block: int) -> bool:
        """Returns whether it is findable and ends at a hash-unit boundary."""
        return bool(self._boundary[block])

    def watch(self, watcher: CacheWatcher) -> None:
        """Reports cached blocks to this one watcher from now on; there are none yet. A watcher knows of no states."""
        assert not self._lru
        assert not self._has_states
        self._watcher = watcher

    def find(self, digest: bytes, group: int = 0) -> int | None:
        """Returns a group's block under a hash, if there is one."""
        return self._block_of.get(group_key(digest, group) if group else digest)

    def lookup(self, hashes: Sequence[bytes], group: int = 0) -> list[int]:
        """Returns a group's blocks of the longest known chain. They are not owned yet: `share` them before anything is allocated."""
        found = []
        for digest in hashes:
            block = self._block_of.get(group_key(digest, group) if group else digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """Returns how many of them count as available now: sharing them takes so much room."""
        return sum(1 for block in blocks if not self._num_owners[block])

    def share(self, blocks: Iterable[int]) -> None:
        """Adds an owner to each of these blocks, owned or cached."""
        for block in blocks:
            if self._num_owners[block] == 0:
                assert self._hash_of[block] is not None, f"block {block} is free"
                del self._lru[block]
                if self._watcher is not None:
                    self._watcher.on_taken(block)
            self._num_owners[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks with one owner and undefined content; evicts the least recently used prefixes if it must.
        Raises ResourceExhausted and takes none if there are not enough."""
        if count > self.num_available:
            raise ResourceExhausted(f"{count} KV blocks are needed and {self.num_available} are free; try again later or elsewhere")
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._lru.popitem(last=False)
                if self._watcher is not None:
                    self._watcher.on_taken(block)
                self._forget(block)
            self._num_owners[block] = 1
            self._give(block)
            taken.append(block)
        return taken

    def _give(self, block: int) -> None:
        """Notes that it is for new content."""
        self._generations[block] = (self._generations[block] + 1) % _GENERATIONS
        self._num_given += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Takes an owner from each block of one sequence, given in its own order: the tail goes first, to be evicted first."""
        for block in reversed(blocks):
            owners = self._num_owners[block] - 1
            assert owners >= 0, f"block {block} is freed twice"
            self._num_owners[block] = owners
            if owners == 0:
                digest = self._hash_of[block]
                if digest is None:
                    self._free.append(block)
                else:
                    for each in self._states.get(digest, ()):
                        if each in self._lru:
                            self._lru.move_to_end(each)
                    self._lru[block] = None
                    if self._watcher is not None:
                        self._watcher.on_cached(block)

    def register(self, block: int, digest: bytes, index: int, group: int = 0, *, exchange: bool = True) -> int:
        """Makes an owned block, `index`-th of its sequence, full and computed, findable as a group's of `digest`. The blocks before it must
        be registered, or out of its reach. If another block holds the same prefix already, the caller takes that one in exchange for its
        own, so that chains stay whole; the return value is the block it owns now. Without `exchange` it keeps its own, which then is not
        findable."""
        key = group_key(digest, group)
        known = self._block_of.get(key)
        if known == block or (known is not None and not exchange):
            return block
        if known is not None:
            self.share((known,))
            self.free((block,))
            return known
        assert self._num_owners[block] > 0, f"block {block} has no owner"
        assert self._hash_of[block] is None, f"block {block} holds another prefix"
        self._hash_of[block] = key
        self._block_of[key] = block
        if (index + 1) % self._announced_every == 0:
            self._boundary[block] = 1
            if not self._has_states and self._all_have(digest):
                self._change.add(digest)
        return block

    def _all_have(self, digest: bytes) -> bool:
        """Returns whether there is a block of each group under a hash."""
        return all(group_key(digest, group) in self._block_of for group in range(self._num_groups))

    def num_with_state(self, hashes: Sequence[bytes]) -> int:
        """Returns how many of a chain's hashes there are up to the last one at which a state is kept; 0: none is."""
        return next((i + 1 for i in reversed(range(len(hashes))) if hashes[i] in self._states), 0)

    def state_at(self, digest: bytes) -> Sequence[int]:
        """Returns the blocks of the state that is kept there, to be shared like others and only read; none: there is none."""
        return self._states.get(digest, ())

    def keep_state(self, digest: bytes, blocks: Sequence[int]) -> bool:
        """Makes owned blocks, which nobody writes any more, findable as the state at a hash-unit boundary. False: there is no such
        prefix, or its state is kept already."""
        block = self._block_of.get(digest)
        if block is None or digest in self._states or not self._boundary[block]:
            return False
        for each in blocks:
            assert self._num_owners[each] > 0, f"block {each} has no owner"
            assert self._hash_of[each] is None, f"block {each} holds another prefix"
            self._hash_of[each] = digest
        self._states[digest] = blocks
        self._change.add(digest)
        return True

    def take_state(self, digest: bytes) -> Sequence[int]:
        """Returns the blocks of a cached state with one owner, who goes on in them: it can be found no more."""
        blocks = self._states[digest]
        assert not any(self._num_owners[block] for block in blocks), "others read it"
        self.share(blocks)
        self.drop_state(digest)
        for block in blocks:
            self._give(block)
        return blocks

    def drop_state(self, digest: bytes) -> None:
        """Lets a state be found no more, if one is kept there. Owners of its blocks keep them."""
        blocks = self._states.pop(digest, None)
        if blocks is None:
            return
        self._change.remove(digest)
        for block in blocks:
            self._hash_of[block] = None
            if block in self._lru:
                del self._lru[block]
                self._free.append(block)

    def withdraw(self, hashes: Iterable[bytes]) -> None:
        """Makes what is findable as one of these so no more: its content is not to be trusted. Owners of such a block keep it. What follows
        on it cannot be found either, until the same prefix is computed again."""
        for digest, group in product(hashes, range(self._num_groups)):
            block = self.find(digest, group)
            if block is None:
                continue
            self.share((block,))
            self._forget(block)
            self.free((block,))

    def _forget(self, block: int) -> None:
        key = self._hash_of[block]
        assert key is not None
        self.drop_state(key)
        if self._block_of[key] != block:
            return  # it was of that state
        self._hash_of[block] = None
        if self._boundary[block]:
            self._boundary[block] = 0
            if not self._has_states and self._all_have(digest := key[:HASH_BYTES]):
                self._change.remove(digest)
        del self._block_of[key]

    def take_delta(self) -> PrefixDelta:
        """Returns what changed at hash-unit boundaries, where there is a state if the model has one, since the last call; net."""
        added, removed = self._change.take()
        return PrefixDelta(added=added, removed=removed)

    def findable(self) -> list[bytes]:
        """Returns all findable hashes at such boundaries."""
        if self._has_states:
            return list(self._states)
        return [key for key, block in self._block_of.items() if self._boundary[block] and len(key) <= HASH_BYTES and self._all_have(key)]

    def check_integrity(self, owners: Iterable[Sequence[int] | npt.NDArray[np.int32]]) -> None:
        """`owners`: the block lists of everything that owns some. O(blocks), of which none that is free costs more than a few nanoseconds;
        other threads have their turns meanwhile. Raises InternalError naming what does not add up."""
        expected = np.zeros(self.num_blocks, dtype=np.int32)
        for blocks in owners:
            np.add.at(expected, np.asarray(blocks, dtype=np.int64), 1)
        counted = np.frombuffer(self._num_owners, np.int32)
        wrong = np.flatnonzero(expected != counted)
        if wrong.size:
            block = int(wrong[0])
            raise InternalError(f"block {block} has {expected[block]} owners and counts {counted[block]} ({wrong.size} such blocks)")
        # A copy: an array that is looked into cannot grow.
        free, cached = np.frombuffer(self._free, np.int32).copy(), _numbers(self._lru, len(self._lru))
        listed = np.zeros(self.num_blocks, dtype=bool)
        listed[free] = listed[cached] = True
        if np.count_nonzero(listed) != len(free) + len(cached) or not np.array_equal(listed, counted == 0):
            raise InternalError(f"{np.sum(counted == 0)} blocks have no owner, {len(free)} are listed free and {len(cached)} cached")
        hashed = np.zeros(self.num_blocks, dtype=bool)
        hashed[_numbers(self._block_of.values(), len(self._block_of))] = True
        of_states = [(block, digest) for digest, blocks in self._states.items() for block in blocks]
        hashed[_numbers((block for block, _ in of_states), len(of_states))] = True
        if hashed[free].any() or not hashed[cached].all():
            raise InternalError("a free block has a hash, or a cached one has none")
        num_hashed, num_listed = self.num_blocks - self._hash_of.count(None), len(self._block_of) + len(of_states)
        if (
            num_listed != num_hashed
            or any(self._hash_of[block] != digest for digest, block in self._block_of.items())
            or any(self._hash_of[block] != digest for block, digest in of_states)
        ):
            raise InternalError(f"{num_hashed} blocks have a hash and {num_listed} are listed with one, or they disagree")
        if any(not self._boundary[self._block_of.get(digest, 0)] or digest not in self._block_of for digest in self._states):
            raise InternalError("a state is kept where no prefix ends")
        num_given = int(np.sum(np.frombuffer(self._generations, np.uint32), dtype=np.uint64))
        if (num_given - self._num_given) % _GENERATIONS:
            raise InternalError(f"the blocks' generations add up to {num_given}, but {self._num_given} blocks were given out")


def group_key(digest: bytes, group: int) -> bytes:
    """Returns the key of a group's block under a hash."""
    return digest + bytes((group,)) if group else digest


def _numbers(numbers: Iterable[int], count: int) -> npt.NDArray[np.int32]:
    """Returns an iterator's numbers as an array, like numpy's fromiter, which would let no other thread run before its end."""
    rest = iter(numbers)
    parts = [np.fromiter(islice(rest, _PART), np.int32) for _ in range(0, count, _PART)]
    return np.concatenate([np.empty(0, np.int32), *parts])
