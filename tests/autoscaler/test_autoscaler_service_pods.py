"""Marks on pods, put there over TLS to a small server that answers as the API server does."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from service_harness import SIGNER, WAIT_S, Clock, Load, RedisServer, Writer, config, eventually, running, worker

from twostep.autoscaler.config import AutoscalerConfig
from twostep.autoscaler.leadership import Leadership
from twostep.autoscaler.pods import ANNOTATION, FIRST_COST, LEASE_ANNOTATION, MarkLease, PatchResult, PodMarks
from twostep.cluster.scaling import DECISION_KEY, LEASE_KEY, TOKEN_KEY
from twostep.errors import SetupError
from twostep.settings.autoscaler import PoolSettings

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
    """Pods by name, with their annotation. `failures`: statuses to give instead of an answer, one after the other; `writes`: bodies that
    changed anything. `before`: awaited once, before the next write is looked at. `may`: while it is clear, nobody is answered.
    `late_s`: from a write to its answer."""

    url: str = ""
    pods: dict[str, str | None] = field(default_factory=dict)
    leases: dict[str, str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    failures: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    before: Callable[[], Awaitable[None]] | None = None
    may: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0
    late_s: float = 0.0
    most_at_once: int = 0
    num_running: int = 0

    def __post_init__(self) -> None:
        self.may.set()

    async def patch(self, request: web.Request) -> web.Response:
        self.num_running += 1
        self.most_at_once = max(self.most_at_once, self.num_running)
        try:
            return await self._answer(request)
        finally:
            self.num_running -= 1

    async def _answer(self, request: web.Request) -> web.Response:
        assert request.method == "PATCH", "no other verb is granted"
        self.calls.append(request.path)
        await self.may.wait()
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
        if change:
            before, self.before = self.before, None
            if before is not None:
                await before()
            if not self._write(name, change):
                return web.json_response({"kind": "Status", "reason": "Conflict"}, status=409)
            await asyncio.sleep(self.late_s)
        kept = {ANNOTATION: self.pods[name], LEASE_ANNOTATION: self.leases.get(name)}
        annotations = {key: value for key, value in kept.items() if value is not None}
        return web.json_response({"metadata": {"resourceVersion": str(self.versions.get(name, 0)), "annotations": annotations}})

    def _write(self, name: str, change: dict[str, Any]) -> bool:
        assert set(change) == {"metadata"}
        assert set(change["metadata"]) == {"resourceVersion", "annotations"}
        assert set(change["metadata"]["annotations"]) == {ANNOTATION, LEASE_ANNOTATION}, "nothing else of a pod is touched"
        if change["metadata"]["resourceVersion"] != str(self.versions.get(name, 0)):
            return False
        self.pods[name] = change["metadata"]["annotations"][ANNOTATION]
        self.leases[name] = change["metadata"]["annotations"][LEASE_ANNOTATION]
        self.versions[name] = self.versions.get(name, 0) + 1
        self.writes.append(name)
        return True

    def touch(self, name: str) -> None:
        """As its kubelet does, to write its status."""
        self.versions[name] = self.versions.get(name, 0) + 1


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


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service's own rounds, too, are not given up because a machine is busy."""
    monkeypatch.setattr("twostep.autoscaler.controller._MARK_S", WAIT_S)
    monkeypatch.setattr("twostep.autoscaler.server.PodMarks", partial(PodMarks, call_s=WAIT_S))


def marks_of(api: ApiServer, account: Path, call_s: float = WAIT_S) -> PodMarks:
    return PodMarks(api.url, account, retry_s=0.01, call_s=call_s)


async def put(
    marks: PodMarks, victims: Sequence[str], others: Collection[str], token: int = 1, holder: str = "a", timeout_s: float = WAIT_S
) -> PatchResult:
    return await marks.apply(victims, others, lease=MarkLease(token=token, holder=holder), timeout_s=timeout_s)


async def test_those_to_go_first_cost_least_and_others_nothing(api: ApiServer, account: Path) -> None:
    api.pods = {"a": "-7", "b": None, "c": None, "d": "5"}
    marks = marks_of(api, account)
    assert await put(marks, ["b", "c"], ["a", "d"]) == PatchResult(done=4)
    assert api.pods == {"a": None, "b": str(FIRST_COST), "c": str(FIRST_COST + 1), "d": None}
    assert int(api.pods["b"] or 0) < int(api.pods["c"] or 0) < 0
    api.calls.clear()
    assert await put(marks, ["b", "c"], ["a", "d"]) == PatchResult(), "nothing has changed"
    assert await put(marks, ["c"], ["a", "b", "d"]) == PatchResult(done=2)
    assert (api.pods["b"], api.pods["c"], len(api.calls)) == (None, str(FIRST_COST), 2)
    marks.forget()
    assert await put(marks, [], list(api.pods)) == PatchResult(done=4), "another one may have marked them"
    assert set(api.pods.values()) == {None}


async def test_pods_that_are_gone_are_none_that_failed(api: ApiServer, account: Path) -> None:
    assert await put(marks_of(api, account), ["gone"], []) == PatchResult(done=1)


async def test_what_fails_for_a_moment_is_tried_again_and_what_is_forbidden_is_not(
    api: ApiServer, account: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.pods = {"a": None}
    api.failures = [500, 429]
    marks = marks_of(api, account)
    assert await put(marks, ["a"], []) == PatchResult(done=1)
    assert len(api.calls) == 4, "read three times, and written"
    api.calls.clear()
    api.failures = [403]
    assert await put(marks, [], ["a"]) == PatchResult(failed=1)
    assert len(api.calls) == 1
    assert "the verb patch on pods in models" in caplog.text
    assert await put(marks, [], ["a"]) == PatchResult(done=1), "in the next round"


async def test_a_round_has_a_deadline_and_a_bound_on_calls_at_once(api: ApiServer, account: Path) -> None:
    names = [f"p{number}" for number in range(30)]
    api.pods = dict.fromkeys(names)
    api.may.clear()
    marking = asyncio.create_task(put(marks_of(api, account), [], names))
    await eventually(lambda: api.num_running == 8, "as many calls as may be")
    api.may.set()
    assert await marking == PatchResult(done=30)
    assert api.most_at_once == 8
    api.delay_s = 3600.0
    assert await put(marks_of(api, account), [], names, timeout_s=0.2) == PatchResult(failed=30)


async def test_a_leader_that_went_on_late_writes_over_nobody(api: ApiServer, account: Path) -> None:
    """It was stopped before its first look at a pod, between that and its mark, or after many marks: its successor's stand."""
    api.pods = dict.fromkeys("abc")
    old, new = marks_of(api, account), marks_of(api, account)

    async def successor() -> None:
        assert await put(new, ["b"], ["a", "c"], token=2, holder="b") == PatchResult(done=3)

    api.before = successor
    assert await put(old, ["a"], [], token=1) == PatchResult(failed=1, outranked=2), "between its look and its mark"
    assert api.pods == {"a": None, "b": str(FIRST_COST), "c": None}
    assert await put(old, ["c"], ["b"], token=1) == PatchResult(failed=2, outranked=2), "before it had looked"
    assert await put(new, ["a"], ["b", "c"], token=2, holder="b") == PatchResult(done=2)
    assert await put(old, ["b"], [], token=3) == PatchResult(done=1), "it leads again"
    assert await put(new, ["c", "b"], [], token=2, holder="b") == PatchResult(done=1, failed=1, outranked=3), "after many marks"
    assert api.pods["b"] == str(FIRST_COST)


async def test_of_two_with_one_token_neither_writes_over_the_other(api: ApiServer, account: Path) -> None:
    """Redis has lost its tokens: whoever finds the other one's mark takes a larger token."""
    api.pods = {"a": None}
    assert await put(marks_of(api, account), ["a"], [], token=1, holder="a") == PatchResult(done=1)
    assert await put(marks_of(api, account), [], ["a"], token=1, holder="b") == PatchResult(failed=1, outranked=1)


@pytest.mark.parametrize("said", ["", "nonsense", "-5:a", "9" * 40 + ":a"])
async def test_an_annotation_that_is_no_lease_bars_nobody(api: ApiServer, account: Path, said: str) -> None:
    api.pods, api.leases = {"a": None}, {"a": said}
    assert await put(marks_of(api, account), ["a"], []) == PatchResult(done=1)
    assert api.leases == {"a": "1:a"}


async def test_a_pod_that_changed_meanwhile_is_looked_at_again(api: ApiServer, account: Path) -> None:
    api.pods = {"a": None}
    marks = marks_of(api, account)
    assert await put(marks, [], ["a"]) == PatchResult(done=1)
    api.calls.clear()
    assert await put(marks, ["a"], []) == PatchResult(done=1)
    assert len(api.calls) == 1, "its version is known"
    api.touch("a")
    assert await put(marks, [], ["a"]) == PatchResult(done=1)
    assert len(api.calls) == 4, "refused, read, written"
    assert api.pods == {"a": None}


async def test_a_mark_that_may_have_come_about_is_looked_at_again(api: ApiServer, account: Path) -> None:
    """It was written, and the round ended before the answer: a pod that is to stay after all does not keep it."""
    api.pods = {"a": None}
    marks = marks_of(api, account)
    assert await put(marks, [], ["a"]) == PatchResult(done=1)
    api.late_s = 3600.0
    ended = asyncio.create_task(put(marks, ["a"], []))
    await eventually(lambda: api.pods["a"] is not None, "the mark")
    ended.cancel()
    await asyncio.wait([ended])
    api.late_s = 0.0
    assert await put(marks, [], ["a"]) == PatchResult(done=1)
    assert api.pods == {"a": None}


async def test_names_that_are_none_reach_no_path(api: ApiServer, account: Path) -> None:
    marks = marks_of(api, account)
    assert await put(marks, ["../secrets/s", "A", "a" * 300, "x?y"], []) == PatchResult(failed=4)
    assert api.calls == []


async def test_an_api_server_of_another_authority_gets_no_token(api: ApiServer, account: Path, tmp_path: Path) -> None:
    for name in ("token", "namespace"):
        (tmp_path / name).write_text((account / name).read_text())
    marks = PodMarks(api.url, tmp_path, retry_s=0.01, call_s=WAIT_S)
    assert await put(marks, ["a"], []) == PatchResult(failed=1)
    assert api.calls == []


async def test_an_api_server_that_is_away_costs_the_marks_alone(account: Path) -> None:
    marks = PodMarks("https://127.0.0.1:9", account, retry_s=0.01)
    assert await put(marks, ["a"], ["b"]) == PatchResult(failed=2)


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
        prefill=PoolSettings(max_workers=4),
        decode=PoolSettings(max_workers=1),
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


def shrinking(url: str, api: ApiServer, account: Path, tmp_path: Path) -> AutoscalerConfig:
    return config(
        url,
        tmp_path,
        autoscaler_id="one",
        interval=60.0,
        leader_lease=3600.0,
        kubernetes_api=api.url,
        kubernetes_dir=account,
        prefill=PoolSettings(max_workers=4),
    )


async def test_marks_of_a_later_leader_end_the_decision_of_one_that_was_stopped(
    api: ApiServer, account: Path, redis_server: RedisServer, writer: Writer, tmp_path: Path
) -> None:
    clock = Clock()
    records = [worker("p", "prefill"), worker("d", "decode")]
    api.pods = {record.pod_name: None for record in records}
    await writer.workers(*records)

    async def successor() -> None:
        # It has the lease, and its marks; not its decision yet. The one that was stopped still takes the lease for its own.
        await writer.redis.set(LEASE_KEY, "9:two")
        await writer.redis.set(TOKEN_KEY, "9")
        marks = marks_of(api, account)
        assert await put(marks, ["pod-p"], ["pod-d"], token=9, holder="two") == PatchResult(done=2)

    api.before = successor
    await writer.load(clock.now_s, Load(requests=1))
    async with running(shrinking(redis_server.url, api, account, tmp_path), clock) as autoscaler:
        await eventually(lambda: autoscaler.metrics.skipped.labels("lease")._value.get() == 1, "a decision that is given up")
        assert api.pods == {"pod-p": str(FIRST_COST), "pod-d": None}
        assert await writer.redis.get(DECISION_KEY) is None
        assert await writer.redis.get(LEASE_KEY) == b"9:two", "its successor's lease is left alone"
        assert not autoscaler.leadership.held


async def test_tokens_that_began_anew_go_on_beyond_the_pods(
    api: ApiServer, account: Path, redis_server: RedisServer, writer: Writer, tmp_path: Path
) -> None:
    """Redis has lost everything, and no replica is left that knew: pods still do."""
    clock = Clock()
    records = [worker("p", "prefill"), worker("d", "decode")]
    api.pods = {"pod-p": "-1000", "pod-d": None}
    api.leases = {"pod-p": "57:gone"}
    await writer.workers(*records)
    await writer.load(clock.now_s, Load(requests=1))
    async with running(replace(shrinking(redis_server.url, api, account, tmp_path), leader_lease=1.0), clock) as autoscaler:
        await eventually(lambda: autoscaler.board.record is not None, "a decision")
        assert autoscaler.board.answer().token >= 58
        assert api.pods == {"pod-p": None, "pod-d": None}


async def test_a_lease_that_is_taken_while_it_is_given_back_is_kept(redis_server: RedisServer, writer: Writer) -> None:
    lease = Leadership(writer.redis, "a", SIGNER, ttl_s=3600.0)
    assert await lease.renew()
    lease.saw(57)
    _, held = await asyncio.gather(lease.release(), lease.renew())
    assert held or await lease.renew()
    assert (lease.held, lease.token) == (True, 58)
