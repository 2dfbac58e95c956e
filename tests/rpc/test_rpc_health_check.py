"""The health check of containers, against a real health port."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2_grpc

from twostep.rpc import health_check
from twostep.rpc.health import READINESS, HealthBoard, HealthServicer


@pytest.fixture
async def served() -> AsyncIterator[tuple[HealthBoard, str]]:
    board = HealthBoard()
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(board), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield board, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_the_answer_is_told_apart(served: tuple[HealthBoard, str]) -> None:
    board, address = served
    assert await asyncio.to_thread(health_check.check, address, "readiness", 30.0) == "NOT_SERVING"
    assert await asyncio.to_thread(health_check.check, address, "liveness", 30.0) == ""
    board.set(READINESS, True)
    assert await asyncio.to_thread(health_check.check, address, "readiness", 30.0) == ""
    assert await asyncio.to_thread(health_check.check, address, "", 30.0) == ""
    assert (await asyncio.to_thread(health_check.check, address, "other", 30.0)).startswith("NOT_FOUND: no service 'other'")


async def test_the_exit_code_says_it(served: tuple[HealthBoard, str], capsys: pytest.CaptureFixture[str]) -> None:
    board, address = served
    assert await asyncio.to_thread(health_check.main, [address, "--timeout", "30"]) == 1
    assert capsys.readouterr().err == f"{address} readiness: NOT_SERVING\n"
    board.set(READINESS, True)
    command = [sys.executable, "-P", "-m", "twostep.rpc.health_check", address, "--timeout", "60"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, error = await process.communicate()
    assert (process.returncode, error) == (0, b"")


def test_nobody_there(silent_address: str) -> None:
    problem = health_check.check(silent_address, "readiness", 5.0)
    assert problem.startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED"))


@pytest.fixture
def silent_address() -> Iterator[str]:
    """A port that is taken and does not listen: nobody can answer there."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"
