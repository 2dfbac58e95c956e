"""`twostep keys`, on a file and through a port that answers as a router's does."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from twostep.cli import main
from twostep.keys.api_key_file import read_file
from twostep.keys.api_keys import KeyTable, admin_key
from twostep.keys.secret import DeploymentSecret

SECRET = DeploymentSecret(b"sixteen bytes or more")


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["keys", *map(str, argv)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_keys_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--api-keys-file", tmp_path / "keys")
    status, out, err = run(
        capsys, "create", *where, "--name", "Ann", "--tenant", "acme", "--tokens-per-day", 1000, "--expires", "2999-01-01T00:00:00Z"
    )
    told = out.strip()
    assert (status, out) == (0, f"{told}\n")
    (key,) = read_file(tmp_path / "keys")
    assert KeyTable([key]).find(told) == key
    assert (key.name, key.tenant, key.limits.tokens_per_day) == ("Ann", "acme", 1000)
    assert key.id in err
    assert told not in (tmp_path / "keys").read_text()
    status, out, _ = run(capsys, "list", *where)
    assert status == 0
    for shown in (key.id, "Ann", "acme", "1,000 tokens/day", "expires 2999-01-01T00:00:00Z"):
        assert shown in out
    assert run(capsys, "change", key.id, *where, "--tokens-per-day", 0, "--disabled")[:2] == (
        0,
        f"{key.id}: none, disabled, expires 2999-01-01T00:00:00Z\n",
    )
    status, out, _ = run(capsys, "list", *where, "--json")
    assert [(each["id"], each["disabled"]) for each in json.loads(out)] == [(key.id, True)]
    changed = run(capsys, "change", key.id, *where, "--no-disabled", "--expires", "2020-01-01T00:00:00Z")
    assert changed[1] == f"{key.id}: none, expired, ended 2020-01-01T00:00:00Z\n"
    assert run(capsys, "revoke", key.id, *where)[0] == 0
    assert run(capsys, "list", *where)[1] == "There are no keys.\n"


def test_what_cannot_be_done_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--api-keys-file", tmp_path / "keys")
    for argv, complaint in (
        (("list",), "say where the keys are"),
        (("list", *where), "give a file that can be read"),
        (("revoke", "x", *where), "does not exist"),
        (("create", *where, "--tokens-per-day", -1), "tokens_per_day"),
        (("create", *where, "--expires", "soon"), "expires"),
        (("create", *where, "--admin", "http://x"), "contradict"),
        (("change", "x", *where), "nothing to change"),
        (("list", "--admin", "http://127.0.0.1:1"), "--secret-file is missing; give the one that its processes have"),
    ):
        status, out, err = run(capsys, *argv)
        assert (status, out) == (1, ""), argv
        assert complaint in err
        assert err.count("\n") == 1
    (tmp_path / "secret").write_bytes(SECRET.own)
    status, _, err = run(capsys, "list", "--admin", "http://127.0.0.1:1", "--secret-file", tmp_path / "secret")
    assert status == 1
    assert "no router answers at http://127.0.0.1:1" in err


class Port(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str, str, Any]]] = []
    answers: ClassVar[list[tuple[int, Any]]] = []

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.command, self.path, self.headers["Authorization"], json.loads(body) if body else None))
        status, answer = self.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST = do_PATCH = do_DELETE = _any  # noqa: N815, RUF100  # http.server's names

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def listening(tls: ssl.SSLContext | None = None) -> Iterator[str]:
    Port.asked.clear()
    Port.answers.clear()
    with HTTPServer(("127.0.0.1", 0), Port) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def port() -> Iterator[str]:
    with listening() as url:
        yield url


def test_keys_of_a_router(port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks what a router is asked; tests/router/test_access_admin.py shows that one answers."""
    (tmp_path / "secret").write_bytes(SECRET.own + b"\n")
    (tmp_path / "admin").write_text("the port's own\n")
    where = ("--admin", port, "--secret-file", tmp_path / "secret")
    Port.answers += [(201, {"key": "ts-x", "id": "key-1"}), (200, {"data": []}), (404, {"error": {"message": "there is none"}}), (401, {})]
    assert run(capsys, "create", *where, "--name", "Ann", "--max-concurrent", 3)[1] == "ts-x\n"
    assert run(capsys, "list", *where, "--admin-key-file", tmp_path / "admin")[1] == "There are no keys.\n"
    assert run(capsys, "revoke", "a/b", *where)[::2] == (1, "twostep: there is none\n")
    assert run(capsys, "list", *where)[0] == 1
    bearer = f"Bearer {admin_key(SECRET)}"
    assert Port.asked == [
        ("POST", "/admin/keys", bearer, {"name": "Ann", "max_concurrent": 3}),
        ("GET", "/admin/keys", "Bearer the port's own", None),
        ("DELETE", "/admin/keys/a%2Fb", bearer, None),
        ("GET", "/admin/keys", bearer, None),
    ]


def test_a_port_that_asks_for_a_certificate_is_shown_one(
    tmp_path: Path, self_signed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = self_signed
    (tmp_path / "secret").write_bytes(SECRET.own)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=cert)
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(cert, key)
    with listening(tls) as url:
        where = ("list", "--admin", url, "--secret-file", tmp_path / "secret", "--tls-ca", cert)
        Port.answers += [(200, {"data": []})]
        assert run(capsys, *where, "--tls-cert", cert, "--tls-key", key)[1] == "There are no keys.\n"
        status, _, err = run(capsys, *where)
        assert (status, len(Port.asked)) == (1, 1)
        assert "no router answers at https://" in err
        assert "--tls-cert" in err
    for flags, complaint in (
        (("--tls-cert", cert), "go together"),
        (("--tls-cert", tmp_path / "none", "--tls-key", key), "fit together"),
        (("--admin", "127.0.0.1:1"), "give https://HOST:PORT"),  # the key would go there in the clear
    ):
        status, _, err = run(capsys, *where, *flags)
        assert status == 1
        assert complaint in err


def test_it_loads_nothing_heavy() -> None:
    code = "import sys, twostep.cli._keys; sys.exit(any(m in sys.modules for m in ('grpc', 'redis', 'aiohttp', 'torch', 'router')))"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
