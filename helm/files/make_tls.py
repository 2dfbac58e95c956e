"""Makes an authority and a certificate, once, and puts them into a Secret: tls.crt, tls.key, ca.crt. Runs as a hook of the chart.

What is there already stays as it is. The authority's key is thrown away: nobody can issue a further certificate, and to have a new one,
delete the Secret and upgrade the release. Environment: SECRET_NAME, NAMESPACE, DNS_NAMES (one a line), DAYS, LABELS (a JSON object);
KUBERNETES_API and ACCOUNT_DIR only in tests.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TIMEOUT_S = 30


class Api:
    """The Kubernetes API as the pod's ServiceAccount may use it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        account = Path(environ.get("ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
        self._base = environ.get("KUBERNETES_API") or f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self._token = (account / "token").read_text().strip()
        authority = account / "ca.crt"
        self._context = ssl.create_default_context(cafile=str(authority)) if authority.exists() else None

    def call(self, method: str, path: str, body: Any = None) -> int:
        """The HTTP status. Raises OSError where the API cannot be reached."""
        request = urllib.request.Request(self._base + path, method=method, data=None if body is None else json.dumps(body).encode())
        request.add_header("Authorization", f"Bearer {self._token}")
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._context) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            if error.code not in (404, 409):
                print(f"{method} {path}: {error.code} {error.read(2000).decode(errors='replace')}", file=sys.stderr)
            return error.code


def make_certificates(folder: Path, names: list[str], days: int) -> dict[str, bytes]:
    """An authority and a certificate for `names`, usable by servers and clients. Raises CalledProcessError or FileNotFoundError."""
    (folder / "extensions").write_text(
        "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n"
        f"subjectAltName={','.join(f'DNS:{name}' for name in names)},IP:127.0.0.1\n"
    )
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    authority = ["-x509", "-days", str(days), "-subj", "/CN=twostep authority", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    _openssl(folder, "req", *authority, *new_key, "-keyout", "ca.key", "-out", "ca.crt")
    _openssl(folder, "req", *new_key, "-keyout", "tls.key", "-out", "request", "-subj", f"/CN={names[0][:64]}")
    signed_by = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days), "-extfile", "extensions"]
    _openssl(folder, "x509", "-req", "-in", "request", *signed_by, "-out", "tls.crt")
    return {name: (folder / name).read_bytes() for name in ("tls.crt", "tls.key", "ca.crt")}


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=TIMEOUT_S)


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Exit status: 0 the Secret is there, 1 it is not."""
    name, namespace = environ["SECRET_NAME"], environ["NAMESPACE"]
    path = f"/api/v1/namespaces/{namespace}/secrets"
    api = Api(environ)
    status = api.call("GET", f"{path}/{name}")
    if status == 200:
        print(f"Secret {name} is there already and stays as it is")
        return 0
    if status != 404:
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        try:
            files = make_certificates(Path(scratch), environ["DNS_NAMES"].split(), int(environ["DAYS"]))
        except FileNotFoundError:
            print("the image has no openssl command; give tls.existingSecret, or use tls.source certManager", file=sys.stderr)
            return 1
        except subprocess.CalledProcessError as error:
            print(f"{' '.join(error.cmd)}: {error.stderr.decode(errors='replace')}", file=sys.stderr)
            return 1
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": name, "namespace": namespace, "labels": json.loads(environ.get("LABELS", "{}"))},
        "data": {key: base64.b64encode(content).decode() for key, content in files.items()},
    }
    status = api.call("POST", path, secret)
    # 409: another run of this hook was quicker.
    if status not in (201, 409):
        return 1
    print(f"Secret {name}: a certificate for {', '.join(environ['DNS_NAMES'].split())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
