"""A terminal for tests: what a VT100-like screen shows after the escape sequences that our commands and readline write."""

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
from fcntl import ioctl

from twostep.cli._terminal import char_width

_SEQUENCE = re.compile(r"\x1b(?:\[(?P<args>[0-9;?]*)(?P<final>[@-~])|(?P<plain>[78DM=>])|\](?P<osc>[^\x07\x1b]*)(?:\x07|\x1b\\))")
_MODES = (1, 7, 12, 25, 1034, 1049, 2004)


class Screen:
    """Feed it what a program writes. Raises ValueError for a sequence that it does not know. A wide character fills two cells, the second
    of which is empty; colours are only counted as sequences."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.scrolled: list[list[str]] = []
        self.rows = self._blank(height)
        self.row = self.column = 0
        self.num_sequences = 0
        self.cursor_hidden = False
        self._pending = False
        self._saved = (0, 0, False)
        self._main: list[list[str]] | None = None
        self._rest = ""

    def lines(self) -> list[str]:
        """What is shown, without what has scrolled away."""
        return ["".join(row).rstrip() for row in self.rows]

    def text(self) -> str:
        """All there was, what has scrolled away included."""
        return "\n".join("".join(row).rstrip() for row in [*self.scrolled, *self.rows]).rstrip("\n")

    def feed(self, text: str) -> None:
        text, at, self._rest = self._rest + text, 0, ""
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

    def _blank(self, count: int) -> list[list[str]]:
        return [[" "] * self.width for _ in range(count)]

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
        elif char >= " " and (columns := char_width(char)):
            if self._pending or self.column + columns > self.width:
                self.column, self._pending = 0, False
                self._down()
            self.rows[self.row][self.column : self.column + columns] = [char, ""][:columns]
            self.column += columns
            if self.column >= self.width:
                self.column, self._pending = self.width - 1, True
        elif char < " " and char not in "\x07\x0e\x0f\x00":
            raise ValueError(f"unknown control character {char!r}")

    def _down(self) -> None:
        if self.row < self.height - 1:
            self.row += 1
            return
        if self._main is None:
            self.scrolled.append(self.rows[0])
        self.rows = [*self.rows[1:], *self._blank(1)]

    def _sequence(self, match: re.Match[str]) -> None:
        plain, final, args = match["plain"], match["final"], match["args"] or ""
        if match["osc"] is not None or final == "m" or plain in ("=", ">"):
            return
        if plain == "7":
            self._saved = (self.row, self.column, self._pending)
            return
        if plain == "8":
            self.row, self.column, self._pending = self._saved
            return
        numbers = [int(number) if number else 0 for number in args.lstrip("?").split(";")]
        if args.startswith("?"):
            for number in numbers:
                self._mode(number, final == "h")
            return
        self._pending = False
        count, row = max(1, numbers[0]), self.rows[self.row]
        match plain or final:
            case "D" if plain:
                self._down()
            case "M" | "A":
                self.row = max(0, self.row - count)
            case "B":
                self.row = min(self.height - 1, self.row + count)
            case "C":
                self.column = min(self.width - 1, self.column + count)
            case "D":
                self.column = max(0, self.column - count)
            case "G":
                self.column = min(self.width, count) - 1
            case "H":
                self.row, self.column = min(self.height, count) - 1, min(self.width, max(1, (numbers[1:] or [1])[0])) - 1
            case "K":
                row[self.column :] = [" "] * (self.width - self.column)
            case "J":
                if numbers[0] == 0:
                    row[self.column :] = [" "] * (self.width - self.column)
                first = self.row + 1 if numbers[0] == 0 else 0
                self.rows[first:] = self._blank(self.height - first)
            case "P":
                row[self.column :] = (row[self.column + count :] + [" "] * count)[: self.width - self.column]
            case "@":
                row[self.column :] = ([" "] * count + row[self.column :])[: self.width - self.column]
            case _:
                raise ValueError(f"unknown sequence {match[0]!r}")

    def _mode(self, number: int, on: bool) -> None:
        if number not in _MODES:
            raise ValueError(f"unknown mode {number}")
        if number == 25:
            self.cursor_hidden = not on
        elif number == 1049 and on:
            self._main, self.rows = self.rows, self._blank(self.height)
        elif number == 1049 and self._main is not None:
            self._main, self.rows = None, self._main


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
