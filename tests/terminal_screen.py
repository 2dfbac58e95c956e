"""A terminal for tests and pictures: what a VT100-like screen shows after the escape sequences that our commands and readline write."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fcntl import ioctl

from twostep.cli._terminal import char_width

_SEQUENCE = re.compile(r"\x1b(?:\[(?P<args>[0-9;?]*)(?P<final>[@-~])|(?P<plain>[78DM=>])|\](?P<osc>[^\x07\x1b]*)(?:\x07|\x1b\\))")


@dataclass(frozen=True, slots=True)
class Style:
    bold: bool = False
    dim: bool = False
    inverse: bool = False
    color: int | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A wide character fills two: the second is empty."""

    char: str = " "
    style: Style = field(default_factory=Style)


class Screen:
    """Feed it what a program writes. Raises ValueError for a sequence that it does not know."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.scrolled: list[list[Cell]] = []
        self.rows = [self._blank() for _ in range(height)]
        self.row = self.column = 0
        self.style = Style()
        self.num_sequences = 0
        self.cursor_hidden = False
        self._pending = False
        self._saved = (0, 0, False)
        self._main: list[list[Cell]] | None = None
        self._rest = ""

    def lines(self) -> list[str]:
        """What is shown, without what has scrolled away."""
        return ["".join(cell.char for cell in row).rstrip() for row in self.rows]

    def text(self) -> str:
        """All there was, what has scrolled away included."""
        rows = [*self.scrolled, *self.rows]
        return "\n".join("".join(cell.char for cell in row).rstrip() for row in rows).rstrip("\n")

    def feed(self, text: str) -> None:
        text, at = self._rest + text, 0
        self._rest = ""
        while at < len(text):
            if text[at] != "\x1b":
                self._char(text[at])
                at += 1
                continue
            match = _SEQUENCE.match(text, at)
            if match is None:
                if len(text) - at < 16:
                    self._rest = text[at:]
                    return
                raise ValueError(f"unknown sequence {text[at : at + 16]!r}")
            self.num_sequences += 1
            self._sequence(match)
            at = match.end()

    def _blank(self) -> list[Cell]:
        return [Cell()] * self.width

    def _char(self, char: str) -> None:
        if char == "\n":
            self._pending = False
            self._down()
        elif char == "\r":
            self.column, self._pending = 0, False
        elif char == "\b":
            self.column, self._pending = max(0, self.column - 1), False
        elif char == "\t":
            self.column = min(self.width - 1, (self.column // 8 + 1) * 8)
        elif char in "\x07\x0e\x0f\x00":
            pass
        elif char < " ":
            raise ValueError(f"unknown control character {char!r}")
        else:
            self._print(char)

    def _print(self, char: str) -> None:
        columns = char_width(char)
        if columns == 0:
            return
        if self._pending or self.column + columns > self.width:
            self.column = 0
            self._down()
            self._pending = False
        self.rows[self.row][self.column] = Cell(char, self.style)
        if columns == 2:
            self.rows[self.row][self.column + 1] = Cell("", self.style)
        self.column += columns
        if self.column >= self.width:
            self.column, self._pending = self.width - 1, True

    def _down(self) -> None:
        if self.row < self.height - 1:
            self.row += 1
            return
        if self._main is None:
            self.scrolled.append(self.rows[0])
        self.rows = [*self.rows[1:], self._blank()]

    def _sequence(self, match: re.Match[str]) -> None:
        plain, final = match["plain"], match["final"]
        if match["osc"] is not None:
            return
        if plain is not None:
            self._plain(plain)
            return
        args = match["args"]
        numbers = [int(number) if number else 0 for number in args.lstrip("?").split(";")]
        count = max(1, numbers[0])
        if args.startswith("?"):
            self._mode(numbers, final == "h")
            return
        if final == "m":
            for number in numbers:
                self._rendition(number)
            return
        self._pending = False
        if final == "A":
            self.row = max(0, self.row - count)
        elif final == "B":
            self.row = min(self.height - 1, self.row + count)
        elif final == "C":
            self.column = min(self.width - 1, self.column + count)
        elif final == "D":
            self.column = max(0, self.column - count)
        elif final == "G":
            self.column = min(self.width, count) - 1
        elif final == "H":
            self.row, self.column = min(self.height, count) - 1, min(self.width, max(1, (numbers[1:] or [1])[0])) - 1
        elif final == "K":
            self.rows[self.row] = self.rows[self.row][: self.column] + [Cell()] * (self.width - self.column)
        elif final == "J" and numbers[0] in (0, 2):
            if numbers[0] == 2:
                self.rows = [self._blank() for _ in range(self.height)]
            else:
                self.rows[self.row] = self.rows[self.row][: self.column] + [Cell()] * (self.width - self.column)
                self.rows[self.row + 1 :] = [self._blank() for _ in range(self.height - self.row - 1)]
        elif final == "P":
            row = self.rows[self.row]
            self.rows[self.row] = row[: self.column] + row[self.column + count :] + [Cell()] * min(count, self.width - self.column)
        elif final == "@":
            row = self.rows[self.row]
            self.rows[self.row] = (row[: self.column] + [Cell()] * count + row[self.column :])[: self.width]
        else:
            raise ValueError(f"unknown sequence {match[0]!r}")

    def _plain(self, what: str) -> None:
        if what == "7":
            self._saved = (self.row, self.column, self._pending)
        elif what == "8":
            self.row, self.column, self._pending = self._saved
        elif what == "D":
            self._pending = False
            self._down()
        elif what == "M":
            self._pending = False
            assert self.row > 0, "nothing of ours scrolls back"
            self.row -= 1

    def _mode(self, numbers: Sequence[int], on: bool) -> None:
        for number in numbers:
            if number == 1049:
                if on:
                    self._main, self.rows = self.rows, [self._blank() for _ in range(self.height)]
                elif self._main is not None:
                    self._main, self.rows = None, self._main
            elif number == 25:
                self.cursor_hidden = not on
            elif number not in (7, 12, 1, 1034, 2004):
                raise ValueError(f"unknown mode {number}")

    def _rendition(self, number: int) -> None:
        if number == 0:
            self.style = Style()
        elif number in (1, 2, 7):
            self.style = replace(self.style, **{{1: "bold", 2: "dim", 7: "inverse"}[number]: True})
        elif 30 <= number <= 37 or 90 <= number <= 97:
            self.style = replace(self.style, color=number % 10 + (8 if number >= 90 else 0))
        else:
            raise ValueError(f"unknown rendition {number}")


class Session:
    """A program in a pseudo-terminal of `width` by `height`, and the screen that shows what it writes."""

    def __init__(self, command: Sequence[str], *, width: int = 80, height: int = 24, env: dict[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self._set_size(theirs, width, height)
        self.screen = Screen(width, height)
        self.raw = ""
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **(env or {})},
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    @staticmethod
    def _set_size(descriptor: int, width: int, height: int) -> None:
        ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def resize(self, width: int, height: int) -> None:
        """The program is told; the screen begins anew, as ours does not reflow."""
        self._set_size(self._ours, width, height)
        self.screen = Screen(width, height)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read(self, seconds: float) -> bool:
        """Takes what there is, waiting for it at most so long. False: the program has closed its side."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._ours, 65536)
        except OSError:
            return False
        text = data.decode("utf-8", "replace")
        self.raw += text
        self.screen.feed(text)
        return bool(data)

    def until(self, condition: Callable[[], object], seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.screen.text()
            if not self.read(0.1):
                assert condition(), self.screen.text()

    def expect(self, text: str, seconds: float = 40.0) -> None:
        """Until the screen shows this."""
        self.until(lambda: text in self.screen.text(), seconds)

    def wait(self, seconds: float = 40.0) -> int:
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, self.screen.text()
            self.read(0.05)
        while self.read(0.0) and select.select([self._ours], [], [], 0)[0]:
            pass
        return self.process.returncode

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
