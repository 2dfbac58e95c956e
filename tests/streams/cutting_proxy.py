"""A TCP proxy whose connections a test cuts."""

from __future__ import annotations

import asyncio


class CuttingProxy:
    """Forwards bytes to `target` (host:port, set before the first connection). While `down`, new connections are accepted and cut at once:
    what stands in the way is there, and what is behind it cannot be reached."""

    def __init__(self) -> None:
        self.target = ""
        self.down = False
        self.num_cut = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        """Stops listening, and cuts all connections."""
        self.down = True
        if self._server is not None:
            self._server.close()
        # Connections of the last moment are still to be told, and cut ones to be let go: some rounds of the loop each.
        for _ in range(10):
            await asyncio.sleep(0)
        self.cut()
        # Each ends by itself with its connection.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in range(10):
            await asyncio.sleep(0)

    def cut(self) -> None:
        """Resets every connection, in both directions, whatever is under way on it."""
        for writer in list(self._writers):
            self.num_cut += 1
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            host, _, port = self.target.rpartition(":")
            other_reader, other_writer = await asyncio.open_connection(host, int(port))
        except BaseException as error:
            self._writers.discard(writer)
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        self._writers.add(other_writer)
        if writer.transport.is_closing():
            other_writer.transport.abort()
        try:
            await asyncio.wait(
                [asyncio.ensure_future(_pump(reader, other_writer)), asyncio.ensure_future(_pump(other_reader, writer))],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for end in (writer, other_writer):
                self._writers.discard(end)
                end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except (OSError, RuntimeError):
        return
