"""Makes the Secret of a release, once: the deployment secret, Ray's token and Redis' password. A hook of the chart, before all else.

What is there already stays as it is, whatever it holds: tickets, prefix hashes, Ray and Redis live by it. Where a key is missing, the hook
says so and fails: pods would wait for it without a word. Environment: SECRET_NAME, NAMESPACE, SECRET_KEYS (with spaces between), LABELS (a
JSON object); KUBERNETES_API and ACCOUNT_DIR only in tests.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import sys
from collections.abc import Mapping

from make_tls import Api


def main(environ: Mapping[str, str] = os.environ) -> int:
    name, namespace, keys = environ["SECRET_NAME"], environ["NAMESPACE"], environ["SECRET_KEYS"].split()
    path = f"/api/v1/namespaces/{namespace}/secrets"
    api = Api(environ)
    found = api.call("GET", f"{path}/{name}")
    if found.status == 200:
        missing = [key for key in keys if not found.data(key)]
        if missing:
            print(
                f"Secret {name} is there, and has no {', '.join(missing)}: add what is missing, any 32 random bytes in hexadecimal digits "
                "(openssl rand -hex 32), and upgrade again",
                file=sys.stderr,
            )
            return 1
        print(f"Secret {name} is there already and stays as it is")
        return 0
    if found.status != 404:
        return 1
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {"name": name, "namespace": namespace, "labels": json.loads(environ.get("LABELS", "{}"))},
        # In hexadecimal digits: a password stands in an URL.
        "data": {key: base64.b64encode(secrets.token_hex(32).encode()).decode() for key in keys},
    }
    # 409: another run of this hook was quicker.
    if api.call("POST", path, secret).status not in (201, 409):
        return 1
    print(f"Secret {name}: {', '.join(keys)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
