"""Bounds the memory of answers that no client has taken yet: of each caller, and of all. Pure.

A caller may hold `of_caller` bytes, and never more than is still free of `of_all` (the dynamic threshold of switches' shared buffers: A. K.
Choudhury, E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). So n callers that take all they can get
leave 1 / (n + 1) of it to the next one, and `of_all` is never exceeded.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Self

from twostep.errors import ResourceExhausted

# What one caller's answers may come to; a request that could come to more is refused before it begins.
CALLER_BYTES = 256 << 20
ALL_BYTES = 1 << 30


class MemoryBudget:
    """One for each router."""

    def __init__(self, *, of_caller: int = CALLER_BYTES, of_all: int = ALL_BYTES) -> None:
        self.of_caller, self.of_all = of_caller, of_all
        self._held: Counter[str] = Counter()
        self.num_held = 0  # bytes, of all callers

    def hold(self, caller: str) -> Holding:
        """Opens the account of one answer; it holds nothing yet."""
        return Holding(self, caller)

    def change(self, caller: str, num_bytes: int) -> bool:
        """Counts more bytes, or fewer where it is negative. Returns False, and changes nothing, where there is no room for so many."""
        held = self._held[caller] + num_bytes
        if num_bytes > 0 and held > min(self.of_caller, self.of_all - self.num_held):
            return False
        assert held >= 0, "no more is given back than was taken"
        self.num_held += num_bytes
        if held:
            self._held[caller] = held
        else:
            del self._held[caller]
        return True


class Holding:
    """Holds bytes for one answer, and none after the end of its context."""

    def __init__(self, budget: MemoryBudget, caller: str) -> None:
        self._budget, self._caller = budget, caller
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Holds so many bytes more, fewer where it is negative. Raises ResourceExhausted, and holds what it held."""
        if not self._budget.change(self._caller, num_bytes):
            raise ResourceExhausted(
                f"answers that you have not taken yet fill the memory that there is for them ({self._budget.of_caller >> 20} MiB of one "
                "caller at most); read them, stream them, or ask for fewer at a time"
            )
        self.num_bytes += num_bytes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.add(-self.num_bytes)
