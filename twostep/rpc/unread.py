"""How much is held of answers that their clients do not take.

gRPC keeps an answer of one message until its client has room for it, or until the connection ends, and offers no way to take it back. So
what is kept is counted, for each caller and altogether, and an answer that would be too much is not given.
"""

from __future__ import annotations

from collections import Counter

from twostep.errors import ResourceExhausted

_OF_CALLER_BYTES = 64 << 20
_OF_ALL_BYTES = 1 << 30
# Smaller answers are no burden: they are always given.
_SMALL_BYTES = 64 << 10


class Unread:
    def __init__(self, *, of_caller: int = _OF_CALLER_BYTES, of_all: int = _OF_ALL_BYTES) -> None:
        self._of_caller = of_caller
        self._of_all = of_all
        self._held: Counter[str] = Counter()
        self.num_bytes = 0

    def add(self, caller: str, num_bytes: int) -> None:
        """Raises ResourceExhausted. A single answer of a caller, however large, is given."""
        held = self._held[caller]
        if num_bytes > _SMALL_BYTES and held and (held + num_bytes > self._of_caller or self.num_bytes + num_bytes > self._of_all):
            raise ResourceExhausted(f"answers of {held} bytes were not read yet; read them, or ask for less at a time")
        self._held[caller] += num_bytes
        self.num_bytes += num_bytes

    def remove(self, caller: str, num_bytes: int) -> None:
        self._held[caller] -= num_bytes
        self.num_bytes -= num_bytes
        if self._held[caller] <= 0:
            del self._held[caller]
