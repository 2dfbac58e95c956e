"""The script that `helm test` runs (helm/files/smoke.py), against a router: it passes where clients get answers, and says why where not."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from router_fakes import Cluster

from twostep.settings.tls import TlsFiles

SCRIPT = Path(__file__).parents[2] / "helm/files/smoke.py"


# Each check once, with a minute's time: the pause before the next try is more than is left.
ONE_TRY = "import sys, smoke; smoke.PAUSE_S = 1000.0; sys.exit(smoke.main())"


async def smoke(cluster: Cluster, *, once: bool = False, **more: str) -> tuple[int, str]:
    """Exit status, and what it says."""
    env = {"PATH": os.environ["PATH"], "ROUTER": "127.0.0.1", "TIMEOUT_S": "60", **more}
    env |= {"GRPC_PORT": str(cluster.router.grpc_port), "HTTP_PORT": str(cluster.router.http_port), "SECRET_FILE": str(cluster.secret_file)}
    env["PYTHONPATH"] = os.pathsep.join(str(path) for path in (SCRIPT.parents[2], SCRIPT.parent))
    argv = ["-c", ONE_TRY] if once else [str(SCRIPT)]
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-P", *argv, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(run.communicate(), 180)
    assert run.returncode is not None
    return run.returncode, said.decode()


async def test_a_router_that_serves_passes(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.prefill()
    await cluster.decode()
    keys = tmp_path / "keys.jsonl"
    keys.touch()
    for config in ({}, {"api_keys_file": keys}):
        async with cluster.serving(**config):
            status, said = await smoke(cluster)
        assert status == 0, said
        assert "HTTP /v1/" in said
        assert "gRPC: m answered with" in said


async def test_a_router_without_workers_fails_and_says_why(cluster: Cluster) -> None:
    async with cluster.serving():
        status, said = await smoke(cluster, once=True)
    assert status == 1
    assert "not ready" in said


async def test_where_a_request_is_what_wakes_workers_one_is_sent(cluster: Cluster) -> None:
    async with cluster.serving(no_worker_grace=0.1):
        status, said = await smoke(cluster, once=True, HEALTH_SERVICE="liveness")
    assert status == 1
    assert "liveness" in said
    assert "generate: " in said


@pytest.fixture
def tls(tmp_path: Path) -> TlsFiles:
    """A certificate of localhost that is its own authority."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    subprocess.run(["openssl", "req", "-x509", *kind, "-keyout", key, "-out", cert, *subject], check=True, capture_output=True)
    return TlsFiles(cert=cert, key=key, ca=cert)


async def test_with_tls_it_shows_a_certificate_and_wants_one(cluster: Cluster, tls: TlsFiles) -> None:
    files: dict[str, Any] = {"TLS_CA": str(tls.ca), "TLS_CERT": str(tls.cert), "TLS_KEY": str(tls.key)}
    # The fakes have no TLS: what is seen here is that all three calls get through to a router that has.
    async with cluster.serving(tls=tls):
        status, said = await smoke(cluster, once=True, ROUTER="localhost", **files)
        assert (status, "not ready" in said) == (1, True)
        status, said = await smoke(cluster, once=True, ROUTER="localhost", TLS_CA=str(tls.ca))
        assert (status, "not ready" in said) == (1, False), "a router that asks for certificates"
