"""The node of Ray that workers stand beside: what it starts, that it waits for its head, and that nothing outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
import redis.asyncio

from kv_transfer.ray import node as ray_node
from kv_transfer.ray.node import NodeConfig, RayNode, RayPorts, node_env, parse_node
from twostep.errors import SetupError
from twostep.local.ports import free_ports
from twostep.local.redis_server import server_argv, server_binary, socket_path


def test_ports_are_those_that_the_network_policy_opens() -> None:
    ports = RayPorts(first=11001, num_worker_ports=40)
    numbers = [int(flag.rpartition("=")[2]) for flag in ports.flags()]
    assert numbers[:6] == [11001, 11002, 11003, 11004, 11005, 11006]
    assert (ports.first_worker_port, ports.last) == (11010, 11049) == tuple(numbers[6:])


@pytest.mark.parametrize(("first", "count"), [(1000, 40), (65500, 40), (11001, 7)])
def test_ports_that_do_not_fit_are_refused(first: int, count: int) -> None:
    with pytest.raises(SetupError):
        RayPorts(first=first, num_worker_ports=count)


def test_a_head_keeps_its_state_where_it_is_told(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret words\n")
    head = parse_node(
        ["--ray-head", "--ray-address", "0.0.0.0:6379", "--ray-redis-password-file", str(password), "--ray-first-port", "12000"]
    )
    argv = head.argv()
    assert {"--head", "--port=6379", "--redis-password=secret words", "--object-manager-port=12000"} <= set(argv)
    assert any("automatic_object_spilling_enabled" in word for word in argv)
    assert "secret" not in repr(head)
    node = parse_node(["--ray-address", "head:6379", "--ray-node-ip", "10.0.0.7"])
    assert {"--address=head:6379", "--node-ip-address=10.0.0.7", "--no-redirect-output"} <= set(node.argv())
    assert "--head" not in node.argv()
    assert not any("port" in word for word in node.argv())


@pytest.mark.parametrize("flags", [["--ray-address", "head"], ["--ray-store-bytes", "1000"], ["--ray-temp-dir", "/" + "x" * 60]])
def test_what_ray_would_stumble_over_is_said_before(flags: list[str]) -> None:
    with pytest.raises((SystemExit, SetupError)):
        parse_node(flags)


def test_what_the_environment_says_of_ray_stands() -> None:
    env = node_env({"RAY_BACKEND_LOG_LEVEL": "debug", "HOME": "/h"})
    assert (env["RAY_BACKEND_LOG_LEVEL"], env["HOME"], env["RAY_gcs_rpc_server_reconnect_timeout_s"]) == ("debug", "/h", "600")


def _config(port: int, tmp_path: Path) -> NodeConfig:
    return NodeConfig(ray_address=f"127.0.0.1:{port}", ray_temp_dir=tmp_path, ray_store_bytes=1 << 27, ray_client_port=1)


def test_it_waits_for_the_head_and_starts_ray_again_each_time_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "_POLL_S", 0.01)
    monkeypatch.setattr(ray_node, "_FIRST_BACKOFF_S", 0.01)
    lives = tmp_path / "lives"
    script = f"import os; open({str(lives)!r}, 'a').write(str(os.getpid()) + ' '); os._exit(3)"
    monkeypatch.setattr(NodeConfig, "argv", lambda _: [sys.executable, "-S", "-c", script])
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        node = RayNode(_config(head.getsockname()[1], tmp_path), os.environ)
        polls = 0

        def pause(seconds: float) -> None:
            nonlocal polls
            polls += 1
            if polls == 3:
                assert not lives.exists(), "the head does not listen yet"
                head.listen()
            if lives.exists() and len(lives.read_text().split()) >= 3:
                node.stop()

        monkeypatch.setattr(node, "_pause", pause)
        node.run()
    assert len(set(lives.read_text().split())) == 3


@pytest.mark.system
@pytest.mark.smoke
def test_a_signal_ends_it_and_what_it_started(tmp_path: Path) -> None:
    """While Ray starts: with a head that accepts and never answers."""
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        address = f"127.0.0.1:{head.getsockname()[1]}"
        argv = [sys.executable, "-P", "-m", "kv_transfer.ray.node", "--ray-address", address, "--ray-temp-dir", str(tmp_path)]
        if len(os.fsencode(tmp_path)) > 43:
            argv[-1] = f"/tmp/rn-{free_ports(1)[0]}"
        node = subprocess.Popen(argv, stderr=subprocess.PIPE, start_new_session=True)
        assert node.stderr is not None
        try:
            assert b"starts" in node.stderr.readline()
            node.send_signal(signal.SIGTERM)
            assert node.wait(60) == 0
            deadline = time.monotonic() + 60
            while _in_session(node.pid):
                assert time.monotonic() < deadline, "what it started goes on"
                time.sleep(0.05)
        finally:
            node.kill()
            node.stderr.close()
            node.wait()
            Path(argv[-1]).rmdir()


@asynccontextmanager
async def _over_tls(server: Path, certificate: tuple[Path, Path]) -> AsyncIterator[int]:
    """A port that speaks TLS before a Redis server's unix socket: the server of the wheel cannot."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to = await asyncio.open_unix_connection(server)
        await asyncio.gather(pump(reader, to), pump(behind, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as listener:
        yield listener.sockets[0].getsockname()[1]


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory that Ray's sockets have room in."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.system
async def test_a_head_keeps_its_state_in_a_redis_over_tls(short_dir: Path, self_signed: tuple[Path, Path]) -> None:
    """As docs/ray.md says: rediss:// and the authority's file."""
    gcs, client = free_ports(2)
    argv = ["-P", "-m", "kv_transfer.ray.node", "--ray-head", "--ray-address", f"127.0.0.1:{gcs}", "--ray-client-port", str(client)]
    argv += ["--ray-node-ip", "127.0.0.1", "--ray-temp-dir", str(short_dir / "ray")]
    server = await asyncio.create_subprocess_exec(*server_argv(server_binary(), short_dir), stdout=subprocess.DEVNULL)
    try:
        async with (
            _over_tls(socket_path(short_dir), self_signed) as port,
            redis.asyncio.Redis(unix_socket_path=str(socket_path(short_dir))) as store,
            asyncio.timeout(120),
        ):
            state = {"RAY_REDIS_ADDRESS": f"rediss://localhost:{port}", "RAY_external_storage_namespace": "one"}
            env = {**os.environ, **state, "RAY_REDIS_CA_CERT": str(self_signed[0])}
            head = await asyncio.create_subprocess_exec(sys.executable, *argv, env=env)
            try:
                while b"RAYone@NODE" not in await store.keys("RAYone@*"):
                    assert head.returncode is None
                    await asyncio.sleep(0.1)
                head.send_signal(signal.SIGTERM)
                assert await head.wait() == 0
            finally:
                if head.returncode is None:
                    head.kill()
                    await head.wait()
    finally:
        server.kill()
        await server.wait()


def _in_session(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
