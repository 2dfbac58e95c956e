"""Tests of the connection to Redis that many ask at once: each gets its own replies, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisAway
from redis.exceptions import RedisError, ResponseError

from twostep.cluster.shared_connection import SharedConnection


@pytest.fixture
async def shared(redis_client: redis.asyncio.Redis) -> AsyncIterator[SharedConnection]:
    connection = SharedConnection(redis_client)
    yield connection
    await connection.close()


async def test_each_gets_the_replies_to_what_it_asked(shared: SharedConnection) -> None:
    found = await asyncio.gather(*(shared.ask([("ECHO", f"{i}.{j}") for j in range(i % 4 + 1)]) for i in range(100)))
    assert found == [[f"{i}.{j}".encode() for j in range(i % 4 + 1)] for i in range(100)]


async def test_an_error_is_the_reply_of_its_command_alone(shared: SharedConnection) -> None:
    await shared.ask([("SET", "text", "x")])
    before, wrong, after = await shared.ask([("ECHO", "1"), ("SMISMEMBER", "text", b"a"), ("ECHO", "2")])
    assert isinstance(wrong, ResponseError)
    assert (before, after) == (b"1", b"2")


async def test_who_stops_waiting_leaves_its_replies_to_nobody(shared: SharedConnection) -> None:
    await shared.ask([("PING",)])
    asked = [asyncio.create_task(shared.ask([("ECHO", str(i))])) for i in range(20)]
    await asyncio.sleep(0)  # all of it is sent
    for task in asked[::2]:
        task.cancel()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert found[1::2] == [[str(i).encode()] for i in range(1, 20, 2)]


async def test_a_lost_connection_is_made_again(shared: SharedConnection, redis_client: redis.asyncio.Redis) -> None:
    (number,) = await shared.ask([("CLIENT", "ID")])
    waiting = asyncio.create_task(shared.ask([("BLPOP", "nothing", "0")]))
    await asyncio.sleep(0)
    while await redis_client.client_kill_filter(_id=str(number)):
        pass
    with pytest.raises(RedisError):
        await waiting
    (another,) = await shared.ask([("CLIENT", "ID")])
    assert another != number


async def test_a_server_that_is_silent_is_asked_over_another_connection(shared: SharedConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    (number,) = await shared.ask([("CLIENT", "ID")])
    monkeypatch.setattr("twostep.cluster.shared_connection._SILENT_S", 0.01)
    with pytest.raises(TimeoutError):
        await shared.ask([("BLPOP", "nothing", "0")])
    monkeypatch.undo()
    assert (await shared.ask([("CLIENT", "ID")]))[0] != number


async def test_nobody_waits_for_a_connection_that_is_closed(shared: SharedConnection) -> None:
    await shared.ask([("PING",)])
    waiting = asyncio.create_task(shared.ask([("BLPOP", "nothing", "0")]))
    await asyncio.sleep(0)
    await shared.close()
    with pytest.raises(RedisAway):
        await waiting


async def test_a_server_that_is_not_there_is_an_error() -> None:
    async with redis.asyncio.Redis(host="127.0.0.1", port=1, retry=Retry(NoBackoff(), 1)) as nobody:
        connection = SharedConnection(nobody)
        with pytest.raises((RedisError, OSError)):
            await connection.ask([("PING",)])
        await connection.close()
