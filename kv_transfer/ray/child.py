"""A child process whose pipes the event loop reads, begun without running any of Python's own code after the fork.

uvloop begins children by a plain fork that lets Python tidy up in the child; there, what CUDA has left in other threads' memory aborts
the child before it is anything. subprocess goes from fork to exec in C.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

_Pipe = tuple[asyncio.StreamReader, asyncio.ReadTransport]


class Child:
    """Made by `start`, ended by its own end and `close`. Its standard input is only ever closed: that tells it to end."""

    def __init__(self, process: subprocess.Popen[bytes], stdout: _Pipe, stderr: _Pipe) -> None:
        (self.stdout, _), (self.stderr, _) = stdout, stderr
        self._transports = stdout[1], stderr[1]
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._watch, name=f"child-{process.pid}", daemon=True).start()

    @classmethod
    async def start(cls, argv: Sequence[str]) -> Child:
        """Starts the child in a session of its own: a Ctrl-C in this process's terminal is this process's to handle. Raises OSError."""
        process = await asyncio.to_thread(
            subprocess.Popen,
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process, await _reader(process.stdout), await _reader(process.stderr))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None: it runs, or its end has not been noticed yet."""
        return self._process.returncode

    async def wait(self) -> int:
        await self._ended.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    def close_stdin(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """Stops reading what the child says. Idempotent. (At its end the pipes close by themselves, but where a process of its own still
        has them, or what it said was never read.)"""
        for transport in self._transports:
            transport.close()

    def kill(self) -> None:
        """Kills the child. Nothing happens if it has ended."""
        self._process.kill()

    def _watch(self) -> None:
        self._process.wait()
        self.close_stdin()
        # The loop may be closed: then nothing waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended.set)


async def _reader(pipe: IO[bytes] | None) -> _Pipe:
    assert pipe is not None
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader, transport
