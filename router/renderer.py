"""Chats are rendered beside the router, in processes that may die of it: a template is a program of the model's, its input anybody's.

    chat ─ short? ─┬─ yes ─ a process that is free, few steps ─────────▶ text
                   │           └─ it takes more ─┐
                   └─ no ───────────────────────┴─ in turn, many steps ─▶ text
                                                     └─ out of memory, or of processor time: it is over ─▶ refused

There are two processes, one of which at most works long: whatever a template does, the other is there for short chats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from router.chat import num_chars
from router.helper_process import TIME, HelperProcess, Lost
from router.render_process import STEPS, Setup, read_answer
from twostep.errors import InvalidRequest, ResourceExhausted, SetupError
from twostep.rpc.v1 import inference_pb2
from twostep.text.chat_template import Rendered, TooMuchWork
from twostep.text.template_sandbox import MAX_STEPS

log = logging.getLogger(__name__)

_NUM_PROCESSES = 2
# Up to here, and with so little work, a render takes a millisecond or two.
_MAX_SHORT_CHARS = 4096
_SHORT_STEPS = 20_000
# Of the processor. Steps end most renders before; these end what one step of a library's takes.
_SHORT_S = 0.1
_LONG_S = 5.0
_COMPILE_S = 10.0
# On the clock, however busy the machine is.
_WAIT_S = 30.0
_START_S = 60.0
_MAX_LONG = 64
_MAX_SHORT = 4096

T = TypeVar("T")


class Renderer:
    """Of one router. Belongs to its event loop."""

    def __init__(self, setup: Setup, *, short_s: float = _SHORT_S, long_s: float = _LONG_S) -> None:
        """Starts nothing yet. `short_s`, `long_s`: what a render may take of the processor."""
        self._setup = setup
        self._short_s = short_s
        self._long_s = long_s
        self._idle: list[HelperProcess] = []
        self._busy: set[HelperProcess] = set()
        self._places = asyncio.Semaphore(_NUM_PROCESSES)
        self._long = asyncio.Semaphore(1)
        self._num_waiting = 0
        self._num_long = 0
        # What goes on whoever waits for it: answers, processes that are ended, those that are started in their place.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def start(self) -> None:
        """So that the first chat does not wait for it. Raises SetupError: a template that cannot be compiled within bounds."""
        if self._setup.template is not None:
            async with self._places:
                self._idle.append(await self._started())

    async def render(self, chat: inference_pb2.Chat) -> Rendered:
        """Raises InvalidRequest (what the template refuses, what is not JSON, TooMuchWork), ResourceExhausted, SetupError."""
        data = chat.SerializeToString()
        if num_chars(chat) <= _MAX_SHORT_CHARS:
            if self._num_waiting >= _MAX_SHORT:
                raise ResourceExhausted(f"{self._num_waiting} chats are being rendered; repeat later", retry_after_s=1.0)
            try:
                return await self._ask(STEPS.pack(_SHORT_STEPS) + data, self._short_s, self._places)
            except TooMuchWork:
                pass
        if self._num_long >= _MAX_LONG:
            raise ResourceExhausted(f"{self._num_long} long chats are being rendered; repeat later", retry_after_s=1.0)
        self._num_long += 1
        try:
            return await self._ask(STEPS.pack(MAX_STEPS) + data, self._long_s, self._long, self._places)
        finally:
            self._num_long -= 1

    async def close(self) -> None:
        """When nobody waits for an answer any more."""
        self._closed = True
        while self._tasks or self._idle:
            while self._idle or self._busy:
                self._begin((self._idle or self._busy).pop().end())
            await asyncio.wait(self._tasks)

    async def _ask(self, question: bytes, cpu_s: float, *gates: asyncio.Semaphore) -> Rendered:
        """Waits for all of `gates`, which are held until there is an answer, also if nobody waits for it any more."""
        self._num_waiting += 1
        held: list[asyncio.Semaphore] = []
        try:
            for gate in gates:
                await gate.acquire()
                held.append(gate)
        except BaseException:
            for gate in held:
                gate.release()
            raise
        finally:
            self._num_waiting -= 1

        def over(_: object) -> None:
            for gate in held:
                gate.release()

        answer = self._begin(self._answer(question, cpu_s))
        answer.add_done_callback(over)
        # A client that leaves takes no process with it.
        await asyncio.wait((answer,))
        return read_answer(answer.result())

    async def _answer(self, question: bytes, cpu_s: float) -> bytes:
        process = self._idle.pop() if self._idle else await self._started()
        self._busy.add(process)
        try:
            answer = await process.ask(question, cpu_s=cpu_s, timeout_s=_WAIT_S)
        except (TimeoutError, Lost) as error:
            self._begin(process.end())
            if not self._closed:
                self._begin(self._replace())
            if isinstance(error, TimeoutError):
                raise ResourceExhausted("the machine is too busy to render chats; repeat later", retry_after_s=1.0) from error
            log.warning("a chat of %d bytes ended the process that renders: too much %s", len(question), error)
            raise (TooMuchWork if error.args == (TIME,) else InvalidRequest)(
                f"the model's chat template takes too much {error} for these messages; send fewer or shorter messages, tools or variables"
            ) from error
        finally:
            self._busy.discard(process)
        self._idle.append(process)
        return answer

    async def _replace(self) -> None:
        """The next chat need not wait for the start of a process."""
        try:
            async with self._places:
                if not self._idle:
                    self._idle.append(await self._started())
        except SetupError as error:
            log.warning("chats cannot be rendered: %s", error.message)

    async def _started(self) -> HelperProcess:
        """Raises SetupError."""
        process, trouble = await HelperProcess.start("router.render_process"), "its start was given up"
        try:
            trouble = (await process.ask(self._setup.to_bytes(), cpu_s=_COMPILE_S, timeout_s=_START_S)).decode()
        except Lost as lost:
            trouble = f"the model's chat template takes too much {lost} to compile; correct or remove it"
        except TimeoutError:
            trouble = f"the process that renders chats was not there after {_START_S:g} s"
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
            # Seen, so that nobody logs what it may quote if its caller is gone.
            task.exception()
