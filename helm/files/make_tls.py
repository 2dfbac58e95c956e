"""Makes an authority and a certificate, once, and puts them into a Secret: tls.crt, tls.key, ca.crt; and for KEDA others of its own. Runs
as a hook of the chart.

What is there already stays as it is; if it is not what the release wants, the hook says so and fails, before anything else is changed. An
authority's key is thrown away: nobody can issue a further certificate, and to have a new one, delete the Secret and upgrade the release.
KEDA's authority is another one: the autoscaler takes it, workers do not. Environment: SECRET_NAME, KEDA_SECRET_NAME (none if not set),
NAMESPACE, DNS_NAMES (one a line), DAYS, LABELS (a JSON object); KUBERNETES_API and ACCOUNT_DIR only in tests.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 30


@dataclass(frozen=True)
class ApiAnswer:
    """Holds an answer of the Kubernetes API: its HTTP status, and the object of one that is no error."""

    status: int
    object: Any = None

    def data(self, key: str) -> bytes:
        return base64.b64decode((self.object.get("data") or {}).get(key, ""))


class Api:
    """The Kubernetes API as the pod's ServiceAccount may use it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        account = Path(environ.get("ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
        self._base = environ.get("KUBERNETES_API") or f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._token = (account / "token").read_text().strip()
        authority = account / "ca.crt"
        self._context = ssl.create_default_context(cafile=str(authority)) if authority.exists() else None

    def call(self, method: str, path: str, body: Any = None) -> ApiAnswer:
        request = urllib.request.Request(self._base + path, method=method, data=None if body is None else json.dumps(body).encode())
        request.add_header("Authorization", f"Bearer {self._token}")
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._context) as answer:
                return ApiAnswer(answer.status, json.load(answer))
        except urllib.error.HTTPError as error:
            if error.code not in (404, 409):
                print(f"{method} {path}: {error.code} {error.read(2000).decode(errors='replace')}", file=sys.stderr)
            return ApiAnswer(error.code)


def make_certificates(folder: Path, names: list[str], days: int, *, usage: str = "serverAuth,clientAuth") -> dict[str, bytes]:
    """An authority and a certificate for `names`, usable by servers and clients. Raises CalledProcessError or FileNotFoundError."""
    (folder / "extensions").write_text(
        f"basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage={usage}\n"
        f"subjectAltName={','.join(f'DNS:{name}' for name in names)},IP:127.0.0.1\n"
    )
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    # Each of a name of its own: in a file of several they are told apart by it.
    subject = f"/CN={names[0][:54]} authority"
    authority = ["-x509", "-days", str(days), "-subj", subject, "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    _openssl(folder, "req", *authority, *new_key, "-keyout", "ca.key", "-out", "ca.crt")
    _openssl(folder, "req", *new_key, "-keyout", "tls.key", "-out", "request", "-subj", f"/CN={names[0][:64]}")
    signed_by = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days), "-extfile", "extensions"]
    _openssl(folder, "x509", "-req", "-in", "request", *signed_by, "-out", "tls.crt")
    return {name: (folder / name).read_bytes() for name in ("tls.crt", "tls.key", "ca.crt")}


def fault_of(certificate: bytes, names: list[str]) -> str:
    """Returns what a certificate that is there lacks; empty if nothing. Raises FileNotFoundError."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "tls.crt").write_bytes(certificate)
        look = ("x509", "-in", "tls.crt", "-noout")
        end = _openssl(folder, *look, "-enddate", check=False).strip().removeprefix("notAfter=")
        if not end:
            return "cannot be read"
        # By what it says: the status of a name that does not match is not the same in all versions.
        missing = [name for name in names if "does match" not in _openssl(folder, *look, "-checkhost", name, check=False)]
    if missing:
        return f"is not valid for {', '.join(missing)}"
    return f"has ended, {end}" if ssl.cert_time_to_seconds(end) < time.time() else ""


def _openssl(folder: Path, *arguments: str, check: bool = True) -> str:
    """Returns what it prints."""
    done = subprocess.run(["openssl", *arguments], cwd=folder, check=check, capture_output=True, timeout=TIMEOUT_S)
    return done.stdout.decode(errors="replace")


def provide(api: Api, environ: Mapping[str, str], name: str, names: list[str], usage: str) -> bool:
    """Returns whether Secret `name` is there now, with a certificate for `names`. Raises CalledProcessError or FileNotFoundError."""
    path = f"/api/v1/namespaces/{environ['NAMESPACE']}/secrets"
    found = api.call("GET", f"{path}/{name}")
    if found.status == 200:
        fault = fault_of(found.data("tls.crt"), names)
        if fault:
            print(
                f"Secret {name}: its certificate {fault}. Delete the Secret and upgrade again, for a new authority and certificate, "
                "and restart all processes then: old and new ones do not take each other's",
                file=sys.stderr,
            )
            return False
        print(f"Secret {name} is there already and stays as it is")
        return True
    if found.status != 404:
        return False
    with tempfile.TemporaryDirectory() as scratch:
        files = make_certificates(Path(scratch), names, int(environ["DAYS"]), usage=usage)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": name, "namespace": environ["NAMESPACE"], "labels": json.loads(environ.get("LABELS", "{}"))},
        "data": {key: base64.b64encode(content).decode() for key, content in files.items()},
    }
    # 409: another run of this hook was quicker.
    if api.call("POST", path, secret).status not in (201, 409):
        return False
    print(f"Secret {name}: a certificate for {', '.join(names)}")
    return True


def main(environ: Mapping[str, str] = os.environ) -> int:
    api = Api(environ)
    keda = environ.get("KEDA_SECRET_NAME")
    try:
        there = provide(api, environ, environ["SECRET_NAME"], environ["DNS_NAMES"].split(), "serverAuth,clientAuth")
        # A name that nobody is reached at, for a certificate that serves nobody.
        return 0 if there and (not keda or provide(api, environ, keda, [keda], "clientAuth")) else 1
    except FileNotFoundError:
        print("the image has no openssl command; give tls.existingSecret, or use tls.source certManager", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(error.cmd)}: {error.stderr.decode(errors='replace')}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
