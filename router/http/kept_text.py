"""The text of a whole answer while it comes, token by token."""

from __future__ import annotations

import sys

# Strings of a few characters take ten times as much memory as what they say.
_JOINED = 64


class KeptText:
    def __init__(self) -> None:
        self._whole: list[str] = []
        self._recent: list[str] = []
        # All but what came last.
        self.num_bytes = 0

    def add(self, text: str) -> None:
        if not text:
            return
        self._recent.append(text)
        if len(self._recent) >= _JOINED:
            self._whole.append("".join(self._recent))
            self._recent.clear()
            self.num_bytes += sys.getsizeof(self._whole[-1])

    def __str__(self) -> str:
        return "".join((*self._whole, *self._recent))
