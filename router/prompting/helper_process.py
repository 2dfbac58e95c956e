"""A process that may die of what it is asked, seen from the router (twostep/process/helper_service.py is its inside)."""

from __future__ import annotations

import asyncio
import signal
import sys

from twostep.process.helper_service import ANSWER, ASK

# Of an answer that is being read.
_READ_BYTES = 1 << 18


TIME, MEMORY = "time", "memory"


class Lost(Exception):
    """The process is of no use any more. Says what there was too little of: time or memory."""


class HelperProcess:
    """Asked one thing at a time. Whoever gives up on an answer has to end it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, *arguments: str) -> HelperProcess:
        """Returns before it is ready: it is once it has answered."""
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                module,
                *arguments,
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
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                raise Lost(TIME if await self._process.wait() == -signal.SIGPROF else MEMORY) from error

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
