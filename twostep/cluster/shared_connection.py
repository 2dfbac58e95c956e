"""One connection to Redis that many ask at once, for what requests wait for: commands leave as they come, and replies come in their order.

A client's pool takes a connection for each exchange and gives it back, which takes more time than all the rest of a short one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

# A server that is silent for so long is asked anew, over another connection.
_SILENT_S = 5.0

Command = tuple[str | bytes, ...]


@dataclass(slots=True, eq=False)
class _Asked:
    """Commands that were sent together; a reply may be an error."""

    num: int
    answered: asyncio.Future[list[object]]
    replies: list[object] = field(default_factory=list)


class SharedConnection:
    """Belongs to one event loop. Connects when it is asked, and again after a loss."""

    def __init__(self, redis: Redis) -> None:
        """`redis` says where and how, and is its owner's to close."""
        self._redis = redis
        self._connection: AbstractConnection | None = None
        self._connecting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._asked: deque[_Asked] = deque()

    async def ask(self, commands: Sequence[Command]) -> Sequence[object]:
        """Returns one reply for each; what a command failed with is its reply. Raises RedisError, OSError and TimeoutError: no answer came.
        Whoever stops waiting holds up nobody."""
        connection = self._connection or await self._connected()
        asked = _Asked(len(commands), asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        late = asyncio.get_running_loop().call_later(_SILENT_S, self._lose, connection, TimeoutError("no answer"))
        try:
            # It is written before anything else runs here.
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            return await asked.answered
        except (RedisError, OSError) as error:
            self._lose(connection, error)
            raise
        finally:
            late.cancel()

    async def close(self) -> None:
        """Closes the connection. Idempotent. Whoever waits gets an error."""
        if self._connection is not None:
            self._lose(self._connection, RedisConnectionError("closed"))
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def _connected(self) -> AbstractConnection:
        async with self._connecting:
            if self._connection is not None:
                return self._connection
            make: Callable[[], AbstractConnection] = self._redis.connection_pool.make_connection
            connection = make()
            connect: Callable[[], Awaitable[None]] = connection.connect
            await connect()
            # Nobody may be waiting for long, and who is has a timer.
            connection.socket_timeout = None
            self._connection = connection
            self._reading = asyncio.create_task(self._read(connection), name="redis replies")
            return connection

    async def _read(self, connection: AbstractConnection) -> None:
        try:
            while True:
                reply: object
                try:
                    reply = await connection.read_response(disable_decoding=True)
                except ResponseError as error:
                    reply = error
                if not self._asked:
                    raise RedisConnectionError("a reply that nobody has asked for")
                asked = self._asked[0]
                asked.replies.append(reply)
                if len(asked.replies) == asked.num:
                    self._asked.popleft()
                    if not asked.answered.done():
                        asked.answered.set_result(asked.replies)
        except (RedisError, OSError) as error:
            self._lose(connection, error)
        finally:
            await connection.disconnect(nowait=True)

    def _lose(self, connection: AbstractConnection, error: Exception) -> None:
        """Fails all that is asked over the connection."""
        if self._connection is not connection:
            return
        self._connection = None
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
        asked, self._asked = self._asked, deque()
        for each in asked:
            if not each.answered.done():
                each.answered.set_exception(error)
                each.answered.exception()  # seen, in case nobody waits for it any more
