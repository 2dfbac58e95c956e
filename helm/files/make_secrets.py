"""Makes the Secret of a release, once: deployment-secret, ray-token and redis-password. Runs as a hook of the chart, before all else.

What is there already stays as it is, whatever it holds: tickets, prefix hashes, Ray and Redis live by it. Environment: SECRET_NAME,
NAMESPACE, LABELS (a JSON object); KUBERNETES_API and ACCOUNT_DIR only in tests.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import sys
from collections.abc import Mapping

from make_tls import Api

KEYS = ("deployment-secret", "ray-token", "redis-password")


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
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {"name": name, "namespace": namespace, "labels": json.loads(environ.get("LABELS", "{}"))},
        # In hexadecimal digits: a password stands in an URL.
        "data": {key: base64.b64encode(secrets.token_hex(32).encode()).decode() for key in KEYS},
    }
    status = api.call("POST", path, secret)
    # 409: another run of this hook was quicker.
    if status not in (201, 409):
        return 1
    print(f"Secret {name}: {', '.join(KEYS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
