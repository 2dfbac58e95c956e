"""Processes of one kind that may die of what they are asked, as a router keeps them: a few, started when they are needed.

question ─ its line is full? ─┬─ yes ─────────────────────────────────────────────▶ refused
                              └─ no ─ in turn ─ a process that is free, or a new ──▶ answer
                                                   └─ lost, or too slow: it is ended, and another one takes its place
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from twostep.errors import ResourceExhausted, SetupError
from twostep.process.helper_service import ANSWER, ASK

log = logging.getLogger(__name__)

# On the clock, however busy the machine is.
_WAIT_S = 30.0
_START_S = 60.0

# What is read of an answer at a time.
_READ_BYTES = 1 << 18

T = TypeVar("T")


TIME, MEMORY = "time", "memory"


class Lost(Exception):
    """The process has ended. `str()` of it is what there was too little of, time or memory, as far as `status`, its exit status, tells."""

    def __init__(self, of: str, status: int) -> None:
        super().__init__(of)
        self.status = status


class HelperProcess:
    """Seen from the router (twostep/process/helper_service.py is its inside). It is asked one thing at a time; a caller that gives up on an
    answer has to end it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str) -> HelperProcess:
        """Returns before it is ready: it is once it has answered."""
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_READ_BYTES,
            )
        )

    async def ask(self, *question: bytes, cpu_s: float, timeout_s: float) -> bytes:
        """`cpu_s`: how long it may compute, 0 for ever; `timeout_s`: how long this waits, however busy the machine is.
        Raises Lost, TimeoutError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            try:
                for piece in (ASK.pack(sum(map(len, question)), cpu_s), *question):
                    self._process.stdin.write(piece)
                await self._process.stdin.drain()
                (num_bytes,) = ANSWER.unpack(await self._process.stdout.readexactly(ANSWER.size))
                return await self._process.stdout.readexactly(num_bytes)
            # uvloop raises RuntimeError for a pipe that is closed already.
            except (ConnectionError, RuntimeError, asyncio.IncompleteReadError) as error:
                status = await self._process.wait()
                raise Lost(TIME if status == -signal.SIGPROF else MEMORY, status) from error

    async def end(self) -> None:
        """Returns when it is gone."""
        if self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                pass
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """Says how to start one: `module` is asked to take `setup` first, for which it has `setup_s` of the processor (0: for ever).
    `purpose`, as in "is there to render chats", and `lost`, with a place for "time" or "memory", are for messages."""

    module: str
    setup: bytes
    purpose: str
    setup_s: float = 0.0
    lost: str = "the process took too much {} to start"


class HelperQueue:
    """Those who wait for a pool together: at most `most`, of whom at most `at_once` have a process. `what`: as a message says it."""

    def __init__(self, what: str, *, most: int, at_once: int) -> None:
        self.what, self.most = what, most
        self.num = 0
        self.gate = asyncio.Semaphore(at_once)


class HelperPool:
    """Keeps the processes of one kind. Belongs to one event loop."""

    def __init__(self, helper: Helper, num_processes: int) -> None:
        """Starts nothing yet."""
        self._helper = helper
        self._places = asyncio.Semaphore(num_processes)
        self._idle: list[HelperProcess] = []
        self._busy: set[HelperProcess] = set()
        # These go on without their callers: answers, processes that are ended, those that are started in their place.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """Starts one, so that the first question does not wait for it. Raises SetupError."""
        async with self._places:
            if not self._idle:
                self._idle.append(await self._started())

    async def ask(self, line: HelperQueue, *question: bytes, cpu_s: float) -> bytes:
        """`cpu_s`: of the processor. Raises Lost, ResourceExhausted (too many wait, or the machine is too busy), SetupError."""
        if line.num >= line.most:
            raise ResourceExhausted(f"{line.num} {line.what}; repeat later", retry_after_s=1.0)
        line.num += 1
        try:
            with ExitStack() as held:
                for gate in (line.gate, self._places):
                    await gate.acquire()
                    held.callback(gate.release)
                answer = self._begin(self._answer(question, cpu_s))
                over = held.pop_all()
                answer.add_done_callback(lambda _: over.close())
            # A client that leaves takes no process with it.
            await asyncio.wait((answer,))
            return answer.result()
        finally:
            line.num -= 1

    async def close(self) -> None:
        """Ends all processes. Called when no caller waits for an answer any more."""
        self._closed = True
        while self._tasks or self._idle:
            while self._idle or self._busy:
                self._begin((self._idle or self._busy).pop().end())
            await asyncio.wait(self._tasks)

    async def _answer(self, question: tuple[bytes, ...], cpu_s: float) -> bytes:
        process = self._idle.pop() if self._idle else await self._started()
        if self._closed:
            # It was started while close() ended the others.
            self._begin(process.end())
            raise SetupError("the router is closing")
        self._busy.add(process)
        try:
            answer = await process.ask(*question, cpu_s=cpu_s, timeout_s=_WAIT_S)
        except (TimeoutError, Lost) as error:
            self._begin(process.end())
            if not self._closed:
                self._begin(self._replace())
            if isinstance(error, Lost):
                raise
            raise ResourceExhausted(f"the machine is too busy to {self._helper.purpose}; repeat later", retry_after_s=1.0) from error
        finally:
            self._busy.discard(process)
        self._idle.append(process)
        return answer

    async def _replace(self) -> None:
        """Starts another process, so that the next question need not wait for the start of a process."""
        try:
            await self.start()
        except SetupError as error:
            log.warning("there is no process to %s: %s", self._helper.purpose, error.message)

    async def _started(self) -> HelperProcess:
        """Raises SetupError. A process that is lost before it is ready is started once more: the kernel may have ended it for what others
        took."""
        try:
            return await self._start_one()
        except Lost as lost:
            if str(lost) == TIME:
                raise SetupError(self._helper.lost.format(lost)) from lost
            log.warning("a process to %s ended with status %d at its start; it is started once more", self._helper.purpose, lost.status)
        try:
            return await self._start_one()
        except Lost as lost:
            raise SetupError(f"{self._helper.lost.format(lost)} (it ended with status {lost.status})") from lost

    async def _start_one(self) -> HelperProcess:
        """Raises Lost, SetupError."""
        helper, trouble = self._helper, "its start was given up"
        process = await HelperProcess.start(helper.module)
        try:
            trouble = (await process.ask(helper.setup, cpu_s=helper.setup_s, timeout_s=_START_S)).decode("utf-8", "surrogatepass")
        except TimeoutError:
            trouble = f"the process that is to {helper.purpose} was not there after {_START_S:g} s"
        finally:
            if trouble:
                self._begin(process.end())
        if trouble:
            raise SetupError(trouble)
        return process

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Seen, so that it is not logged, with what it may quote, if its caller is gone.
            task.exception()
