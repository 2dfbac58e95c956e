"""Text that arrives in pieces, wrapped at words, with a status line below that is always up to date.

Escape sequences are those of ECMA-48 and the VT100: CSI J (erase below), CSI n D (left), CSI B (down), IND and RI (down and up a line,
scrolling if need be), DECSC and DECRC (save and restore the cursor).
"""

from __future__ import annotations

from twostep.cli._terminal import Terminal, char_width, clipped

_TAB = " " * 4
_FENCE = "```"
_ERASE_BELOW = "\x1b[J"
# There is a line below the cursor's, and the cursor is where it was.
_MAKE_ROOM = "\x1bD\x1bM"
_BELOW, _BACK = "\x1b7\r\x1b[B", "\x1b8"


class Wrapper:
    """What to write for the next characters of a text, so that lines break between words.

    A word that turns out not to fit is taken back and written again on the next line. The last column stays free: there the cursor's place
    is not the same on all terminals. In fenced code the terminal breaks lines itself, so that they are copied as they are.
    """

    def __init__(self) -> None:
        self._column = 0
        self._word = ""
        self._word_width = 0
        self._line = ""
        self._code = False

    @property
    def column(self) -> int:
        """Columns of the line that are taken."""
        return self._column

    def feed(self, text: str, width: int) -> str:
        """`width`: columns of the terminal."""
        return "".join([self._char(char, max(2, width)) for char in text.replace("\t", _TAB)])

    def at_edge(self, width: int) -> bool:
        """The next character may go to another line, and until it has come the cursor's place is not sure."""
        return self._column >= width

    def _char(self, char: str, width: int) -> str:
        if char == "\n":
            if self._line.lstrip().startswith(_FENCE):
                self._code = not self._code
            self._column = self._word_width = 0
            self._word = self._line = ""
            return "\n"
        columns = char_width(char)
        if len(self._line) < width:
            self._line += char
        if self._code or self._line.lstrip().startswith(_FENCE):
            self._column = columns if self._column + columns > width else self._column + columns
            return char
        if char == " ":
            self._word, self._word_width = "", 0
            if self._column + 1 >= width:
                return ""
            self._column += 1
            return char
        if self._column + columns < width:
            self._column += columns
            self._extend(char, columns)
            return char
        return self._next_line(char, columns, width)

    def _next_line(self, char: str, columns: int, width: int) -> str:
        if not self._word or self._word_width + columns >= width:
            # Nothing to take with it, or it would not fit there either.
            self._word, self._word_width, self._column = "", 0, columns
            self._extend(char, columns)
            return "\n" + char
        word, taken = self._word, self._word_width
        self._column = taken + columns
        self._extend(char, columns)
        return f"\x1b[{taken}D\x1b[K\n{word}{char}" if taken else f"\n{word}{char}"

    def _extend(self, char: str, columns: int) -> None:
        if columns == 2:
            # Lines may break on both sides of an ideograph.
            self._word, self._word_width = "", 0
        else:
            self._word += char
            self._word_width += columns


class Flow:
    """An answer on a live terminal. Not live: text goes out as it comes, and there is no status line."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._wrapper = Wrapper()
        self._status = ""

    @property
    def column(self) -> int:
        return self._wrapper.column

    def write(self, text: str, *styles: str) -> None:
        """More text. It goes where the last text ended; the status stays below."""
        if not self._terminal.live:
            self._wrapper.feed(text, 1 << 30)
            self._terminal.write(text)
            return
        width = self._terminal.size().columns
        wrapped = self._wrapper.feed(text, width)
        self._terminal.write(self._erased() + self._terminal.paint(wrapped, *styles) + self._drawn(width))

    def status(self, line: str) -> None:
        """Shown below the text from now on; empty: nothing is."""
        if self._terminal.live and line != self._status:
            erased = self._erased()
            self._status = line
            self._terminal.write(erased + self._drawn(self._terminal.size().columns))

    def _erased(self) -> str:
        return _ERASE_BELOW if self._status else ""

    def _drawn(self, width: int) -> str:
        if not self._status or self._wrapper.at_edge(width):
            return ""
        return _MAKE_ROOM + _BELOW + self._terminal.paint(clipped(self._status, width - 1), "dim") + _BACK
