"""Marks on pods, put there over TLS to a small server that answers as the API server does."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from service_harness import WAIT_S, Clock, Load, RedisServer, Writer, config, eventually, running, worker

from router.autoscaler.config import Pool
from router.autoscaler.pods import ANNOTATION, FIRST_COST, PatchResult, PodMarks
from twostep.errors import SetupError

TOKEN = "a token"
NAMESPACE = "models"


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is mounted into a pod, with a certificate that is its own authority; its key lies beside it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    directory = tmp_path_factory.mktemp("account")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    files = ["-keyout", directory / "key.pem", "-out", directory / "ca.crt"]
    subprocess.run([openssl, "req", "-x509", *kind, *files, *subject], check=True, capture_output=True)
    (directory / "token").write_text(TOKEN + "\n")
    (directory / "namespace").write_text(NAMESPACE)
    return directory


@dataclass
class ApiServer:
    """Pods by name, with their annotation. `failures`: statuses to give instead of an answer, one after the other."""

    url: str = ""
    pods: dict[str, str | None] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    delay_s: float = 0.0
    most_at_once: int = 0
    num_running: int = 0

    async def patch(self, request: web.Request) -> web.Response:
        self.num_running += 1
        self.most_at_once = max(self.most_at_once, self.num_running)
        try:
            return await self._answer(request)
        finally:
            self.num_running -= 1

    async def _answer(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        await asyncio.sleep(self.delay_s)
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"kind": "Status", "reason": "Unauthorized"}, status=401)
        if self.failures:
            return web.json_response({"kind": "Status"}, status=self.failures.pop(0))
        if request.headers["Content-Type"] != "application/merge-patch+json":
            return web.json_response({"kind": "Status", "reason": "UnsupportedMediaType"}, status=415)
        prefix, _, name = request.path.rpartition("/")
        if prefix != f"/api/v1/namespaces/{NAMESPACE}/pods":
            return web.json_response({"kind": "Status", "reason": "Forbidden"}, status=403)
        if name not in self.pods:
            return web.json_response({"kind": "Status", "reason": "NotFound"}, status=404)
        change = json.loads(await request.text())
        assert set(change) == {"metadata"}
        assert set(change["metadata"]["annotations"]) == {ANNOTATION}, "nothing else of a pod is touched"
        self.pods[name] = change["metadata"]["annotations"][ANNOTATION]
        return web.json_response({"kind": "Pod"})


@pytest.fixture
async def api(account: Path) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.patch)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(account / "ca.crt", account / "key.pem")
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    server.url = f"https://127.0.0.1:{port}"
    yield server
    await runner.cleanup()


def marks_of(api: ApiServer, account: Path, call_s: float = WAIT_S) -> PodMarks:
    return PodMarks(api.url, account, retry_s=0.01, call_s=call_s)


async def test_those_to_go_first_cost_least_and_others_nothing(api: ApiServer, account: Path) -> None:
    api.pods = {"a": "-7", "b": None, "c": None, "d": "5"}
    marks = marks_of(api, account)
    assert await marks.apply(["b", "c"], ["a", "d"], timeout_s=WAIT_S) == PatchResult(done=4)
    assert api.pods == {"a": None, "b": str(FIRST_COST), "c": str(FIRST_COST + 1), "d": None}
    assert int(api.pods["b"] or 0) < int(api.pods["c"] or 0) < 0
    api.calls.clear()
    assert await marks.apply(["b", "c"], ["a", "d"], timeout_s=WAIT_S) == PatchResult(), "nothing has changed"
    assert await marks.apply(["c"], ["a", "b", "d"], timeout_s=WAIT_S) == PatchResult(done=2)
    assert (api.pods["b"], api.pods["c"], len(api.calls)) == (None, str(FIRST_COST), 2)
    marks.forget()
    assert await marks.apply([], list(api.pods), timeout_s=WAIT_S) == PatchResult(done=4), "another one may have marked them"
    assert set(api.pods.values()) == {None}


async def test_pods_that_are_gone_are_none_that_failed(api: ApiServer, account: Path) -> None:
    assert await marks_of(api, account).apply(["gone"], [], timeout_s=WAIT_S) == PatchResult(done=1)


async def test_what_fails_for_a_moment_is_tried_again_and_what_is_forbidden_is_not(
    api: ApiServer, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.pods = {"a": None}
    api.failures = [500, 429]
    marks = marks_of(api, account)
    assert await marks.apply(["a"], [], timeout_s=WAIT_S) == PatchResult(done=1)
    assert len(api.calls) == 3
    api.calls.clear()
    api.failures = [403]
    assert await marks.apply([], ["a"], timeout_s=WAIT_S) == PatchResult(failed=1)
    assert len(api.calls) == 1
    assert "the verb patch on pods in models" in caplog.text
    assert await marks.apply([], ["a"], timeout_s=WAIT_S) == PatchResult(done=1), "in the next round"


async def test_a_round_has_a_deadline_and_a_bound_on_calls_at_once(api: ApiServer, account: Path) -> None:
    names = [f"p{number}" for number in range(30)]
    api.pods = dict.fromkeys(names)
    api.delay_s = 0.02
    assert await marks_of(api, account).apply([], names, timeout_s=WAIT_S) == PatchResult(done=30)
    assert 1 < api.most_at_once <= 8
    api.delay_s = 3600.0
    assert await marks_of(api, account).apply([], names, timeout_s=0.2) == PatchResult(failed=30)


async def test_names_that_are_none_reach_no_path(api: ApiServer, account: Path) -> None:
    marks = marks_of(api, account)
    assert await marks.apply(["../secrets/s", "A", "a" * 300, "x?y"], [], timeout_s=WAIT_S) == PatchResult(failed=4)
    assert api.calls == []


async def test_an_api_server_of_another_authority_gets_no_token(api: ApiServer, account: Path, tmp_path: Path) -> None:
    for name in ("token", "namespace"):
        (tmp_path / name).write_text((account / name).read_text())
    marks = PodMarks(api.url, tmp_path, retry_s=0.01, call_s=WAIT_S)
    assert await marks.apply(["a"], [], timeout_s=WAIT_S) == PatchResult(failed=1)
    assert api.calls == []


async def test_an_api_server_that_is_away_costs_the_marks_alone(account: Path) -> None:
    marks = PodMarks("https://127.0.0.1:9", account, retry_s=0.01)
    assert await marks.apply(["a"], ["b"], timeout_s=WAIT_S) == PatchResult(failed=2)


def test_without_a_namespace_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--pod-namespace"):
        PodMarks("https://127.0.0.1:9", tmp_path)


async def test_a_fleet_that_shrinks_is_marked_before_anybody_is_told(
    api: ApiServer, account: Path, redis_server: RedisServer, writer: Writer, tmp_path: Path
) -> None:
    clock = Clock()
    records = [*(worker(f"p{number}", "prefill") for number in range(4)), worker("d", "decode")]
    api.pods = {record.pod_name: None for record in records}
    await writer.workers(*records)
    settings = config(
        redis_server.url,
        tmp_path,
        interval=60.0,
        leader_lease=3600.0,
        cool_down=60.0,
        kubernetes_api=api.url,
        kubernetes_dir=account,
        switch_roles=False,
        prefill=Pool(max_workers=4),
        decode=Pool(max_workers=1),
    )
    await writer.load(clock.now_s, Load(requests=1))
    async with running(settings, clock) as autoscaler:
        await eventually(lambda: autoscaler.board.record is not None, "a decision")
        for _ in range(20):
            record = autoscaler.board.answer()
            if record.victims:
                break
            clock.now_s += 60.0
            await writer.load(clock.now_s, Load(requests=1))
            autoscaler.controller.wake()
            await eventually(lambda: autoscaler.board.answer().at_s == clock.now_s, "another decision")
        assert record.victims
        assert record.replicas["prefill"] == 4 - len(record.victims)
        marked = sorted((int(cost), pod) for pod, cost in api.pods.items() if cost is not None)
        assert [pod for _, pod in marked] == [f"pod-{name}" for name in record.victims]
        assert autoscaler.metrics.patches.labels("ok")._value.get() >= len(records)
