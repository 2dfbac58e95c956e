"""Runs a local system around a piece of work: start, work, drain, with Ctrl-C in mind. What `twostep up` and `twostep demo` share."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping

from twostep.errors import SetupError
from twostep.local.options import LocalOptions
from twostep.local.plan import make_plan
from twostep.local.report import LogFollower, ProgressLines
from twostep.local.system import LocalSystem

INTERRUPTED = 130


def run_system(
    options: LocalOptions, work: Callable[[LocalSystem], Awaitable[int]], *, environ: Mapping[str, str], write: Callable[[str], None]
) -> int:
    """The exit status of `work`, or 130 if a signal ended it early. Raises SetupError if the system does not come up.

    The first SIGINT or SIGTERM cancels the start or the work, and drains; the second kills what is left.
    """
    report = ProgressLines(write)
    where = make_plan(options, environ=environ, progress=report.line)
    try:
        system = LocalSystem(options, where, environ=environ, observer=report)
    except SetupError:
        shutil.rmtree(where.run_dir, ignore_errors=True)
        raise
    return asyncio.run(_run(system, work, options.verbose, write))


async def _run(system: LocalSystem, work: Callable[[LocalSystem], Awaitable[int]], verbose: bool, write: Callable[[str], None]) -> int:
    interrupted = asyncio.Event()

    def on_signal() -> None:
        if interrupted.is_set():
            system.kill()
        interrupted.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)

    async def start_and_work() -> int:
        await system.start()
        return await work(system)

    follower = LogFollower(system.plan.run_dir / "logs", write)
    following = asyncio.create_task(follower.run()) if verbose else None
    main = asyncio.create_task(start_and_work())
    waiter = asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait([main, waiter], return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            return main.result()
        write(f"Draining: what runs has {system.drain_timeout_s:g} s to end. Ctrl-C again ends it at once.")
        main.cancel()
        await asyncio.wait([main])
        system.interrupted()
        return INTERRUPTED
    finally:
        waiter.cancel()
        await system.stop()
        if following is not None:
            following.cancel()
            follower.poll()
        await system.clear()
