"""A worker process over two ranks ends with exit code 1 when one of them dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tiny_models import save_tiny_model
from worker_harness import SECRET, RedisServer

from twostep.local.ports import free_ports

# As python -m prefill_worker, but for the transport: Ray takes longer to start than all the rest.
_WORKER = """
import sys
from kv_transfer.local.transport import LocalHub
from twostep.worker.process import run_worker
from worker_harness import prefill_edge
sys.exit(run_worker("prefill", sys.argv[1:], prefill_edge(LocalHub())))
"""
START_S = 120.0
END_S = 60.0


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def worker(model_dir: Path, redis: RedisServer, directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process, Path]]:
    """A ready one, its rank 1, and its log."""
    (directory / "secret").write_bytes(SECRET)
    log = directory / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-c", _WORKER, "--model", str(model_dir), "--device", "cpu", "-tp", "2"),
                *("--port", str(free_ports(1)[0]), "--health-port", str(free_ports(1)[0]), "--redis-url", redis.url),
                *("--secret-file", str(directory / "secret"), "--num-blocks", "64", "--cpu-threads", "1"),
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        give_up = time.monotonic() + START_S
        while "ready: prefill" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        ranks = [child for child in psutil.Process(process.pid).children() if "twostep.model.runner.parallel_rank" in child.cmdline()]
        assert len(ranks) == 1
        yield process, ranks[0], log
    finally:
        process.kill()
        process.wait()


@pytest.mark.system
def test_it_ends_when_a_rank_dies(model_dir: Path, redis: RedisServer, tmp_path: Path) -> None:
    with worker(model_dir, redis, tmp_path) as (process, rank, log):
        rank.kill()
        assert process.wait(END_S) == 1, log.read_text()
        assert "rank 1 was ended by SIGKILL (signal 9)" in log.read_text()
