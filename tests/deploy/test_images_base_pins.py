"""deploy/pin-base-images, with a `docker` that answers as a registry would."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64


@pytest.fixture
def deploy(tmp_path: Path) -> Path:
    """A folder with the script, a Dockerfile and a compose file that stand on two images."""
    folder = tmp_path / "deploy"
    folder.mkdir()
    shutil.copy(CHECKOUT / "deploy/pin-base-images", folder)
    (folder / "Dockerfile.a").write_text(f"ARG BASE=docker.io/library/python:3.11-slim@{OLD}\nFROM ${{BASE}}\n")
    for name in ("helm/values.yaml", "docs/helm-values.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"digest: {OLD}\n")
    (folder / "compose.yaml").write_text(f"services:\n  redis:\n    image: valkey/valkey:9.1-alpine@{OLD}\n  other:\n    image: mine\n")
    return folder


def run(deploy: Path, answer: str, *flags: str, has_buildx: bool = True) -> subprocess.CompletedProcess[str]:
    """`answer`: what `docker buildx imagetools inspect` does with its last arguments, in shell; buildx itself is there."""
    docker = deploy.parent / "bin/docker"
    docker.parent.mkdir(exist_ok=True)
    docker.write_text(f'#!/bin/bash\n[ "$2" = version ] && exit {0 if has_buildx else 1}\necho "$@" >>{deploy.parent}/asked\n{answer}\n')
    docker.chmod(0o755)
    env = {**os.environ, "PATH": f"{docker.parent}:{os.environ['PATH']}"}
    return subprocess.run([deploy / "pin-base-images", *flags], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_each_tag_gets_the_digest_of_today(deploy: Path) -> None:
    done = run(deploy, f"echo {NEW}")
    assert done.returncode == 0, done.stderr
    assert (deploy / "Dockerfile.a").read_text() == f"ARG BASE=docker.io/library/python:3.11-slim@{NEW}\nFROM ${{BASE}}\n"
    assert f"image: valkey/valkey:9.1-alpine@{NEW}\n" in (deploy / "compose.yaml").read_text()
    assert (deploy.parent / "helm/values.yaml").read_text() == f"digest: {NEW}\n"
    assert (deploy.parent / "docs/helm-values.md").read_text() == f"digest: {NEW}\n"
    assert [line.split()[3] for line in (deploy.parent / "asked").read_text().splitlines()] == [
        "docker.io/library/python:3.11-slim",
        "valkey/valkey:9.1-alpine",
    ]


def test_an_answer_that_is_no_digest_changes_nothing(deploy: Path) -> None:
    before = (deploy / "Dockerfile.a").read_text()
    done = run(deploy, "echo not found")
    assert done.returncode != 0
    assert "no digest: not found" in done.stderr
    assert (deploy / "Dockerfile.a").read_text() == before


def test_a_check_changes_nothing_and_fails_where_a_digest_is_missing(deploy: Path) -> None:
    before = (deploy / "compose.yaml").read_text()
    assert run(deploy, "exit 0", "--check").returncode == 0
    done = run(deploy, 'case "$*" in *valkey*) exit 1;; esac', "--check")
    assert done.returncode == 1
    assert f"ok      docker.io/library/python:3.11-slim@{OLD}\nMISSING valkey/valkey:9.1-alpine@{OLD}\n" == done.stdout
    assert (deploy / "compose.yaml").read_text() == before
