"""One process of the local system, behind its guardian."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from twostep.errors import SetupError

_GUARDIAN = Path(__file__).with_name("guardian.py")
_TAIL_BYTES = 16384


class Process:
    """A running command. Made by `start`; ended by `terminate` or `kill`, and surely with this process."""

    def __init__(self, guardian: asyncio.subprocess.Process, pid_file: Path) -> None:
        self._guardian = guardian
        self._pid_file = pid_file

    @classmethod
    async def start(cls, argv: Sequence[str], *, env: Mapping[str, str], log: Path | None, pid_file: Path, cwd: Path) -> Process:
        """Output is appended to `log`; None: it goes where this process's own goes. Raises SetupError if the machine has no room for a
        process."""
        with _fresh(log, pid_file) as output:
            try:
                guardian = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(_GUARDIAN)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=dict(env),
                    cwd=cwd,
                    # Ctrl-C in a terminal is for the supervisor, which then drains in order.
                    start_new_session=True,
                )
            except OSError as error:
                raise SetupError(f"cannot start {argv[0]}: {error.strerror}") from error
        assert guardian.stdin is not None
        guardian.stdin.write(json.dumps([str(pid_file), *argv]).encode() + b"\n")
        return cls(guardian, pid_file)

    @property
    def pid(self) -> int | None:
        """The command's own process id; None in its first moments."""
        try:
            return int(self._pid_file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    @property
    def running(self) -> bool:
        return self._guardian.returncode is None

    async def wait(self) -> int:
        """The exit status; 128 + n if signal n ended it."""
        return await self._guardian.wait()

    def terminate(self) -> None:
        self._order(b"T")

    def kill(self) -> None:
        self._order(b"K")

    def _order(self, order: bytes) -> None:
        stdin = self._guardian.stdin
        assert stdin is not None
        if self.running and not stdin.is_closing():
            stdin.write(order)

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, and SIGKILL after `grace_s`. False: it had to be killed."""
        self.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
            return False
        return True


def _fresh(log: Path | None, pid_file: Path) -> AbstractContextManager[BinaryIO | None]:
    pid_file.unlink(missing_ok=True)
    return nullcontext() if log is None else log.open("ab")


def tail(log: Path, num_lines: int = 20) -> list[str]:
    """The last lines of a log file."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-num_lines:]
    except OSError:
        return []
