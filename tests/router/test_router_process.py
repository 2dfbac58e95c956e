"""The router as a process: its flags, its signals, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_fakes import Cluster, Reply, Script, until

from twostep.local.ports import free_ports
from twostep.local.supervisor import Component, Observer, Supervisor
from twostep.rpc.v1 import inference_pb2, inference_pb2_grpc


def free_port() -> int:
    """One whose neighbour, the health port, is free too; neither is ever the near end of an outgoing connection."""
    while True:
        (port,) = free_ports(1)
        with socket.socket() as neighbour:
            try:
                neighbour.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
        return port


def command(cluster: Cluster, *flags: str, runs: Sequence[str] = ("-m", "router")) -> tuple[str, ...]:
    """`runs`: what Python runs."""
    settings = {
        "host": "127.0.0.1",
        "port": "0",
        "served-model-name": "m",
        "model": str(cluster.model_dir),
        "secret-file": str(cluster.secret_file),
        "redis-url": cluster.redis_server.url,
    }
    return (sys.executable, "-P", *runs, *(f"--{name}={value}" for name, value in settings.items()), *flags)


async def start(cluster: Cluster, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(*command(cluster, *flags), stderr=asyncio.subprocess.PIPE)


@asynccontextmanager
async def running(cluster: Cluster, port: int, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await start(cluster, "--grpc-port", str(port), *flags)
    beat = asyncio.create_task(cluster.beat_forever())
    try:
        yield process
    finally:
        beat.cancel()
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def health(port: int, service: str) -> bool | None:
    """None: it does not answer."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
        except grpc.aio.AioRpcError:
            return None
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def wait_health(port: int, service: str, wanted: bool | None) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if await health(port, service) is wanted:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{service} on {port} did not become {wanted}")


async def refused(stub: inference_pb2_grpc.InferenceAsyncStub) -> grpc.StatusCode:
    """How, once it is: its readiness goes a moment before."""
    async with asyncio.timeout(60):
        while True:
            try:
                await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60)
            except grpc.aio.AioRpcError as error:
                return error.code()
            await asyncio.sleep(0.01)


# A router that hangs when it is told so.
HANGING = """
import signal, sys, time
from router.__main__ import main
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000))
sys.exit(main())
"""


@pytest.mark.system
async def test_a_hung_router_is_started_again_on_its_port(cluster: Cluster, tmp_path: Path) -> None:
    port = free_port()
    told: list[str] = []

    async def ready() -> bool:
        return await health(port + 1, "liveness") is True

    flags = ("--hung-after", "1", "--grpc-port", str(port))
    router = Component(name="router", argv=command(cluster, *flags, runs=("-c", HANGING)), env=dict(os.environ), ready=ready)
    supervisor = Supervisor([router], run_dir=tmp_path, observer=Observer(told.append))
    try:
        await supervisor.start()
        pid = supervisor.pid_of("router")
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        await until(lambda: sum(": ready" in line for line in told) == 2, "the supervisor has started it again")
    finally:
        await supervisor.stop()
    assert "<lambda>" in supervisor.log_of("router").read_text(), "where it hung"


@pytest.mark.system
@pytest.mark.smoke
async def test_it_is_ready_once_it_can_serve_and_drains_at_sigterm(cluster: Cluster) -> None:
    await cluster.prefill()
    port = free_port()
    async with running(cluster, port, "--drain-timeout", "120") as process:
        await wait_health(port + 1, "liveness", True)
        assert await health(port + 1, "readiness") is False, "there is no decode worker yet"
        decode = await cluster.decode()
        decode.script = Script(hold_at=10)
        go_on = decode.script.go_on
        await wait_health(port + 1, "readiness", True)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(cluster.request(max_tokens=60), timeout=60)
            reply = Reply()
            async for response in call:
                reply.add(response)
                if len(reply.token_ids) >= 5 and not go_on.is_set():
                    process.send_signal(signal.SIGTERM)
                    await wait_health(port + 1, "readiness", False)
                    assert await health(port + 1, "liveness")
                    assert await refused(stub) is grpc.StatusCode.UNAVAILABLE
                    go_on.set()
        assert reply.token_ids == cluster.expected(60), "what ran was allowed to end"
        assert await asyncio.wait_for(process.wait(), 60) == 0
    await cluster.all_free()


@pytest.mark.system
async def test_what_does_not_end_in_time_is_cancelled_everywhere(cluster: Cluster) -> None:
    await cluster.prefill()
    decode = await cluster.decode()
    decode.script = Script(hold_at=5)
    port = free_port()
    async with running(cluster, port, "--drain-timeout", "0.3") as process:
        await wait_health(port + 1, "readiness", True)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(cluster.request(max_tokens=1000), timeout=60)
            await call.read()
            await until(lambda: bool(decode.held), "it is served")
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 60) == 0
        await cluster.all_free()
        assert len(set(decode.cancels)) == 1


@pytest.mark.system
async def test_each_thing_that_prevents_a_start_is_said_with_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = {
            ("--model", str(tmp_path)): "config.json",
            ("--grpc-port", port): "--grpc-port",
            ("--redis-url", f"unix://{tmp_path}/none.sock", "--redis-start-timeout", "0.3"): "--redis-url",
            ("--redis-url", "ftp://nowhere"): "--redis-url",
            ("--secret-file", str(tmp_path / "none")): "--secret-file",
            ("--tls-cert", str(tmp_path / "none")): "--tls-key",
        }
        # Each with ports of its own: they are bound before what is wrong is found.
        processes = [await start(cluster, "--grpc-port", str(free_port()), "--metrics-port", "-1", *flags) for flags in cases]
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
    for (flags, words), process, (_, stderr) in zip(cases.items(), processes, outputs, strict=True):
        said = stderr.decode()
        assert process.returncode == 2, (flags, said)
        assert words in said, (flags, said)
        assert "Traceback" not in said, (flags, said)
