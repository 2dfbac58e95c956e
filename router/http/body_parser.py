"""Bodies of strangers become objects without holding up the event loop: what few values have, here and now; the others, in a process.

    raw ─ how many values? ─┬─ few ──────────────────────────▶ parsed on the loop, in a millisecond or two
                            ├─ many ── a thread ── a process ▶ parsed there: parsers hold the interpreter's lock all the while
                            └─ more than anybody needs ──────▶ refused before anything is made of them

Processes (router/http/body_process.py) start with the first body that needs one.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from router.bounded_threads import BoundedThreads
from router.http.errors import HttpError
from router.json_size import JsonSize, checked_size, rough_size
from twostep.errors import ResourceExhausted, Unavailable

T = TypeVar("T")

# What a millisecond or two is enough for.
_FEW_CONTAINERS = 600
_FEW_VALUES = 10_000
_SHORT_BYTES = 1 << 20
_NUM_PROCESSES = 2
_MAX_WAITING = 64
# Of the processor, and of memory: what such a body takes is a second, and 300 MB.
_PARSE_S = 10
_MEMORY_BYTES = 1 << 30


class BodyParser:
    """Of one router. Belongs to its event loop."""

    def __init__(self) -> None:
        self._threads = BoundedThreads(_NUM_PROCESSES, "body")
        self._idle: list[_Process] = []
        self._num_waiting = 0
        self._closed = False

    async def parse(self, read: Callable[[bytes], T], raw: bytes) -> T:
        """What `read` makes of the bytes; a function that can be pickled, as its result can. Raises the HttpError that it does,
        InvalidRequest (too many values), ResourceExhausted (too many others wait)."""
        if len(raw) <= _SHORT_BYTES and (_is_light(rough_size(raw)) or _is_light(checked_size(raw))):
            return read(raw)
        if self._num_waiting >= _MAX_WAITING:
            raise ResourceExhausted(f"{self._num_waiting} large bodies wait to be read; repeat later", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            return await self._threads.run(self._parse, read, raw)
        finally:
            self._num_waiting -= 1

    def _parse(self, read: Callable[[bytes], T], raw: bytes) -> T:
        """In a thread."""
        checked_size(raw)
        process = self._idle.pop() if self._idle else _Process()
        try:
            kind, answer = process.ask(read, raw)
        except BaseException:
            process.end()
            raise
        if self._closed:
            process.end()
        else:
            self._idle.append(process)
        if kind == "refused":
            raise HttpError(**answer)
        if kind == "failed":
            raise RuntimeError(f"a body could not be parsed: {answer}")
        result: T = answer
        return result

    def close(self) -> None:
        """When nothing is asked any more."""
        self._closed = True
        self._threads.close()
        while self._idle:
            self._idle.pop().end()


class _Process:
    def __init__(self) -> None:
        """Blocks until it is there, for a second or two. Raises Unavailable."""
        argv = (sys.executable, "-P", "-m", "router.http.body_process", str(_MEMORY_BYTES), str(_PARSE_S))
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        # Its first word says that it is there.
        assert self._process.stdout is not None
        if not self._process.stdout.read(1):
            self.end()
            raise Unavailable("the router cannot start the process that reads large bodies; repeat later, or send a smaller one")

    def ask(self, read: Callable[[bytes], Any], raw: bytes) -> tuple[str, Any]:
        """Blocks, for as long as a body may take. Raises HttpError 400 where it took more: the process is over then."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((read, raw), process.stdin, protocol=5)
            process.stdin.flush()
            answer: tuple[str, Any] = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise HttpError(400, "the body takes too much time or memory to read; send fewer values") from error
        return answer

    def end(self) -> None:
        process = self._process
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        process.wait()


def _is_light(size: JsonSize) -> bool:
    return size.containers <= _FEW_CONTAINERS and size.values <= _FEW_VALUES
