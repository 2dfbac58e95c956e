"""Knows what standard output can show, and text made fit for it. Plain ANSI (ECMA-48), where it is understood."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TextIO

_FALLBACK = os.terminal_size((80, 24))
_ZERO_WIDTH = frozenset(("Mn", "Me", "Cf"))
# Select graphic rendition.
STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


@dataclass(frozen=True, slots=True)
class Terminal:
    """`live`: the cursor can be moved. `color`: so can the look of text be changed (https://no-color.org)."""

    stream: TextIO
    live: bool
    color: bool

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str]) -> Terminal:
        live = stream.isatty() and environ.get("TERM", "dumb") not in ("", "dumb")
        return cls(stream, live, live and not environ.get("NO_COLOR"))

    def size(self) -> os.terminal_size:
        """Columns and lines of now: it may have been resized."""
        try:
            size = os.get_terminal_size(self.stream.fileno())
        except (OSError, ValueError):
            size = shutil.get_terminal_size(_FALLBACK)
        # Some terminals say that they have neither.
        return os.terminal_size((size.columns or _FALLBACK.columns, size.lines or _FALLBACK.lines))

    def paint(self, text: str, *styles: str) -> str:
        if not self.color or not styles or not text:
            return text
        return f"\x1b[{';'.join(STYLES[style] for style in styles)}m{text}\x1b[0m"

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def char_width(char: str) -> int:
    """Columns that a character takes: 2 for East Asian wide ones and emoji, 0 for those that join the one before (Unicode TR 11)."""
    if char < "\x7f":
        return 1
    if unicodedata.category(char) in _ZERO_WIDTH or char == "\u200b":
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def width_of(text: str) -> int:
    return sum(map(char_width, text))


def clipped(text: str, width: int) -> str:
    if width_of(text) <= width:
        return text
    kept, columns = [], 0
    for char in text:
        columns += char_width(char)
        if columns > width - 1:
            break
        kept.append(char)
    return "".join(kept) + "…" if width > 0 else ""


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """Keeps what is typed meanwhile from showing up in the midst of what is written; it is there when it is read."""
    if not sys.stdin.isatty():
        yield
        return
    termios = importlib.import_module("termios")
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(descriptor, termios.TCSANOW, silent)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
