"""What stays in a cluster of a release, by helm's own doing: when a hook has failed, when the test has run, when all is taken away."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_cases import SWITCHES
from chart_releases import LOG, Releases, releases
from chart_render import helm, render

VALUES = SWITCHES["tls-job"]
# Of the hook Jobs the one that runs first: what the other needs is there by then, too.
FIRST = "demo-twostep-make-secrets"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Releases]:
    version = subprocess.run([helm(), "version", "--short"], capture_output=True, text=True, timeout=60, check=True).stdout
    if not version.startswith("v3."):
        pytest.skip(f"the cluster's stand-in knows the calls of Helm 3, and this is {version.strip()}")
    kinds = {(object["apiVersion"], object["kind"]) for object in render(VALUES).objects}
    with releases(kinds, tmp_path) as it:
        yield it


def test_of_a_hook_that_failed_no_rights_outlast_the_release(cluster: Releases) -> None:
    cluster.server.failing = {FIRST}
    installed = cluster.helm("install", values=VALUES)
    assert installed.returncode != 0
    assert "BackoffLimitExceeded" in installed.stderr
    assert ("Job", FIRST) in cluster.there(), "its log says why"
    gone = cluster.helm("uninstall")
    assert gone.returncode == 0, gone.stderr
    assert cluster.there() == {("Job", FIRST)}
    (job,) = (object for object in cluster.server.objects.values() if object["kind"] == "Job")
    assert job["spec"]["ttlSecondsAfterFinished"] <= 86400, "it goes by itself"


def test_a_rollback_takes_the_rights_of_an_upgrade_that_failed(cluster: Releases) -> None:
    done = cluster.helm("install", values=VALUES)
    assert done.returncode == 0, done.stderr
    before = cluster.there()
    assert not {kind for kind, _ in before} & {"Role", "RoleBinding", "Job"}
    cluster.server.failing = {FIRST}
    assert cluster.helm("upgrade", values=VALUES).returncode != 0
    done = cluster.helm("rollback")
    assert done.returncode == 0, done.stderr
    assert cluster.there() == before | {("Job", FIRST)}


def test_a_test_that_passed_leaves_nothing_and_one_that_failed_its_pod(cluster: Releases) -> None:
    done = cluster.helm("install", "--no-hooks", values={})
    assert done.returncode == 0, done.stderr
    before = cluster.there()
    done = cluster.helm("test")
    assert done.returncode == 0, done.stderr
    assert cluster.there() == before
    cluster.server.failing = {"demo-twostep-test"}
    done = cluster.helm("test", "--logs")
    assert done.returncode != 0
    assert done.stdout.count(LOG) == 1, done.stdout
    assert cluster.there() == before | {("Pod", "demo-twostep-test")}
