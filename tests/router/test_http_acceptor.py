"""Thousands of connections at once are taken in many turns of the event loop."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.http.acceptor import Acceptor

NUM = 200


class Counted(asyncio.Protocol):
    made = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Counted.made += 1
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"taken")
        transport.close()


async def test_a_turn_of_the_loop_takes_few() -> None:
    Counted.made = 0
    acceptor = Acceptor(Counted)
    port = await acceptor.open("127.0.0.1", 0)
    # The kernel takes them meanwhile.
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(NUM)]
    of_turn = []
    async with asyncio.timeout(60):
        while Counted.made < NUM:
            before = Counted.made
            await asyncio.sleep(0)
            of_turn.append(Counted.made - before)
    assert max(of_turn) <= NUM // 8
    for client in clients:
        with client:
            assert await asyncio.to_thread(client.recv, 16) == b"taken"
    acceptor.close()
    acceptor.close()


async def test_it_listens_again_on_its_port_and_on_none_that_is_taken() -> None:
    first = Acceptor(Counted)
    port = await first.open("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        await Acceptor(Counted).open("127.0.0.1", port)
    first.close()
    again = Acceptor(Counted)
    assert await again.open("127.0.0.1", port) == port
    again.close()
