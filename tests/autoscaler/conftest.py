"""Fixtures of the autoscaler's tests: no torch, no Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from service_harness import RedisServer, Writer, client


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    directory = tmp_path / "redis"
    directory.mkdir()
    server = RedisServer(directory)
    yield server
    server.kill()


@pytest.fixture
async def writer(redis_server: RedisServer) -> AsyncIterator[Writer]:
    async with client(redis_server.url) as connection:
        yield Writer(connection)
