"""Runs a local system around a piece of work: start, work, drain, with Ctrl-C in mind. What `twostep up` and `twostep demo` share."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from twostep.errors import SetupError
from twostep.local.plan import LocalOptions, make_plan
from twostep.local.supervisor import Observer, until_interrupted
from twostep.local.system import LocalSystem
from twostep.process.printable import log_line

INTERRUPTED = 130
_FOLLOW_EVERY_S = 0.1
_MAX_READ_BYTES = 1 << 16


def run_system(
    options: LocalOptions, work: Callable[[LocalSystem], Awaitable[int]], *, environ: Mapping[str, str], write: Callable[[str], None]
) -> int:
    """The exit status of `work`, or 130 if a signal ended it early. Raises SetupError if the system does not come up.

    The first SIGINT or SIGTERM cancels the start or the work, and drains; the second kills what is left.
    """
    begun = time.monotonic()
    report = Observer(lambda text: write(f"{time.monotonic() - begun:6.1f} s  {text}"))
    where = make_plan(options, environ=environ, progress=report.line)
    try:
        system = LocalSystem(options, where, environ=environ, observer=report)
    except SetupError:
        shutil.rmtree(where.run_dir, ignore_errors=True)
        raise
    return asyncio.run(_run(system, work, options.verbose, write))


async def _run(system: LocalSystem, work: Callable[[LocalSystem], Awaitable[int]], verbose: bool, write: Callable[[str], None]) -> int:
    async def start_and_work() -> int:
        await system.start()
        return await work(system)

    follower = LogFollower(system.plan.run_dir / "logs", write)
    following = asyncio.create_task(follower.run()) if verbose else None
    try:
        status = await until_interrupted(start_and_work(), system.kill)
        if status is None:
            write(f"Draining: what runs has {system.drain_timeout_s:g} s to end. Ctrl-C again ends it at once.")
            system.interrupted()
        return INTERRUPTED if status is None else status
    finally:
        await system.stop()
        if following is not None:
            following.cancel()
            follower.poll()
        await system.clear()


class LogFollower:
    """Writes each new line of each log in a directory, made harmless, with the file's name in front. A line without end is written in
    pieces."""

    def __init__(self, logs: Path, write: Callable[[str], None]) -> None:
        self._logs, self._write = logs, write
        self._offsets: dict[Path, int] = {}
        self._rests: dict[Path, str] = {}

    async def run(self) -> None:
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
            *lines, rest = (self._rests.get(path, "") + data.decode("utf-8", "replace")).split("\n")
            if len(rest) >= _MAX_READ_BYTES:
                lines, rest = [*lines, rest], ""
            self._rests[path] = rest
            for line in lines:
                self._write(f"{path.stem:>10} | {log_line(line)}")
