"""Reasoning: what a model thinks before it answers, told apart from the answer while both arrive.

    "\\n<think>\\nLet me see.\\n</think>\\n\\nIt is 4."    reasoning "Let me see."    text "It is 4."

Reasoning stands at the beginning of an answer, once. Some chat templates open it in the prompt, so that the answer begins inside. The line
breaks that templates write around markers (one inside each, two after the closing one) belong to the markers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

# White space before an opening marker, at most; an answer that begins with more does not think.
_MAX_LEADING = 16
_MAX_BREAKS_AFTER = 2


class Begun(Enum):
    """Whether reasoning has begun where an answer does."""

    NOT_YET = 0  # the model may begin it
    YES = 1
    OVER = 2


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers of a model. `implicit`: an answer without the opening one is reasoning as well, until the closing one."""

    opening: str
    closing: str
    implicit: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """What answers have to show, so that their parts can be told apart."""
        return self.opening, self.closing

    def splitter(self, begun: Begun) -> ReasoningSplitter:
        return ReasoningSplitter(self, begun=begun is Begun.YES)

    def begun_in(self, prompt: str, continued: str | None = None) -> Begun:
        """Where the answer to `prompt`, a chat as its template renders it, begins. `continued`: what the prompt's last message, which the
        answer goes on with, has so far."""
        if continued is not None:
            opened, closed = continued.rfind(self.opening), continued.rfind(self.closing)
            return Begun.YES if opened > closed else Begun.NOT_YET if opened == closed and not continued.strip() else Begun.OVER
        tail = prompt[-256:].rstrip()
        if tail.endswith(self.closing):
            return Begun.OVER
        return Begun.YES if tail.endswith(self.opening) or self.implicit else Begun.NOT_YET


class SplitText(NamedTuple):
    """Holds what a piece of an answer adds to each; the reasoning comes first."""

    reasoning: str
    text: str


class Splitter(Protocol):
    """Watches one answer. The outcome does not depend on how the text was cut into pieces; held back is only what may become a marker."""

    # There was reasoning.
    opened: bool

    @property
    def thinking(self) -> bool:
        """Not known to be over; the answer's text has not begun."""
        ...

    @property
    def settled(self) -> bool:
        """All that comes is text: there is nothing more to look for."""
        ...

    def push(self, text: str) -> SplitText: ...

    def finish(self) -> SplitText:
        """The answer is over: what was held back was no marker."""
        ...


class _State(Enum):
    BEFORE = 0  # nothing seen that would tell
    INSIDE = 1
    AFTER = 2  # line breaks may follow the closing marker
    OUTSIDE = 3


class ReasoningSplitter:
    """Watches one answer; not thread-safe. The outcome does not depend on how the text was cut into pieces, and with the markers put back
    it is the text again. Held back is only what may become a marker."""

    def __init__(self, format: ReasoningFormat, *, begun: bool) -> None:
        """`begun`: the answer begins inside reasoning. A model that opens it once more all the same is understood."""
        self._format = format
        self._begun = begun
        self._state = _State.BEFORE
        self._held = ""
        self._at_start = True  # of the reasoning: a line break belongs to the opening marker
        self._num_breaks = 0
        # The closing marker with the line break before it, and every beginning of either.
        closing = format.closing
        self._beginnings = frozenset(m[:n] for m in (closing, "\n" + closing) for n in range(1, len(m)))
        self.opened = False

    @property
    def thinking(self) -> bool:
        """Not known to be over; the answer's text has not begun."""
        return self._state in (_State.BEFORE, _State.INSIDE)

    @property
    def settled(self) -> bool:
        """All that comes is text: there is nothing more to look for."""
        return self._state is _State.OUTSIDE

    def push(self, text: str) -> SplitText:
        if self._state is _State.OUTSIDE:
            return SplitText("", text)
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._state is _State.BEFORE:
            text = self._begin(text)
        if self._state is _State.INSIDE:
            reasoning, text = self._think(text)
        if self._state is _State.AFTER:
            text = self._skip_breaks(text)
        return SplitText(reasoning, text if self.settled else "")

    def finish(self) -> SplitText:
        """The answer is over: what was held back was no marker."""
        held, self._held = self._held, ""
        before, inside = self._state is _State.BEFORE, self._state is _State.INSIDE
        self._state = _State.OUTSIDE
        if inside or (before and self._begun and held):
            self.opened = True
            return SplitText(held.removeprefix("\n") if self._at_start else held, "")
        return SplitText("", held)

    def _begin(self, text: str) -> str:
        opening = self._format.opening
        stripped = text.lstrip()
        num_leading = len(text) - len(stripped)
        if num_leading <= _MAX_LEADING:
            if stripped.startswith(opening):
                self._open()
                return stripped[len(opening) :]
            if opening.startswith(stripped):
                self._held = text
                return ""
        if self._begun:
            self._open()
        else:
            self._state = _State.OUTSIDE
        return text

    def _open(self) -> None:
        self._state, self.opened = _State.INSIDE, True

    def _think(self, text: str) -> tuple[str, str]:
        """Reasoning that is certain, and what follows the closing marker if it is there."""
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix("\n")
        closing = self._format.closing
        at = text.find(closing)
        if at >= 0:
            self._state = _State.AFTER
            return text[:at].removesuffix("\n"), text[at + len(closing) :]
        if closing[0] not in text and "\n" not in text:
            return text, ""  # nearly always
        longest = min(len(text), len(closing))
        keep = next((n for n in range(longest, 0, -1) if text[-n:] in self._beginnings), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def _skip_breaks(self, text: str) -> str:
        while text.startswith("\n") and self._num_breaks < _MAX_BREAKS_AFTER:
            text = text[1:]
            self._num_breaks += 1
        if text or self._num_breaks == _MAX_BREAKS_AFTER:
            self._state = _State.OUTSIDE
        return text
