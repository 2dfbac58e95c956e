"""Contiguous slots of a fixed memory: of the ring between a worker and its KV agent, of the arena that reads over NIXL land in."""

from __future__ import annotations

from dataclasses import dataclass

# Slots start at multiples of this.
_ALIGNMENT = 4096


class SlotAllocator:
    """Contiguous slots of [0, num_bytes), first fit. Pure; not thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._slots: dict[int, int] = {}  # offset -> length, in order of offsets

    @property
    def used_bytes(self) -> int:
        return sum(self._slots.values())

    def allocate(self, num_bytes: int) -> int | None:
        """Returns the offset of a free slot, or None while there is none."""
        length = max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT
        start = 0
        for offset, taken in self._slots.items():
            if offset - start >= length:
                break
            start = offset + taken
        if start + length > self._num_bytes:
            return None
        self._slots[start] = length
        self._slots = dict(sorted(self._slots.items()))
        return start

    def free(self, offset: int) -> None:
        """Gives a slot back. Raises KeyError if it is not taken."""
        del self._slots[offset]


@dataclass(eq=False, slots=True)
class ArenaSlot:
    """Bytes [offset, offset + num_bytes) of the arena. `owner`: the peer that is read from."""

    offset: int
    num_bytes: int
    owner: str
    quarantined: bool = False


class StagingArena:
    """Slots of the one registered region that reads land in, before what arrived is copied into the pool. Pure; not thread-safe.

        [ slot 0: landing ][ slot 1: being copied out ][ free ][ slot 2: quarantined ]

    A read that its caller gave up on can still write: its slot is quarantined, and free only once the read has ended. No owner has more
    than half of the region (but for a single slot), so that a peer that stops answering leaves room for the others.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._allocator = SlotAllocator(num_bytes)
        self._slots: dict[int, ArenaSlot] = {}

    @property
    def used_bytes(self) -> int:
        """Returns the bytes of all slots, in whole pages; quarantined ones included."""
        return self._allocator.used_bytes

    @property
    def quarantined_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self._slots.values() if slot.quarantined)

    def take(self, owner: str, num_bytes: int) -> ArenaSlot | None:
        """Returns None while there is no room, or none for this owner."""
        held = sum(slot.num_bytes for slot in self._slots.values() if slot.owner == owner)
        if held and held + num_bytes > self.num_bytes // 2:
            return None
        offset = self._allocator.allocate(num_bytes)
        if offset is None:
            return None
        slot = self._slots[offset] = ArenaSlot(offset, num_bytes, owner)
        return slot

    def quarantine(self, slot: ArenaSlot) -> None:
        """To be called when nothing waits for it, but its memory may still be written. Raises KeyError unless it is taken."""
        if self._slots.get(slot.offset) is not slot or slot.quarantined:
            raise KeyError(slot)
        slot.quarantined = True

    def give_back(self, slot: ArenaSlot) -> None:
        """Frees a taken or quarantined slot. Raises KeyError if it is neither."""
        if self._slots.get(slot.offset) is not slot:
            raise KeyError(slot)
        del self._slots[slot.offset]
        self._allocator.free(slot.offset)
