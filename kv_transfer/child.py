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


class Child:
    """Made by `start`. Its standard input is only ever closed: that tells it to end."""

    def __init__(self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self.stdout, self.stderr = stdout, stderr
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._watch, name=f"child-{process.pid}", daemon=True).start()

    @classmethod
    async def start(cls, argv: Sequence[str]) -> Child:
        """In a session of its own: a Ctrl-C in this process's terminal is this process's to handle. Raises OSError."""
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

    def kill(self) -> None:
        """Nothing happens if it has ended."""
        self._process.kill()

    def _watch(self) -> None:
        self._process.wait()
        self.close_stdin()
        # The loop may be closed: then nobody waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended.set)


async def _reader(pipe: IO[bytes] | None) -> asyncio.StreamReader:
    assert pipe is not None
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader
