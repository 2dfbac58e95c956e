"""The operators' port."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from http_fakes import CHAT, chat, open_http, refused, told, url
from router_fakes import SECRET, Cluster, RedisServer

from router.http.admin import load_admin_keys
from twostep.errors import SetupError
from twostep.keys.api_keys import admin_key, system_key
from twostep.local.ports import free_ports
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import RolePass


@asynccontextmanager
async def administered(cluster: Cluster, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """With keys in Redis; the client shows the admin key."""
    async with cluster.serving(**{"api_keys": "redis", "admin_port": 0, **options}):
        base = f"http://127.0.0.1:{cluster.router.admin_port}"
        headers = {"Authorization": f"Bearer {admin_key(SECRET)}"}
        async with aiohttp.ClientSession(base, headers=headers, timeout=aiohttp.ClientTimeout(120)) as http:
            yield http


async def test_without_the_admin_key_there_is_nothing(cluster: Cluster) -> None:
    async with administered(cluster) as http, aiohttp.ClientSession() as bare:
        admin = f"http://127.0.0.1:{cluster.router.admin_port}"
        for path in ("/admin/keys", "/admin/nowhere", "/"):
            for given in ("", "Bearer x", f"Bearer {system_key(SECRET)}", f"Basic {admin_key(SECRET)}", "Bearer ü"):
                await refused(bare, admin + path, None, 401, headers={"Authorization": given})
        await refused(http, "/admin/nowhere", None, 404)
        # Nor is anything of it on the other port, and its key opens nothing there but the page's data.
        await refused(bare, f"{url(cluster)}/v1/models", None, 401, headers={"Authorization": f"Bearer {admin_key(SECRET)}"})
        await refused(bare, f"{url(cluster)}/admin/keys", None, 404, headers={"Authorization": f"Bearer {system_key(SECRET)}"})


async def test_the_life_of_a_key(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await cluster.prefill()
    await cluster.decode()
    async with administered(cluster) as http, open_http(cluster) as client:

        async def ask(status: int) -> Any:
            # Debts of a few minutes: they are still there when the limit has changed.
            body = chat(max_tokens=200, ignore_eos=True)
            return await told(client, CHAT, body, status, headers={"Authorization": f"Bearer {shown}"})

        wanted = {"name": "Ann's", "tenant": "acme", "tokens_per_minute": 60, "expires": "2999-01-01T00:00:00Z"}
        made = await told(http, "/admin/keys", wanted, 201)
        shown, key_id = made.pop("key"), made["id"]
        path = f"/admin/keys/{key_id}"
        assert {name: made[name] for name in wanted} == wanted
        await ask(200)  # at once
        (listed,) = (await told(http, "/admin/keys"))["data"]
        assert (listed["id"], "hash" in listed, shown in json.dumps(listed)) == (key_id, False, False)
        assert listed["usage"]["tokens_this_day"] > 200
        changed = await told(http, path, {"tokens_per_minute": 1, "name": "Bob's"}, method="PATCH")
        assert (changed["tokens_per_minute"], changed["name"], changed["tenant"]) == (1, "Bob's", "acme")
        # Tokens used under the old limit are owed under the new one.
        assert "tokens_per_minute of 1 " in (await ask(429))["error"]["message"]
        await told(http, path, {"disabled": True}, method="PATCH")
        await ask(401)
        assert await told(http, path, method="DELETE") == {"id": key_id, "deleted": True}
        assert (await told(http, "/admin/keys"))["data"] == []
        for method in ("GET", "PATCH", "DELETE"):
            await refused(http, path, {} if method == "PATCH" else None, 404, method=method)
    assert key_id in caplog.text
    for secret in (shown, admin_key(SECRET)):
        assert secret not in caplog.text


async def test_what_makes_no_key_is_refused(cluster: Cluster, redis_server: RedisServer) -> None:
    async with administered(cluster) as http:
        for body, complaint in (
            ({"tokens_per_minut": 1}, "no such field"),
            ({"tokens_per_minute": -1}, "tokens_per_minute"),
            ({"hash": "0" * 64}, "not yours to say"),
            ({"tenant": 7}, "tenant"),
            ([], "object"),
        ):
            assert complaint in (await refused(http, "/admin/keys", body))["message"]
        for raw, kind, status in (("{", "application/json", 400), ("{}", "text/plain", 415), (" " * 100_000, "application/json", 413)):
            async with http.post("/admin/keys", data=raw, headers={"Content-Type": kind}) as answer:
                assert answer.status == status
        redis_server.kill()
        assert "cannot be reached" in (await refused(http, "/admin/keys", {}, 503))["message"]


async def test_a_router_without_keys_says_so(cluster: Cluster) -> None:
    async with administered(cluster, api_keys="") as http:
        assert "--api-keys-file" in (await refused(http, "/admin/keys", {}, 404))["message"]


class RoleWorker(worker_pb2_grpc.WorkerServicer):
    async def Stats(self, request: worker_pb2.WorkerStatsRequest, context: Any) -> worker_pb2.WorkerStats:
        return worker_pb2.WorkerStats(worker_id="d0", role="decode", epoch=7, ready=True)

    async def SwitchRole(self, request: worker_pb2.SwitchRoleRequest, context: Any) -> worker_pb2.SwitchRoleResponse:
        RolePass.from_proto(request).verify(SECRET, worker_id="d0", epoch=7)
        return worker_pb2.SwitchRoleResponse(role=request.role, epoch=8, drain_s=request.drain_timeout_s, switch_s=0.1)


async def test_workers_change_their_roles(cluster: Cluster) -> None:
    decode = await cluster.decode()
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(RoleWorker(), server)
    # Where the record says.
    await decode.die()
    assert server.add_insecure_port(decode.record.address)
    await server.start()
    decode.beating = True
    await cluster.beat()
    try:
        async with administered(cluster) as http:
            path = "/admin/workers/d0/role"
            assert "d0 is the last decode worker" in (await refused(http, path, {"role": "prefill"}, 409))["message"]
            found = await told(http, path, {"role": "prefill", "drain_timeout_s": 2, "force": True})
            assert found == {"worker_id": "d0", "role": "prefill", "epoch": 8, "drain_s": 2.0, "switch_s": 0.1}
            await refused(http, "/admin/workers/d9/role", {"role": "prefill"}, 404)
            for wrong in ({"role": "king"}, {"role": "decode", "drain_timeout_s": -1}):
                await refused(http, path, wrong)
    finally:
        await server.stop(0)


@pytest.fixture
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


async def test_status_and_the_logs_level(cluster: Cluster, root_level: None) -> None:
    async with administered(cluster) as http:
        assert (await told(http, "/admin/status"))["router_id"] == cluster.router.router_id
        assert await told(http, "/admin/log-level", {"level": "error"}) == {"level": "error"}
        assert logging.getLogger().level == logging.ERROR
        assert await told(http, "/admin/log-level") == {"level": "error"}
        await refused(http, "/admin/log-level", {"level": "loud"})
        assert not cluster.router.drain_asked.is_set()
        await told(http, "/admin/drain", {}, 202)
        assert cluster.router.drain_asked.is_set()


@pytest.mark.system
def test_a_router_that_is_asked_to_drains_and_exits(bare_model_dir: Path, redis_server: RedisServer, tmp_path: Path) -> None:
    """As a process, with a key of the port's own."""
    (port,) = free_ports(1)
    (tmp_path / "secret").write_bytes(SECRET.own)
    (tmp_path / "admin").write_text("an-admin-key-of-our-own\n")
    argv = [sys.executable, "-P", "-m", "router", "--model", str(bare_model_dir), "--redis-url", redis_server.url]
    argv += ["--secret-file", str(tmp_path / "secret"), "--admin-port", str(port), "--admin-key-file", str(tmp_path / "admin")]
    argv += ["--host", "127.0.0.1", "--port", "0", "--grpc-port", "0", "--metrics-port", "-1"]
    argv += ["--drain-timeout", "2", "--redis-start-timeout", "60"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    try:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/admin/drain", data=b"{}", headers={"Authorization": "Bearer an-admin-key-of-our-own"}
        )
        give_up = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    assert answer.status == 202
                break
            except urllib.error.URLError:
                assert time.monotonic() < give_up
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.1)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert "drained" in said
        assert "an-admin-key" not in said
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def test_admin_keys_that_are_none_are_refused(tmp_path: Path) -> None:
    assert load_admin_keys(None, SECRET) == (admin_key(SECRET),)
    for content in (b"", b"short", b"has a space in it, and more", "schlüssel-von-uns-allen".encode()):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(SetupError, match="--admin-key-file"):
            load_admin_keys(tmp_path / "key", SECRET)
    with pytest.raises(SetupError):
        load_admin_keys(tmp_path / "none", SECRET)
