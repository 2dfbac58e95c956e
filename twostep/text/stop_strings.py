"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one answer; not thread-safe.

    The answer ends before the stop string that is complete first; if several are complete at the same character, before the
    longest of them. So the outcome does not depend on how the text was cut into pieces, and no text waits for a longer stop string
    once a shorter one is there. Held back is only the longest end of the text that may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` must not contain the empty string."""
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(dict.fromkeys(stops))
        self._beginnings = frozenset(stop[:size] for stop in self._stops for size in range(1, len(stop)))
        self._max_held = max((len(stop) - 1 for stop in self._stops), default=0)
        self._held = ""
        # The stop string that ended the answer, if one did; it is no part of any text.
        self.matched: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Takes the next piece, returns what may be sent. After a match everything is swallowed. `may_end` false: a stop string that is
        complete within this piece is text like any other; one that only begins in it may still end the answer."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        num_held = len(self._held)
        text = self._held + text
        # What was held back may have a shorter stop string in it that was not to end the answer: a match has to end in the new piece.
        found = (
            [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0]
            if may_end
            else []
        )
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = next((n for n in range(min(self._max_held, len(text)), 0, -1) if text[-n:] in self._beginnings), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The answer is over: what was held back turned out to be no stop string."""
        text, self._held = self._held, ""
        return text
