"""Processes of one kind that may die of what they are asked, as a router keeps them: a few, started when they are needed.

question ─ too many wait? ─┬─ yes ─────────────────────────────────────────────▶ refused
                           └─ no ─ in turn ─ a process that is free, or a new ──▶ answer
                                                └─ lost, or stuck: it is ended, and another one takes its place

Callers take turns (router/waiting/turns.py). What a question may take is counted in time of the processor, so that it does not depend on
how busy the machine is: a question that waits for a core goes on waiting until its caller gives up.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from router.waiting.turns import Turn, Turns
from twostep.errors import ResourceExhausted, SetupError
from twostep.process.helper_service import ANSWER, ASK

log = logging.getLogger(__name__)

# A process that has computed nothing for so long is stuck: on the busiest machine it gets a core now and then.
_STUCK_S = 60.0

# What is read of an answer at a time.
_READ_BYTES = 1 << 18

T = TypeVar("T")


TIME, MEMORY = "time", "memory"


class Lost(Exception):
    """The process has ended. `str()` of it is what there was too little of, time or memory, as far as `status`, its exit status, tells."""

    def __init__(self, of: str, status: int) -> None:
        super().__init__(of)
        self.status = status


class Answer(NamedTuple):
    """`cpu_s`: what it took of the processor."""

    content: bytes
    cpu_s: float


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

    async def ask(self, *question: bytes, cpu_s: float, stuck_s: float = _STUCK_S) -> Answer:
        """`cpu_s`: how long it may compute, 0 for ever; `stuck_s`: how long it may compute nothing. Raises Lost, TimeoutError: it is
        stuck."""
        asking = asyncio.create_task(self._ask(question, cpu_s))
        try:
            computed = self._computed()
            while not (await asyncio.wait((asking,), timeout=stuck_s))[0]:
                before, computed = computed, self._computed()
                if computed == before:
                    raise TimeoutError
        finally:
            asking.cancel()
        return await asking

    async def _ask(self, question: Sequence[bytes], cpu_s: float) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            for piece in (ASK.pack(sum(map(len, question)), cpu_s), *question):
                self._process.stdin.write(piece)
            await self._process.stdin.drain()
            num_bytes, took_s = ANSWER.unpack(await self._process.stdout.readexactly(ANSWER.size))
            return Answer(await self._process.stdout.readexactly(num_bytes), took_s)
        # uvloop raises RuntimeError for a pipe that is closed already.
        except (ConnectionError, RuntimeError, asyncio.IncompleteReadError) as error:
            status = await self._process.wait()
            raise Lost(TIME if status == -signal.SIGPROF else MEMORY, status) from error

    def _computed(self) -> Sequence[bytes]:
        """Returns the process's CPU time as the kernel counts it; only differences are meaningful."""
        try:
            return Path(f"/proc/{self._process.pid}/stat").read_bytes().rpartition(b")")[2].split()[11:13]
        except OSError:
            return ()

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

    async def ask(self, turns: Turns, caller: str, *question: bytes, cpu_s: float) -> bytes:
        """`cpu_s`: of the processor. Raises Lost, ResourceExhausted (too many wait), SetupError."""
        turn = await turns.take(caller)
        # A client that leaves takes no process with it.
        answer = self._begin(self._in_turn(turn, question, cpu_s))
        await asyncio.wait((answer,))
        return answer.result()

    async def close(self) -> None:
        """Ends all processes. Called when no caller waits for an answer any more."""
        self._closed = True
        while self._tasks or self._idle:
            while self._idle or self._busy:
                self._begin((self._idle or self._busy).pop().end())
            await asyncio.wait(self._tasks)

    async def _in_turn(self, turn: Turn, question: Sequence[bytes], cpu_s: float) -> bytes:
        took_s = 0.0
        try:
            async with self._places:
                took_s = cpu_s  # all of it, if the process is lost
                answer = await self._answer(question, cpu_s)
                took_s = answer.cpu_s
                return answer.content
        finally:
            turn.over(took_s)

    async def _answer(self, question: Sequence[bytes], cpu_s: float) -> Answer:
        process = self._idle.pop() if self._idle else await self._started()
        if self._closed:
            # It was started while close() ended the others.
            self._begin(process.end())
            raise SetupError("the router is closing")
        self._busy.add(process)
        try:
            answer = await process.ask(*question, cpu_s=cpu_s)
        except (TimeoutError, Lost) as error:
            self._begin(process.end())
            if not self._closed:
                self._begin(self._replace())
            if isinstance(error, Lost):
                raise
            message = f"the process that is to {self._helper.purpose} has not moved for {_STUCK_S:g} s and is replaced; repeat later"
            raise ResourceExhausted(message, retry_after_s=1.0) from error
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
            trouble = (await process.ask(helper.setup, cpu_s=helper.setup_s)).content.decode("utf-8", "surrogatepass")
        except TimeoutError:
            trouble = f"the process that is to {helper.purpose} has not moved for {_STUCK_S:g} s at its start"
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
