"""What runs before the processes: the hook that makes the Secret, against a stand-in of the API server, and the loader of the model."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest
from chart_cases import SWITCHES
from chart_hooks import PATH, TIMEOUT_S, FakeApi, run_hook
from chart_render import CHART, render


def make_secrets(api: FakeApi, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return run_hook("make-secrets", api, tmp_path, {})


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
        "model": {"loader": {"enabled": True, "command": command, "args": args}},
    }
    (container,) = render(values).pod("decode").spec["initContainers"]
    env = {"PATH": os.environ["PATH"]} | {variable["name"]: variable["value"] for variable in container["env"]}
    env["MODEL_PATH"] = str(tmp_path / "m")
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
