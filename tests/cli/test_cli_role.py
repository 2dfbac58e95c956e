"""`twostep role` as an operator runs it, against a scripted worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import commands
import grpc
import pytest

from twostep.cli import _role
from twostep.cli._flags import parser
from twostep.cli._role import is_last
from twostep.client import WorkerStatus
from twostep.errors import InvalidRequest, TwostepError
from twostep.keys.api_keys import system_key
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import RolePass

SECRET = DeploymentSecret(b"sixteen bytes or more")


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """A decode worker that takes any role but where `refusal` says otherwise."""

    refusal: tuple[grpc.StatusCode, str] | None = None
    drain_timeout_s = -1.0

    def Stats(self, request: worker_pb2.WorkerStatsRequest, context: Any) -> worker_pb2.WorkerStats:
        return worker_pb2.WorkerStats(worker_id="d-1", role="decode", epoch=7, ready=True, num_sequences=3)

    def SwitchRole(self, request: worker_pb2.SwitchRoleRequest, context: Any) -> worker_pb2.SwitchRoleResponse:
        try:
            RolePass.from_proto(request).verify(SECRET, worker_id="d-1", epoch=7)
        except TwostepError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        if self.refusal is not None:
            context.abort(*self.refusal)
        self.drain_timeout_s = request.drain_timeout_s
        if request.role == "decode":
            return worker_pb2.SwitchRoleResponse(role="decode", epoch=7)
        return worker_pb2.SwitchRoleResponse(role="prefill", epoch=8, drain_s=1.839, switch_s=0.04)


@contextmanager
def serving(worker: ScriptedWorker) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def worker() -> Iterator[tuple[ScriptedWorker, str]]:
    scripted = ScriptedWorker()
    with serving(scripted) as address:
        yield scripted, address


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret").write_bytes(SECRET.own + b"\n")
    return str(tmp_path / "secret")


def run(*words: str, **env: str) -> tuple[int, str, str]:
    """Status, output and errors. Without --force a router is asked, and there is none."""
    done = commands.run("role", *words, **{"TWOSTEP_TARGET": "127.0.0.1:1", **env})
    return done.returncode, done.stdout, done.stderr


def test_which_role_a_worker_has_is_told_to_holders_of_the_secret(worker: tuple[ScriptedWorker, str], secret: str) -> None:
    assert run(worker[1], "--secret-file", secret) == (0, "d-1 is a decode worker, ready, with 3 requests.\n", "")
    code, out, err = run(worker[1])
    assert (code, out) == (1, "")
    assert "--secret-file" in err
    code, out, _ = run(worker[1], "--json", "--secret-file", secret)
    assert (code, json.loads(out)) == (0, {"worker_id": "d-1", "role": "decode", "epoch": 7, "state": "ready"})


def test_it_takes_the_other_role(worker: tuple[ScriptedWorker, str], secret: str) -> None:
    said = "d-1 is a prefill worker now: drained in 1.84 s, switched in 0.04 s.\n"
    assert run(worker[1], "prefill", "--force", "--drain-timeout", "12.5", "--secret-file", secret) == (0, said, "")
    assert worker[0].drain_timeout_s == 12.5
    code, out, _ = run(worker[1], "prefill", "--force", "--json", TWOSTEP_SECRET_FILE=secret)
    assert (code, json.loads(out)) == (0, {"worker_id": "d-1", "role": "prefill", "epoch": 8, "drain_s": 1.839, "switch_s": 0.04})
    assert worker[0].drain_timeout_s == 30.0
    assert run(worker[1], "decode", "--secret-file", secret) == (0, "d-1 is a decode worker already.\n", "")


def test_where_no_router_tells_who_else_there_is_it_takes_force(worker: tuple[ScriptedWorker, str], secret: str) -> None:
    code, out, err = run(worker[1], "prefill", "--secret-file", secret)
    assert (code, out) == (1, "")
    assert "--target" in err
    assert run(worker[1], "prefill", "--force", "--secret-file", secret)[1].startswith("d-1 is a prefill worker")


def status(worker_id: str, role: str, *, ready: bool = True, draining: bool = False, local: bool = False) -> WorkerStatus:
    found = SimpleNamespace(worker_id=worker_id, role=role, ready=ready, draining=draining, local_prefill=local)
    return cast(WorkerStatus, found)


@pytest.mark.parametrize(
    ("worker_id", "role", "others", "last"),
    [
        ("d-1", "decode", [status("p", "prefill")], True),
        ("d-1", "decode", [status("d-2", "decode")], False),
        ("d-1", "decode", [status("d-2", "decode", ready=False), status("d-3", "decode", draining=True)], True),
        ("p", "prefill", [status("d", "decode")], True),
        ("p", "prefill", [status("d", "decode", local=True)], False),
        ("p", "prefill", [status("q", "prefill"), status("d", "decode")], False),
    ],
)
def test_who_is_the_last_of_its_role(worker_id: str, role: str, others: list[WorkerStatus], last: bool) -> None:
    assert is_last(worker_id, role, [status(worker_id, role, local=True), *others]) is last


async def test_the_last_decode_worker_stays_one_without_force(
    worker: tuple[ScriptedWorker, str], secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Router:
        def __init__(self, *_: object, api_key: str, **__: object) -> None:
            assert api_key == system_key(SECRET), "it opens a router that asks for keys"

        async def __aenter__(self) -> Router:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def status(self, **_: object) -> object:
            return SimpleNamespace(workers=[status("d-1", "decode"), status("p", "prefill")])

    monkeypatch.setattr("twostep.cli._role.AsyncClient", Router)
    words = ["role", worker[1], "prefill", "--secret-file", secret]
    for forced, drained in (([], -1.0), (["--force"], 30.0)):
        code = await asyncio.to_thread(run_role, parser().parse_args([*words, *forced]))
        assert (code, worker[0].drain_timeout_s) == (0 if forced else 1, drained)


def run_role(args: Any) -> int:
    try:
        return _role.run(args)
    except InvalidRequest:
        return 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "d-1 is a decode worker still: no KV transport works after 60 s"),
        (grpc.StatusCode.ABORTED, "d-1 is changing its role already; ask again when it is ready"),
    ],
)
def test_what_the_worker_says_is_said(worker: tuple[ScriptedWorker, str], secret: str, code: grpc.StatusCode, message: str) -> None:
    worker[0].refusal = code, message
    assert run(worker[1], "prefill", "--force", "--secret-file", secret) == (1, "", f"twostep: {message}\n")


def test_what_is_missing_is_named(worker: tuple[ScriptedWorker, str], secret: str, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another secret, also long")
    for words, says in (
        ((worker[1], "prefill"), "--secret-file is missing"),
        ((worker[1], "prefill", "--force", "--secret-file", str(tmp_path / "other")), "give the worker's own --secret-file"),
        (("127.0.0.1:1", "prefill", "--secret-file", secret), "no worker answers at 127.0.0.1:1 (failed to connect"),
    ):
        code, out, error = run(*words)
        assert (code, out) == (1, "")
        assert error.startswith("twostep: ")
        assert error.count("\n") == 1
        assert says in error
    assert run(worker[1], "router")[0] == 2
    assert run(worker[1], "prefill", "--drain-timeout", "-1")[0] == 2
