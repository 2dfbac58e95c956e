"""Text of others made fit for a terminal: it shows all that it holds and commands nothing."""

from __future__ import annotations

import re

# Unicode's category Cc, but for line feeds and tabs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Select graphic rendition (ECMA-48).
_COLOR = re.compile("\x1b\\[[0-9;:]*m")


def harmless(text: str) -> str:
    """Returns text with its control characters made visible. Line feeds and tabs stay, carriage returns go."""
    return _CONTROL.sub(_picture, text)


def log_line(text: str) -> str:
    """Returns a line of another process's log: without colors, and harmless."""
    return harmless(_COLOR.sub("", text))


def _picture(found: re.Match[str]) -> str:
    char = found[0]
    return "" if char == "\r" else chr(0x2400 + ord(char)) if char < " " else "\u2421" if char == "\x7f" else "\ufffd"
