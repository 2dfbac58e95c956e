"""A Redis-protocol server for the workers' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worker_harness import WAIT_S, RedisServer


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One that a test may lose."""
    server = RedisServer(tmp_path_factory.mktemp("own-redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def patient_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has to wait for the first probe fails after 2 s, which on a busy machine is no more than a probe may take."""
    monkeypatch.setattr("decode_worker.paths._WAIT_S", WAIT_S)


@pytest.fixture(scope="module", autouse=True)
def quick_starts(no_full_collections: None) -> None:
    """Of routers; see there."""
