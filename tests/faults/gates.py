"""Holds a worker in the middle of a hand-over, so that a fault can strike there: files in a directory that harness and workers share.

GATES/publishing.armed             the next worker that comes there with a request named publishing-… stops and renames it to
GATES/publishing.held.prefill-0    and goes on when that is gone
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

_POLL_S = 0.01


class Gates:
    """The harness's side."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def arm(self, name: str) -> None:
        (self.directory / f"{name}.armed").touch()

    async def held(self, name: str, timeout_s: float) -> str:
        """The worker that stands there. Raises TimeoutError."""
        give_up = time.monotonic() + timeout_s
        while True:
            found = list(self.directory.glob(f"{name}.held.*"))
            if found:
                return found[0].name.rpartition(".")[2]
            if time.monotonic() > give_up:
                raise TimeoutError(f"nobody came to {name} in {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)

    def open_all(self) -> None:
        for path in self.directory.iterdir():
            path.unlink(missing_ok=True)


class Gate:
    """The worker's side of all gates of one directory."""

    def __init__(self, directory: Path, worker_id: str) -> None:
        self._directory, self._worker_id = directory, worker_id

    def closed(self, name: str) -> bool:
        """Returns whether the caller must wait; the first one who asks for an armed gate is the one it was armed for."""
        held = self._directory / f"{name}.held.{self._worker_id}"
        if held.exists():
            return True
        try:
            (self._directory / f"{name}.armed").rename(held)
        except FileNotFoundError:
            return False
        return True

    async def wait(self, name: str) -> None:
        while True:
            if not self.closed(name):
                return
            await asyncio.sleep(_POLL_S)

    def wait_blocking(self, name: str) -> None:
        while self.closed(name):
            time.sleep(_POLL_S)
