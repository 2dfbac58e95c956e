"""Fixtures of the router's tests: no torch, no Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import redis.asyncio
from http_fakes import open_client, open_http
from openai import AsyncOpenAI
from router_fakes import Cluster, FakeDecode, FakePrefill, RedisServer, make_model_dir

from twostep.cluster.connection import connect


@pytest.fixture(scope="session")
def bare_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("router") / "model")


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """Empty, and up; a test may kill or freeze it."""
    shared_redis.reset()
    return shared_redis


@pytest.fixture
async def redis_client(redis_server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    made = connect(redis_server.url)
    yield made
    await made.aclose()


@pytest.fixture
async def cluster(bare_model_dir: Path, redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """No workers yet, no router yet."""
    built = Cluster(bare_model_dir, redis_server, tmp_path)
    yield built
    await built.close()


@pytest.fixture
async def prefill(cluster: Cluster) -> FakePrefill:
    return await cluster.prefill()


@pytest.fixture
async def decode(cluster: Cluster) -> FakeDecode:
    return await cluster.decode()


@pytest.fixture
async def http(cluster: Cluster, prefill: FakePrefill, decode: FakeDecode) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that hides nothing, of a router with its defaults and a worker of each role."""
    async with cluster.serving(), open_http(cluster) as session:
        yield session


@pytest.fixture
async def client(cluster: Cluster, http: aiohttp.ClientSession) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's, of the same router."""
    async with open_client(cluster) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def quick_starts(no_full_collections: None) -> None:
    """Makes routers start quickly; see `no_full_collections`."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the bounds after which a router takes silence for a loss: tests and workers may stand still for longer, all at once. Tests of
    one of these bounds give a short one."""
    for name in (
        "router.serving.attempt._UNARY_TIMEOUT_S",
        "router.serving.attempt._DONE_TIMEOUT_S",
        "router.serving.attempt._MAX_EARLY_S",
        "router.workers.decode_stream._OPEN_TIMEOUT_S",
        "router.workers.decode_stream._CANCEL_SETTLES_S",
        "router.serving.attempt.ACCEPT_TIMEOUT_S",
        "router.serving.embedding.ACCEPT_TIMEOUT_S",
        "twostep.cluster.exchange._TIMEOUT_S",
        "router.access.control._READ_TIMEOUT_S",
        "router.server.TRACES_FLUSH_S",
        "twostep.cluster.connection._TIMEOUT_S",
    ):
        monkeypatch.setattr(name, 60.0)
