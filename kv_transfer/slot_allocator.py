"""Contiguous slots of a fixed memory: of the ring between a worker and its KV agent, of the arena that reads over NIXL land in."""

from __future__ import annotations

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
