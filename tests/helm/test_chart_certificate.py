"""The certificate that a hook Job makes: once, for the names that the chart's parts call each other by, good for servers and clients."""

from __future__ import annotations

import base64
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest
from chart_cases import SWITCHES
from chart_hooks import FakeApi, run_hook
from chart_processes import processes
from chart_render import merged, render

VALUES = merged(SWITCHES["tls-job"], SWITCHES["autoscaling"], {"tls": {"extraDnsNames": ["llm.example"]}})


@pytest.fixture
def certificate(api: FakeApi, tmp_path: Path) -> Path:
    """The folder where a pod would have the Secret's files."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    result = run_hook("make-tls", api, tmp_path, VALUES)
    assert result.returncode == 0, result.stderr
    (secret,) = api.secrets.values()
    assert secret["type"] == "kubernetes.io/tls"
    for name, content in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    return tmp_path


def test_both_sides_take_it_under_every_name(certificate: Path) -> None:
    chart = render(VALUES)
    router = next(process.config for process in processes(chart) if process.module == "router")
    scaler_address = chart.of("ScaledObject")[0]["spec"]["triggers"][0]["metadata"]["scalerAddress"]
    names = {router.tls.peer_name, scaler_address.rpartition(":")[0], "localhost", "llm.example"}
    names |= {service["metadata"]["name"] for service in chart.of("Service") if "router" in service["metadata"]["name"]}
    for name in sorted(names):
        assert served_under(name, certificate) == name
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        served_under("other.example", certificate)


def served_under(name: str, folder: Path) -> str:
    """Shakes hands over a socket pair, each side with the certificate and asking for the other's. Raises ssl.SSLError of the client."""
    contexts = [ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)]
    for context in contexts:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.load_verify_locations(folder / "ca.crt")
        context.verify_mode = ssl.CERT_REQUIRED
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    theirs.settimeout(30)

    def serve() -> None:
        with theirs:
            try:
                with contexts[0].wrap_socket(theirs, server_side=True) as peer:
                    peer.sendall(name.encode())
            except OSError:
                pass

    server = threading.Thread(target=serve)
    server.start()
    try:
        with ours, contexts[1].wrap_socket(ours, server_hostname=name) as peer:
            return peer.recv(1000).decode()
    finally:
        server.join()


def test_it_is_made_once(certificate: Path, api: FakeApi) -> None:
    before = dict(api.secrets)
    again = run_hook("make-tls", api, certificate, VALUES)
    assert again.returncode == 0
    assert "stays as it is" in again.stdout
    assert api.secrets == before
    assert not any(line in again.stdout for line in (certificate / "tls.key").read_text().splitlines())


def test_a_hook_without_rights_says_which(api: FakeApi, tmp_path: Path) -> None:
    api.refuses = {"GET"}
    result = run_hook("make-tls", api, tmp_path, VALUES)
    assert result.returncode == 1
    assert "403" in result.stderr
