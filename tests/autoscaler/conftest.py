"""Fixtures of the autoscaler's tests: no torch, no Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from service_harness import WAIT_S, RedisServer, Scene, Writer, client, patient


@pytest.fixture(autouse=True)
def _patient_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that a busy machine holds up for a second is not given up: tests have clocks and leases of their own, by which nobody comes
    again for an hour. A server that is killed fails at once all the same."""
    monkeypatch.setattr("twostep.autoscaler.server.connect", patient)
    monkeypatch.setattr("twostep.autoscaler.collect._TIMEOUT_S", WAIT_S)


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


@pytest.fixture
def scene(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> Scene:
    return Scene(redis_server, writer, tmp_path)
