"""Keeps a set of processes running on this machine: starts them side by side, restarts what dies, stops them in order.

Knows nothing of what the processes do; twostep.local.components says that.

  1. start(): each component starts as soon as those it names in `after` are ready; the first failure ends the start: ComponentFailed.
  2. A component that exits later is started again after a pause that doubles from 0.5 s to 30 s, and is 0.5 s again after a minute's life.
  3. add() and retire(): components that come and go while the others run. One that cannot start is reported, and it alone is over.
  4. stop(): the groups of `stop_order`, one after the other; in a group all at once, SIGTERM and after `stop_grace_s` SIGKILL.
  5. kill(): SIGKILL to all, at once. If the supervisor itself dies, however it dies, its guardians end everything.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from twostep.errors import SetupError
from twostep.process.ending import how_it_ended, oom_kills
from twostep.process.printable import log_line

T = TypeVar("T")

PROBE_EVERY_S = 0.05
_GUARDIAN = Path(__file__).with_name("guardian.py")
_TAIL_BYTES = 16384
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_LONG_LIFE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready: Callable[[], Awaitable[bool]]
    """Asked again and again until true; must not raise and must return within seconds."""
    after: tuple[str, ...] = ()
    """Components that must be ready before this one is started the first time."""
    prepare: Callable[[], None] = field(default=lambda: None)
    """Before each start."""
    ready_timeout_s: float = 60.0
    start_attempts: int = 1
    """So many lives without having been ready are a failure."""
    stop_order: int = 0
    """Lower numbers stop first."""
    stop_grace_s: float = 10.0
    hint: str = ""
    """Says what to do if the component does not start."""


class ComponentFailed(SetupError):
    """A component did not become ready. The message has the end of its log and what to do."""


class Observer:
    """Told what happens, and writes a line for each. Must not block."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.line = write
        self._seen: set[str] = set()

    def starting(self, name: str) -> None:
        self.line(f"{name}: {'starting again' if name in self._seen else 'starting'}")
        self._seen.add(name)

    def ready(self, name: str, seconds: float) -> None:
        self.line(f"{name}: ready, took {seconds:.1f} s")

    def died(self, name: str, how: str, pause_s: float) -> None:
        """`how` it ended, as a sentence without its subject."""
        self.line(f"{name}: {how}; next start in {pause_s:g} s")

    def stopping(self, names: Sequence[str]) -> None:
        self.line(f"stopping {', '.join(names)}")

    def killed(self, name: str) -> None:
        self.line(f"{name}: did not stop in time and was killed")

    def failed(self, name: str, why: str) -> None:
        """One that was added could not be started."""
        self.line(f"{name}: not started: {why}")


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
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return [log_line(line) for line in file.read().decode("utf-8", "replace").split("\n")][-num_lines:]
    except OSError:
        return []


class Supervisor:
    def __init__(self, components: Sequence[Component], *, run_dir: Path, observer: Observer, log_files: bool = True) -> None:
        """`run_dir` exists; logs go to run_dir/logs, or without `log_files` where this process's own output goes."""
        self._components = {component.name: component for component in components}
        assert len(self._components) == len(components), "names are unique"
        self._logs = run_dir / "logs"
        self._logs.mkdir(exist_ok=True)
        self._log_files = log_files
        self._run_dir = run_dir
        self._observer = observer
        self._ready = {component.name: asyncio.Event() for component in components}
        self._processes: dict[str, Process] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        # Whoever is being stopped is told so once: a second SIGTERM would cut its drain short.
        self._stops: dict[str, asyncio.Task[None]] = {}
        self.num_restarts = 0

    def log_of(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def pid_of(self, name: str) -> int | None:
        """Process id of the component itself, not of its guardian; None while it is down."""
        process = self._processes.get(name)
        return process.pid if process is not None and process.running else None

    async def start(self) -> None:
        """Returns when everything is ready. Raises ComponentFailed at the first failure; the caller then calls stop()."""
        self._tasks = {name: asyncio.create_task(self._tend(each), name=name) for name, each in self._components.items()}
        all_ready = asyncio.create_task(self._all_ready())
        try:
            # A tending task ends before all are ready only by an error, or by stop().
            done, _ = await asyncio.wait([all_ready, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            all_ready.cancel()

    async def wait(self) -> None:
        """Until all that start() began is over, or until one of it cannot even be started again: raises why."""
        waiting = set(self._tasks.values())
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():
                    task.result()

    @property
    def names(self) -> tuple[str, ...]:
        """Components that are kept running or are being stopped."""
        return tuple(self._components)

    def add(self, component: Component) -> None:
        """One more, started now; returns at once. What it waits for must be there already. Cannot it be started, the observer is told, and
        it is no component any more."""
        assert component.name not in self._components, "names are unique"
        if self._stopping.is_set():
            return
        self._components[component.name] = component
        self._ready[component.name] = asyncio.Event()
        self._tasks[component.name] = asyncio.create_task(self._tend_added(component), name=component.name)

    def is_ready(self, name: str) -> bool:
        """It has been ready in its present or an earlier life."""
        return name in self._ready and self._ready[name].is_set()

    async def retire(self, name: str) -> None:
        """Stops one as stop() does, and starts it no more. Returns when it is gone; cancelled, it goes on in the background. One that is no
        component any more is gone."""
        if name not in self._components:
            return
        await asyncio.shield(self._begin_stop(name))
        self._forget(name)

    async def stop(self) -> None:
        self._stopping.set()
        for order in sorted({component.stop_order for component in self._components.values()}):
            group = [
                n for n, c in self._components.items() if c.stop_order == order and n in self._processes and self._processes[n].running
            ]
            if group:
                self._observer.stopping(group)
                await asyncio.gather(*(self._begin_stop(name) for name in group))
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self._stops.values(), return_exceptions=True)
        # One that was being started just then.
        await asyncio.gather(*map(self._stop_process, self._processes))

    def kill_one(self, name: str) -> None:
        """It is started again, as after any end."""
        self._processes[name].kill()

    def kill(self) -> None:
        self._stopping.set()
        for process in self._processes.values():
            process.kill()

    async def _all_ready(self) -> None:
        for event in self._ready.values():
            await event.wait()

    def _begin_stop(self, name: str) -> asyncio.Task[None]:
        if name not in self._stops:
            self._stops[name] = asyncio.create_task(self._stop_one(name), name=f"stop {name}")
        return self._stops[name]

    async def _stop_one(self, name: str) -> None:
        task = self._tasks[name]
        await self._stop_process(name)
        task.cancel()
        await asyncio.wait((task,))
        # It may have been being started just then.
        await self._stop_process(name)

    async def _stop_process(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and process.running and not await process.stop(self._components[name].stop_grace_s):
            self._observer.killed(name)

    def _forget(self, name: str) -> None:
        for names in (self._components, self._ready, self._tasks, self._processes, self._stops):
            names.pop(name, None)

    async def _tend_added(self, component: Component) -> None:
        try:
            await self._tend(component)
        except SetupError as error:
            self._observer.failed(component.name, error.message)
            await self._stop_process(component.name)
            if component.name not in self._stops:
                self._forget(component.name)

    async def _tend(self, component: Component) -> None:
        for name in component.after:
            await self._ready[name].wait()
        pause = _FIRST_PAUSE_S
        attempts = 0
        while not self._over(component.name):
            started = time.monotonic()
            attempts += 1
            kills = oom_kills()
            process = await self._launch(component)
            if await self._until_ready(component, process):
                self._ready[component.name].set()
                self._observer.ready(component.name, time.monotonic() - started)
            elif self._over(component.name):
                return
            elif not self._ready[component.name].is_set() and attempts >= component.start_attempts:
                raise await self._failure(component, process, kills)
            else:
                process.kill()
            status = await process.wait()
            if self._over(component.name):
                return
            pause = _FIRST_PAUSE_S if time.monotonic() - started > _LONG_LIFE_S else pause
            self._observer.died(component.name, how_it_ended(status, oom_kills_before=kills), pause)
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                pass
            pause = min(_MAX_PAUSE_S, pause * 2)
            self.num_restarts += 1

    def _over(self, name: str) -> bool:
        return self._stopping.is_set() or name in self._stops

    async def _launch(self, component: Component) -> Process:
        self._observer.starting(component.name)
        component.prepare()
        process = await Process.start(
            component.argv,
            env=component.env,
            log=self.log_of(component.name) if self._log_files else None,
            pid_file=self._run_dir / f"{component.name}.pid",
            cwd=self._run_dir,
        )
        self._processes[component.name] = process
        return process

    async def _until_ready(self, component: Component, process: Process) -> bool:
        deadline = time.monotonic() + component.ready_timeout_s
        while process.running and not self._over(component.name) and time.monotonic() < deadline:
            if await component.ready():
                return process.running
            await asyncio.sleep(PROBE_EVERY_S)
        return False

    async def _failure(self, component: Component, process: Process, kills: int | None) -> ComponentFailed:
        if process.running:
            why = f"{component.name} was not ready after {component.ready_timeout_s:g} s"
        else:
            why = f"{component.name} {how_it_ended(await process.wait(), oom_kills_before=kills)}, at its start"
        if not self._log_files:
            return ComponentFailed(f"{why}; its last lines say what to do")
        log = self.log_of(component.name)
        lines = "".join(f"\n    {line}" for line in tail(log)) or "\n    (nothing)"
        return ComponentFailed(f"{why}. The end of {log}:{lines}" + (f"\n  {component.hint}" if component.hint else ""))


async def until_interrupted(work: Coroutine[Any, Any, T], kill: Callable[[], None]) -> T | None:
    """Returns what `work` does; None if SIGINT, SIGTERM or SIGHUP ended it before. A second signal kills, whatever goes on then."""
    interrupted = asyncio.Event()

    def on_signal() -> None:
        if interrupted.is_set():
            kill()
        interrupted.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    main, waiter = asyncio.create_task(work), asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait({main, waiter}, return_when=asyncio.FIRST_COMPLETED)
        return main.result() if main.done() else None
    finally:
        main.cancel()
        waiter.cancel()
        await asyncio.wait({main, waiter})
