"""Writes what a person sees of a local system: one line for each thing that happens, and with --verbose the processes' logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_FOLLOW_EVERY_S = 0.1
_MAX_READ_BYTES = 1 << 16


class ProgressLines:
    """The supervisor's observer. `write` takes one line; times count from when this object was made."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._begun = time.monotonic()
        self._seen: set[str] = set()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def line(self, text: str) -> None:
        self._write(f"{self.seconds:6.1f} s  {text}")

    def starting(self, name: str) -> None:
        self.line(f"{name}: {'starting again' if name in self._seen else 'starting'}")
        self._seen.add(name)

    def ready(self, name: str, seconds: float) -> None:
        self.line(f"{name}: ready, took {seconds:.1f} s")

    def died(self, name: str, how: str, pause_s: float) -> None:
        self.line(f"{name}: {how}; next start in {pause_s:g} s")

    def stopping(self, names: Sequence[str]) -> None:
        self.line(f"stopping {', '.join(names)}")

    def killed(self, name: str) -> None:
        self.line(f"{name}: did not stop in time and was killed")

    def failed(self, name: str, why: str) -> None:
        self.line(f"{name}: not started: {why}")


class LogFollower:
    """Writes each new line of each log in a directory, with the file's name in front."""

    def __init__(self, logs: Path, write: Callable[[str], None]) -> None:
        self._logs, self._write = logs, write
        self._offsets: dict[Path, int] = {}
        self._rests: dict[Path, str] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.poll()
            await asyncio.sleep(_FOLLOW_EVERY_S)

    def poll(self) -> None:
        for path in sorted(self._logs.glob("*.log")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(_MAX_READ_BYTES)
            self._offsets[path] = offset + len(data)
            *lines, self._rests[path] = (self._rests.get(path, "") + data.decode("utf-8", "replace")).split("\n")
            for line in lines:
                self._write(f"{path.stem:>10} | {line}")
