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
from http_fakes import CHAT, chat, url
from router_fakes import SECRET, Cluster, RedisServer

from router.http.admin import load_admin_key
from twostep.errors import SetupError
from twostep.keys.api_keys import admin_key, system_key
from twostep.local.ports import free_ports
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import RolePass


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator is told so when Redis takes a second; here it is this process that may stand still for longer."""
    monkeypatch.setattr("twostep.cluster.connection._TIMEOUT_S", 60.0)
    monkeypatch.setattr("router.access.control._READ_TIMEOUT_S", 60.0)


@asynccontextmanager
async def administered(cluster: Cluster, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """With keys in Redis; the client shows the admin key."""
    async with cluster.serving(**{"api_keys": "redis", "admin_port": 0, **options}):
        base = f"http://127.0.0.1:{cluster.router.admin_port}"
        headers = {"Authorization": f"Bearer {admin_key(SECRET)}"}
        async with aiohttp.ClientSession(base, headers=headers, timeout=aiohttp.ClientTimeout(120)) as http:
            yield http


async def asked(http: aiohttp.ClientSession, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
    async with http.request(method, path, json=body, **options) as answer:
        assert answer.content_type == "application/json"
        return answer.status, await answer.json()


async def test_without_the_admin_key_there_is_nothing(cluster: Cluster) -> None:
    async with administered(cluster) as http, aiohttp.ClientSession() as bare:
        for path in ("/admin/keys", "/admin/status", "/admin/nowhere", "/"):
            for told in ("", "Bearer", "Bearer x", f"Bearer {system_key(SECRET)}", f"Basic {admin_key(SECRET)}", "Bearer ü"):
                async with bare.get(f"http://127.0.0.1:{cluster.router.admin_port}{path}", headers={"Authorization": told}) as answer:
                    assert answer.status == 401
        assert (await asked(http, "GET", "/admin/nowhere"))[0] == 404
        # Nor is anything of it on the other port, and its key opens nothing there.
        for path in ("/admin/keys", "/v1/models"):
            async with bare.get(url(cluster) + path, headers={"Authorization": f"Bearer {admin_key(SECRET)}"}) as answer:
                assert answer.status == 401
        async with bare.get(f"{url(cluster)}/admin/keys", headers={"Authorization": f"Bearer {system_key(SECRET)}"}) as answer:
            assert answer.status == 404


async def test_the_life_of_a_key(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await cluster.prefill()
    await cluster.decode()
    async with administered(cluster) as http, aiohttp.ClientSession(url(cluster)) as client:

        async def ask(told: str) -> tuple[int, str]:
            # Debts of a few minutes: they are still there when the limit has changed.
            body = chat(max_tokens=200, ignore_eos=True)
            async with client.post(CHAT, json=body, headers={"Authorization": f"Bearer {told}"}) as answer:
                return answer.status, await answer.text()

        wanted = {"name": "Ann's", "tenant": "acme", "tokens_per_minute": 60, "expires": "2999-01-01T00:00:00Z"}
        status, made = await asked(http, "POST", "/admin/keys", wanted)
        assert status == 201
        told, key_id = made.pop("key"), made["id"]
        assert told.startswith("ts-")
        assert {name: made[name] for name in wanted} == wanted
        assert (await ask(told))[0] == 200, "at once"
        status, listed = await asked(http, "GET", "/admin/keys")
        assert [each["id"] for each in listed["data"]] == [key_id]
        assert listed["data"][0]["usage"]["tokens_this_day"] > 200
        assert told not in json.dumps(listed)
        assert "hash" not in listed["data"][0]
        status, changed = await asked(http, "PATCH", f"/admin/keys/{key_id}", {"tokens_per_minute": 1, "name": "Bob's"})
        assert (status, changed["tokens_per_minute"], changed["name"], changed["tenant"]) == (200, 1, "Bob's", "acme")
        status, said = await ask(told)
        assert status == 429, "what was used under the old limit is owed under the new one"
        assert "tokens_per_minute of 1 " in said, "and it is the new one that refuses"
        assert (await asked(http, "PATCH", f"/admin/keys/{key_id}", {"disabled": True}))[0] == 200
        assert (await ask(told))[0] == 401
        assert (await asked(http, "DELETE", f"/admin/keys/{key_id}"))[1] == {"id": key_id, "deleted": True}
        assert (await asked(http, "GET", "/admin/keys"))[1]["data"] == []
        for method in ("GET", "PATCH", "DELETE"):
            assert (await asked(http, method, f"/admin/keys/{key_id}", {} if method == "PATCH" else None))[0] == 404
    assert key_id in caplog.text
    for secret in (told, admin_key(SECRET)):
        assert secret not in caplog.text


async def test_what_makes_no_key_is_refused(cluster: Cluster) -> None:
    async with administered(cluster) as http:
        for body, complaint in (
            ({"tokens_per_minut": 1}, "no such field"),
            ({"tokens_per_minute": -1}, "tokens_per_minute"),
            ({"hash": "0" * 64}, "not yours to say"),
            ({"id": "mine"}, "not yours to say"),
            ({"tenant": 7}, "tenant"),
            ([], "object"),
        ):
            status, said = await asked(http, "POST", "/admin/keys", body)
            assert status == 400, body
            assert complaint in said["error"]["message"]
        async with http.post("/admin/keys", data="{", headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 400
        async with http.post("/admin/keys", data="{}", headers={"Content-Type": "text/plain"}) as answer:
            assert answer.status == 415
        async with http.post("/admin/keys", json={"name": "x" * 100_000}) as answer:
            assert answer.status == 413


async def test_a_router_without_keys_says_so(cluster: Cluster) -> None:
    async with administered(cluster, api_keys="") as http:
        status, said = await asked(http, "POST", "/admin/keys", {})
        assert status == 404
        assert "--api-keys-file" in said["error"]["message"]


async def test_keys_that_cannot_be_written_change_nothing(cluster: Cluster, redis_server: RedisServer) -> None:
    async with administered(cluster) as http:
        redis_server.kill()
        status, said = await asked(http, "POST", "/admin/keys", {})
        assert status == 503
        assert "cannot be reached" in said["error"]["message"]


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
    port = server.add_insecure_port(decode.record.address)
    assert port
    await server.start()
    decode.beating = True
    await cluster.beat()
    try:
        async with administered(cluster) as http:
            status, told = await asked(http, "POST", "/admin/workers/d0/role", {"role": "prefill"})
            assert status == 409
            assert "d0 is the last decode worker" in json.dumps(told)
            wish = {"role": "prefill", "drain_timeout_s": 2, "force": True}
            status, told = await asked(http, "POST", "/admin/workers/d0/role", wish)
            assert (status, told) == (200, {"worker_id": "d0", "role": "prefill", "epoch": 8, "drain_s": 2.0, "switch_s": 0.1})
            for path, body, wanted in (
                ("/admin/workers/d9/role", {"role": "prefill"}, 404),
                ("/admin/workers/d0/role", {"role": "king"}, 400),
                ("/admin/workers/d0/role", {"role": "decode", "drain_timeout_s": -1}, 400),
            ):
                assert (await asked(http, "POST", path, body))[0] == wanted
    finally:
        await server.stop(0)


@pytest.fixture
def root_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


async def test_status_and_the_logs_level(cluster: Cluster, root_level: None) -> None:
    async with administered(cluster) as http:
        assert (await asked(http, "GET", "/admin/status"))[1]["router_id"] == cluster.router.router_id
        assert await asked(http, "POST", "/admin/log-level", {"level": "error"}) == (200, {"level": "error"})
        assert logging.getLogger().level == logging.ERROR
        assert (await asked(http, "GET", "/admin/log-level"))[1] == {"level": "error"}
        assert (await asked(http, "POST", "/admin/log-level", {"level": "loud"}))[0] == 400
        assert not cluster.router.drain_asked.is_set()
        assert (await asked(http, "POST", "/admin/drain"))[0] == 202
        assert cluster.router.drain_asked.is_set()


@pytest.mark.system
def test_a_router_that_is_asked_to_drains_and_exits(bare_model_dir: Path, redis_server: RedisServer, tmp_path: Path) -> None:
    """As a process, with a key of the port's own."""
    (port,) = free_ports(1)
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "admin").write_text("an-admin-key-of-our-own\n")
    argv = [sys.executable, "-P", "-m", "router", "--model", str(bare_model_dir), "--redis-url", redis_server.url]
    argv += ["--secret-file", str(tmp_path / "secret"), "--admin-port", str(port), "--admin-key-file", str(tmp_path / "admin")]
    argv += ["--host", "127.0.0.1", "--port", "0", "--metrics-port", "-1", "--drain-timeout", "2", "--redis-start-timeout", "60"]
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
    assert load_admin_key(None, SECRET) == admin_key(SECRET)
    for content in (b"", b"short", b"has a space in it, and more", "schlüssel-von-uns-allen".encode()):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(SetupError, match="--admin-key-file"):
            load_admin_key(tmp_path / "key", SECRET)
    with pytest.raises(SetupError):
        load_admin_key(tmp_path / "none", SECRET)
