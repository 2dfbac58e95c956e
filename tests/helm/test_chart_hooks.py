"""What runs before the processes: the hook that makes the Secret, against a stand-in of the API server, and the loader of the model."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chart_cases import SWITCHES
from chart_render import CHART, NAMESPACE, render

TIMEOUT_S = 60
PATH = f"/api/v1/namespaces/{NAMESPACE}/secrets"


class FakeApi(ThreadingHTTPServer):
    """Secrets of one namespace. `refuses` methods get 403, as without the right; `late` ones are there by the time they are made."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.secrets: dict[str, Any] = {}
        self.refuses: set[str] = set()
        self.late: dict[str, Any] = {}
        self.tokens: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    server: FakeApi

    def do_GET(self) -> None:
        name = self.path.removeprefix(f"{PATH}/")
        self._answer(403 if "GET" in self.server.refuses else 200 if name in self.server.secrets else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = body["metadata"]["name"]
        self.server.secrets |= self.server.late
        if "POST" in self.server.refuses or self.path != PATH:
            self._answer(403)
        elif name in self.server.secrets:
            self._answer(409)
        else:
            self.server.secrets[name] = body
            self._answer(201)

    def _answer(self, status: int) -> None:
        self.server.tokens.add(self.headers["Authorization"])
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def make_secrets(api: FakeApi, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """As the Job runs it: its command over the files of its ConfigMap, in its environment."""
    chart = render({})
    job = chart.pod("make-secrets").spec["containers"][0]
    for name, text in chart.one("ConfigMap", "make-secrets")["data"].items():
        (tmp_path / name).write_text(text)
    (tmp_path / "token").write_text("of-the-account\n")
    env = {variable["name"]: variable["value"] for variable in job["env"]}
    env |= {"KUBERNETES_API": f"http://127.0.0.1:{api.server_port}", "ACCOUNT_DIR": str(tmp_path)}
    command = [sys.executable, *(word.replace("/etc/twostep/scripts", str(tmp_path)) for word in job["command"][1:])]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_the_secret_is_made_once_and_stays(api: FakeApi, tmp_path: Path) -> None:
    first = make_secrets(api, tmp_path)
    assert first.returncode == 0, first.stderr
    assert api.tokens == {"Bearer of-the-account"}
    (secret,) = api.secrets.values()
    assert secret["metadata"]["name"] == render({}).pod("router").spec["volumes"][1]["secret"]["secretName"]
    found = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert set(found) == {"deployment-secret", "ray-token", "redis-password"}
    assert all(len(bytes.fromhex(value)) == 32 for value in found.values())
    assert len(set(found.values())) == 3
    assert not any(value in first.stdout + first.stderr for value in found.values()), "a secret in a log"

    again = make_secrets(api, tmp_path)
    assert again.returncode == 0
    assert api.secrets == {secret["metadata"]["name"]: secret}


def test_two_hooks_at_once_make_one_secret(api: FakeApi, tmp_path: Path) -> None:
    api.late = {"demo-twostep-secrets": "the other's"}
    assert make_secrets(api, tmp_path).returncode == 0
    assert api.secrets == {"demo-twostep-secrets": "the other's"}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_hook_without_rights_fails(api: FakeApi, tmp_path: Path, method: str) -> None:
    api.refuses = {method}
    result = make_secrets(api, tmp_path)
    assert result.returncode == 1
    assert f"{method} {PATH}" in result.stderr
    assert "403" in result.stderr


def load(tmp_path: Path, command: list[str], args: list[str]) -> subprocess.CompletedProcess[str]:
    values = {
        **SWITCHES["model-loader"],
        "model": {"path": str(tmp_path / "m"), "loader": {"enabled": True, "command": command, "args": args}},
    }
    (container,) = render(values).pod("decode").spec["initContainers"]
    env = {"PATH": os.environ["PATH"]} | {variable["name"]: variable["value"] for variable in container["env"]}
    words = [*container["command"], *container["args"]]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_the_loader_runs_once_with_its_words_as_they_are(tmp_path: Path) -> None:
    script = 'mkdir -p "$MODEL_PATH" && printf "%s|" "$@" >> "$MODEL_PATH/config.json"'
    for _ in range(2):
        assert load(tmp_path, ["sh", "-c", script, "sh"], ["a b", "$HOME", 'c"d']).returncode == 0
    assert (tmp_path / "m/config.json").read_text() == 'a b|$HOME|c"d|'


def test_a_loader_that_fails_or_brings_nothing_holds_the_pod(tmp_path: Path) -> None:
    assert load(tmp_path, ["sh", "-c", "exit 7"], []).returncode == 7
    nothing = load(tmp_path, ["true"], [])
    assert nothing.returncode == 1
    assert f"there is no {tmp_path}/m/config.json" in nothing.stderr


def test_scripts_need_nothing_but_the_standard_library() -> None:
    """The hooks run before anything else, in the router's image, by path."""
    for name in ("make_secrets", "make_tls"):
        text = (CHART / f"files/{name}.py").read_text()
        imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
        assert imported - {"make_tls"} <= set(sys.stdlib_module_names), imported
