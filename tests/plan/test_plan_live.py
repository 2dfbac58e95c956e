"""Curves of running workers, out of a real Redis."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from test_plan_inputs import worker_record

from twostep.cluster.records import WORKERS_KEY, worker_key
from twostep.errors import SetupError
from twostep.lab.plan.machine import registered_workers
from twostep.local.redis_server import server_argv, server_binary, server_url

pytestmark = pytest.mark.system


@pytest.fixture
def redis_url() -> Iterator[str]:
    """In a short directory: a unix socket's path is bounded."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        process = subprocess.Popen(server_argv(server_binary(), directory), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            give_up = time.monotonic() + 30
            while not (directory / "redis.sock").exists():
                assert time.monotonic() < give_up, "the Redis server did not start"
                time.sleep(0.01)
            yield server_url(directory)
        finally:
            process.kill()
            process.wait()


def test_registered_workers_are_read_and_expired_ones_left_out(redis_url: str) -> None:
    with pytest.raises(SetupError):
        registered_workers(redis_url)
    records = [worker_record("decode"), worker_record("prefill")]
    with redis.Redis.from_url(redis_url) as client:
        for record in records:
            client.set(worker_key(record.worker_id), record.to_json())
            client.sadd(WORKERS_KEY, record.worker_id)
        client.sadd(WORKERS_KEY, "expired")
    assert registered_workers(redis_url) == records


def test_no_redis_there() -> None:
    with pytest.raises(SetupError, match=r"redis://127\.0\.0\.1:9"):
        registered_workers("redis://127.0.0.1:9/0")
    with pytest.raises(SetupError):
        registered_workers("carrier pigeon")
