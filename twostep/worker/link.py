"""One end of the socket between the two processes of a worker: messages in order, answers, and steps.

    u32 length | u8 kind | payload

    TELL     name, arguments           one way, in order with everything else
    CALL     number, name, arguments   to be answered
    DROP     number                    nobody waits for the answer any more: what was asked for is cancelled, and its end is answered
    ANSWER   number, value             or
    ERROR    number, error
    STEP     a record of bytes (step_record.py)

What is sent before something else arrives before it, whichever threads sent them. On the receiving loop, whoever awaits an answer goes on
before the next TELL or STEP is delivered.

Nothing here waits but `send_bounded`: what the socket does not take at once is kept and sent when it does. The other end's death is the end
of the file: all that is asked fails with Unavailable.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from twostep.errors import InternalError, ResourceExhausted, TwostepError, Unavailable
from twostep.worker.serialization import pack, unpack

log = logging.getLogger(__name__)

TELL, CALL, DROP, ANSWER, ERROR, STEP = range(6)
_HEAD = struct.Struct("<IB")
# What is read at a time is allocated before it is known how much has come.
_MAX_READ = 1 << 16
# Beyond that the other end has stopped reading: new calls are refused. What ends sequences is always kept, and bounded by their number.
_MAX_UNSENT = 64 << 20
# Messages of `send_bounded` that the socket has not taken.
_MAX_BOUNDED = 64
_POLL_S = 0.1

Tell = Callable[..., None]
Call = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class AnsweredInOrder:
    """A call whose handler is given its number too, and answers by itself, under `order`, before it returns."""

    work: Callable[..., Awaitable[None]]


class Link:
    """start() on an event loop, which then owns it; before that `receive` waits for messages. `order` is held by whoever must send before
    another thread does. All methods are the loop's but `tell`, `answer` and `send_bounded`, which any thread may call."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.order = threading.RLock()
        self._room = threading.Condition(self.order)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._received = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tells: Mapping[str, Tell] = {}
        self._calls: Mapping[str, Call | AnsweredInOrder] = {}
        self._on_step: Callable[[bytes], None] = lambda record: None
        self._on_end: Callable[[], None] = lambda: None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._working: dict[int, asyncio.Task[None]] = {}
        self.ended = False

    # ---- before there is a loop -----------------------------------------------------------------------------------------------

    def receive(self) -> tuple[str, list[Any]] | None:
        """Waits for the next TELL. None: the other end is gone."""
        while True:
            for kind, payload in self._frames():
                assert kind == TELL, "nothing is asked before there is a loop"
                name, *arguments = unpack(payload)
                return name, arguments
            data = self._socket.recv(_MAX_READ)
            if not data:
                return None
            self._received += data

    # ---- on a loop ------------------------------------------------------------------------------------------------------------

    def start(
        self,
        *,
        tells: Mapping[str, Tell],
        calls: Mapping[str, Call | AnsweredInOrder],
        on_end: Callable[[], None],
        on_step: Callable[[bytes], None] = lambda record: None,
    ) -> None:
        """`on_end` is called once, when the other end is gone."""
        self._tells, self._calls, self._on_step, self._on_end = tells, calls, on_step, on_end
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._readable)
        # What came with the last message before.
        self._loop.call_soon(self._deliver)

    def close(self) -> None:
        """Closes this end: the other one sees the end of the file. Idempotent."""
        self._end(report=False)

    def tell(self, name: str, *arguments: object) -> None:
        self.send(TELL, pack(name, *arguments))

    def answer(self, number: int, value: object = None) -> None:
        self.send(ANSWER, pack(number, value))

    def send_bounded(self, kind: int, payload: bytes, stopped: Callable[[], bool]) -> None:
        """Waits while so much is unsent that the other end has stopped reading, until `stopped`."""
        with self._room:
            while len(self._unsent) >= _MAX_BOUNDED and not self.ended and not stopped():
                self._room.wait(_POLL_S)
            self.send(kind, payload)

    async def call(self, name: str, *arguments: object, deadline: float | None = None, settle: bool = False) -> Any:
        """Returns the answer. Raises what the other end raises, Unavailable if it is gone, or does not answer by `deadline`. If the caller
        is cancelled, or late, what was asked for is cancelled there; with `settle`, it has ended there before this ends."""
        if self.ended:
            raise Unavailable("the engine's process has ended; use another worker")
        if self._unsent_bytes > _MAX_UNSENT:
            raise ResourceExhausted("the engine's process does not take what it is asked; use another worker")
        assert self._loop is not None
        number = next(self._numbers)
        answered: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[number] = answered
        self.send(CALL, pack(number, name, *arguments))
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await answered
        except TimeoutError:
            await self._dropped(number, settle=settle)
            raise Unavailable("the engine's process does not answer; use another worker") from None
        except asyncio.CancelledError:
            await self._dropped(number, settle=settle)
            raise

    async def _dropped(self, number: int, *, settle: bool) -> None:
        """Cancels it there. With `settle`, waits for its end, however often it is cancelled itself."""
        assert self._loop is not None
        answered = self._waiting.pop(number, None)
        if answered is None:
            # The answer has come meanwhile, or the other end has ended.
            return
        self.send(DROP, pack(number))
        if not settle:
            return
        ended: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[number] = ended
        while not ended.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([ended])
        ended.exception()

    # ---- inside ---------------------------------------------------------------------------------------------------------------

    def send(self, kind: int, payload: bytes) -> None:
        frame = memoryview(_HEAD.pack(len(payload), kind) + payload)
        with self.order:
            if self.ended:
                return
            if self._loop is None:
                with suppress(BrokenPipeError, ConnectionError):
                    self._socket.sendall(frame)
                return
            sent = 0
            if not self._unsent:
                with suppress(BlockingIOError, BrokenPipeError, ConnectionError):
                    sent = self._socket.send(frame)
            if sent == len(frame):
                return
            self._unsent.append(frame[sent:])
            self._unsent_bytes += len(frame) - sent
            if len(self._unsent) > 1:
                return
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arm)

    def _arm(self) -> None:
        if not self.ended and self._loop is not None:
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        with self._room:
            while self._unsent:
                frame = self._unsent[0]
                try:
                    sent = self._socket.send(frame)
                except BlockingIOError:
                    return
                except OSError:
                    # The end of the file says so.
                    self._unsent.clear()
                    break
                self._unsent_bytes -= sent
                if sent < len(frame):
                    self._unsent[0] = frame[sent:]
                    return
                self._unsent.popleft()
                self._room.notify_all()
            assert self._loop is not None
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_MAX_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(report=True)
            return
        self._received += data
        self._deliver()

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        """Yields what has come as a whole."""
        while len(self._received) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._received)
            stop = _HEAD.size + length
            if len(self._received) < stop:
                return
            payload = bytes(self._received[_HEAD.size : stop])
            del self._received[:stop]
            yield kind, payload

    def _deliver(self) -> None:
        assert self._loop is not None
        for kind, payload in self._frames():
            if kind == STEP:
                self._loop.call_soon(self._on_step, payload)
                continue
            first, *rest = unpack(payload)
            if kind in (ANSWER, ERROR):
                waiting = self._waiting.pop(first, None)
                if waiting is None or waiting.done():
                    continue
                # Whoever waits is called soon: before what is said next.
                if kind == ANSWER:
                    waiting.set_result(rest[0])
                else:
                    waiting.set_exception(rest[0])
                    # Perhaps it is cancelled in this moment, and nobody looks at it.
                    waiting.exception()
            elif kind == TELL:
                self._loop.call_soon(self._tells[first], *rest)
            else:
                self._loop.call_soon(self._begin if kind == CALL else self._drop, first, *rest)

    def _begin(self, number: int, name: str, *arguments: Any) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._work(number, self._calls[name], arguments), name=name)
        self._working[number] = task
        task.add_done_callback(partial(self._over, number))

    def _over(self, number: int, task: asyncio.Task[None]) -> None:
        self._working.pop(number, None)
        if task.cancelled():
            self.send(ERROR, pack(number, Unavailable("it was cancelled")))

    async def _work(self, number: int, call: Call | AnsweredInOrder, arguments: Sequence[Any]) -> None:
        try:
            if isinstance(call, AnsweredInOrder):
                await call.work(number, *arguments)
            else:
                self.answer(number, await call(*arguments))
        except TwostepError as error:
            self.send(ERROR, pack(number, error))
        except Exception as error:
            log.exception("what the worker's other process asked for failed")
            self.send(ERROR, pack(number, InternalError(f"{error!r}; see the log")))

    def _drop(self, number: int) -> None:
        task = self._working.get(number)
        if task is not None:
            task.cancel()

    def _end(self, *, report: bool) -> None:
        with self._room:
            if self.ended:
                return
            self.ended = True
            self._unsent.clear()
            self._room.notify_all()
            if self._loop is not None:
                self._loop.remove_reader(self._socket.fileno())
                self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.done():
                each.set_exception(Unavailable("the engine's process has ended; use another worker"))
                each.exception()
        if report:
            self._on_end()
