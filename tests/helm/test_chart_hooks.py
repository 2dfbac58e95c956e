"""Tests of the hook that makes the Secret, against a stand-in of the API server, and of the loader of the model."""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_cases import SWITCHES
from chart_hooks import PATH, TIMEOUT_S, FakeApi, rights, run_hook
from chart_processes import processes
from chart_render import CHART, ROOT, merged, render
from hub_stand_in import StandIn, running


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


def test_a_hook_may_do_what_it_does_and_no_more(api: FakeApi, tmp_path: Path) -> None:
    assert make_secrets(api, tmp_path).returncode == 0
    assert api.asked == rights(render({}).one("Role", "make-secrets"))


@pytest.mark.parametrize("values", [{}, SWITCHES["tls-job"]], ids=("secrets", "tls"))
def test_a_hook_job_ends_before_helm_gives_up(values: Mapping[str, Any]) -> None:
    """Then helm's error has the Job's reason, and not only that five minutes are over."""
    for job in render(values).of("Job"):
        assert 60 <= job["spec"]["activeDeadlineSeconds"] <= 300 - 30


def test_what_a_hook_needs_goes_with_it() -> None:
    """When a Job fails, Helm takes nothing away, and an uninstall knows no hooks but its own: the rights are hooks of rollback and
    uninstall, too. The Job stays with its log, for a day."""
    found = 0
    for object in render(SWITCHES["tls-job"]).objects:
        notes = object["metadata"].get("annotations", {})
        when = set(notes.get("helm.sh/hook", "").split(","))
        if "pre-install" not in when:
            continue
        found += 1
        assert notes["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
        if object["kind"] == "Job":
            assert when == {"pre-install", "pre-upgrade"}
            assert object["spec"]["ttlSecondsAfterFinished"] <= 86400
        else:
            assert when == {"pre-install", "pre-upgrade", "post-rollback", "post-delete"}
    assert found >= 8


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_hook_without_rights_fails(api: FakeApi, tmp_path: Path, method: str) -> None:
    api.refuses = {method}
    result = make_secrets(api, tmp_path)
    assert result.returncode == 1
    assert f"{method} {PATH}" in result.stderr
    assert "403" in result.stderr


def start(tmp_path: Path, loader: Mapping[str, Any], path: str = os.environ["PATH"]) -> subprocess.Popen[str]:
    """Runs the init container of a pod, over a claim that `tmp_path` stands for."""
    values = merged(SWITCHES["model-loader"], {"model": {"loader": {"enabled": True, **loader}}})
    (container,) = render(values).pod("decode").spec["initContainers"]
    env = {"PATH": path} | {variable["name"]: variable["value"] for variable in container["env"]}
    env["MODEL_PATH"] = str(tmp_path / "m")
    words = [shutil.which(container["command"][0]), *container["command"][1:], *container["args"]]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def load(tmp_path: Path, command: list[str], args: list[str]) -> subprocess.CompletedProcess[str]:
    process = start(tmp_path, {"command": command, "args": args})
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def test_the_loader_runs_once_with_its_words_as_they_are(tmp_path: Path) -> None:
    script = 'mkdir -p "$MODEL_PATH" && printf "%s|" "$@" >> "$MODEL_PATH/config.json"'
    for _ in range(2):
        assert load(tmp_path, ["sh", "-c", script, "sh"], ["a b", "$HOME", 'c"d']).returncode == 0
    assert (tmp_path / "m/config.json").read_text() == 'a b|$HOME|c"d|'


def test_a_model_of_the_hub_is_linked_where_it_belongs(tmp_path: Path) -> None:
    stand_in = StandIn(token="hf_mine")
    commit = stand_in.publish({"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}, "v1")
    with running(stand_in):
        environ = {"HF_ENDPOINT": stand_in.url, "HF_TOKEN": "hf_mine", "PYTHONPATH": str(ROOT)}
        env = [{"name": name, "value": value} for name, value in environ.items()]
        loader = {"hub": "org/tiny", "revision": "v1", "command": [], "args": [], "env": env}
        pod = start(tmp_path, loader, f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        stdout, stderr = pod.communicate(timeout=TIMEOUT_S)
    assert pod.returncode == 0, stderr
    assert "hf_mine" not in stdout + stderr
    assert (tmp_path / "m").resolve() == tmp_path / ".huggingface" / "hub" / "models--org--tiny" / "snapshots" / commit


def test_a_loader_that_fails_or_brings_nothing_holds_the_pod(tmp_path: Path) -> None:
    assert load(tmp_path, ["sh", "-c", "exit 7"], []).returncode == 7
    nothing = load(tmp_path, ["true"], [])
    assert nothing.returncode == 1
    assert f"there is no {tmp_path}/m/config.json" in nothing.stderr


# In the place of hf: takes its time, says that it ran, and goes on where a former one was ended.
DOWNLOAD = """#!/bin/sh
while [ "$1" != --local-dir ]; do shift; done
mkdir -p "$2" && echo run >> "$RUNS" && sleep 1 && echo weights > "$2/model.safetensors" && echo {} > "$2/config.json"
"""


def example() -> dict[str, Any]:
    """The loader of docs/kubernetes.md."""
    (text,) = (part for part in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL) if "loader:" in part)
    loader: dict[str, Any] = yaml.safe_load(text)["model"]["loader"]
    return loader


def three_pods(tmp_path: Path, path: str) -> tuple[list[str], list[str]]:
    """Starts the example in three pods of one claim at once. Returns what is on the claim then, and what the pods said."""
    claim, tools = tmp_path / "claim", tmp_path / "tools"
    for folder in (claim, tools):
        folder.mkdir()
    (tools / "hf").write_text(DOWNLOAD)
    (tools / "hf").chmod(0o755)
    loader = {"command": example()["command"], "env": [{"name": "RUNS", "value": str(tmp_path / "runs")}]}
    pods = [start(claim, loader, f"{tools}:{path}") for _ in range(3)]
    said = ["".join(pod.communicate(timeout=TIMEOUT_S)) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0, 0], said
    return sorted(str(file.relative_to(claim)) for file in claim.rglob("*")), said


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs the flock command, as the images have it")
def test_of_three_pods_at_once_one_loads(tmp_path: Path) -> None:
    there, said = three_pods(tmp_path, os.environ["PATH"])
    assert there == ["m", "m.lock", "m/config.json", "m/model.safetensors"]
    assert (tmp_path / "runs").read_text() == "run\n"
    assert sum("another pod has loaded" in words for words in said) == 2


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs the flock command, as the images have it")
def test_a_pod_that_is_killed_while_it_loads_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither its lock nor half a copy: the next pod goes on with that."""
    claim, part = tmp_path, tmp_path / "m.part"
    killed = start(
        claim, {"command": ["sh", "-c", 'mkdir "$MODEL_PATH.part" && echo half > "$MODEL_PATH.part/config.json" && exec sleep 600']}
    )
    while not (part / "config.json").exists():
        assert killed.poll() is None
    # A container's end is that of all its processes.
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=TIMEOUT_S)
    again = load(claim, ["sh", "-c", 'mv -T "$MODEL_PATH.part" "$MODEL_PATH"'], [])
    assert again.returncode == 0, again.stderr
    assert sorted(file.name for file in claim.iterdir()) == ["m", "m.lock"]


def test_the_test_is_one_pod_with_its_script() -> None:
    """A hook of any other kind would be taken for a pod of its name by `helm test --logs`."""
    chart = render({})
    (hook,) = (object for object in chart.objects if "test" in object["metadata"].get("annotations", {}).get("helm.sh/hook", "").split(","))
    (container,) = hook["spec"]["containers"]
    text = (CHART / "files/smoke.py").read_text()
    assert container["command"] == ["python", "-P", "-c", text.rstrip("\n")]
    # Kubernetes would put variables in the place of $(NAME).
    assert "$" not in text


def test_scripts_need_nothing_but_the_standard_library() -> None:
    """The hooks run before anything else, in the router's image, by path."""
    for name in ("make_secrets", "make_tls"):
        text = (CHART / f"files/{name}.py").read_text()
        imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
        assert imported - {"make_tls"} <= set(sys.stdlib_module_names), imported


def test_the_deployment_secret_changes_under_another_key(api: FakeApi, tmp_path: Path) -> None:
    """Pods of both rounds mount what is theirs; and the hook fails before any of them where the Secret lacks a key that they wait for."""
    assert make_secrets(api, tmp_path).returncode == 0
    changed = {"secrets": {"deploymentKey": "second", "formerDeploymentKey": "deployment-secret"}}
    refused = run_hook("make-secrets", api, tmp_path, changed)
    assert refused.returncode == 1
    assert "has no second" in refused.stderr
    for pod in render(merged(SWITCHES["autoscaling"], changed)).pods():
        for volume in pod.spec["volumes"]:
            if volume["name"] == "secret":
                paths = {item["key"]: item["path"] for item in volume["secret"]["items"]}
                assert paths == {"second": "deployment-secret", "deployment-secret": "former-deployment-secret"}
    for process in processes(render(merged(SWITCHES["autoscaling"], changed))):
        if process.module != "kv_transfer.ray.node":
            files = {process.config.secret_file.name, process.config.former_secret_file.name}
            assert files == {"deployment-secret", "former-deployment-secret"}, process.name
