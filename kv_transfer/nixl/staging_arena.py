"""Slots of the one registered region that reads land in, before what arrived is verified and copied into the pool.

    region   [ slot 0: landing ][ slot 1: verified, being copied out ][ free ][ slot 2: quarantined ]

A slot's owner is the peer that is read from. A read that its caller gave up on can still write: its slot is quarantined, and free only
once the read has ended. No owner has more than half of the region (but for a single slot), so that a peer that stops answering leaves
room for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.slot_allocator import SlotAllocator


@dataclass(frozen=True, slots=True)
class ArenaSlot:
    """Bytes [offset, offset + num_bytes) of the region."""

    offset: int
    num_bytes: int
    owner: str


class StagingArena:
    """Pure; not thread-safe: one event loop owns it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._allocator = SlotAllocator(num_bytes)
        self._taken: dict[int, ArenaSlot] = {}
        self._quarantined: dict[int, ArenaSlot] = {}

    @property
    def used_bytes(self) -> int:
        """Returns the bytes of all slots, in whole pages; quarantined ones included."""
        return self._allocator.used_bytes

    @property
    def quarantined_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self._quarantined.values())

    def held_bytes(self, owner: str) -> int:
        """Returns the bytes of the owner's slots, quarantined ones included."""
        return sum(slot.num_bytes for slots in (self._taken, self._quarantined) for slot in slots.values() if slot.owner == owner)

    def take(self, owner: str, num_bytes: int) -> ArenaSlot | None:
        """Returns None while there is no room, or none for this owner."""
        held = self.held_bytes(owner)
        if held and held + num_bytes > self.num_bytes // 2:
            return None
        offset = self._allocator.allocate(num_bytes)
        if offset is None:
            return None
        slot = self._taken[offset] = ArenaSlot(offset, num_bytes, owner)
        return slot

    def quarantine(self, slot: ArenaSlot) -> None:
        """To be called when nothing waits for it, but its memory may still be written. Raises KeyError unless it is taken."""
        if self._taken.get(slot.offset) is not slot:
            raise KeyError(slot)
        self._quarantined[slot.offset] = self._taken.pop(slot.offset)

    def give_back(self, slot: ArenaSlot) -> None:
        """Frees a taken or quarantined slot. Raises KeyError if it is neither."""
        for slots in (self._taken, self._quarantined):
            if slots.get(slot.offset) is slot:
                del slots[slot.offset]
                self._allocator.free(slot.offset)
                return
        raise KeyError(slot)
