"""`helm test`: asks a router for its health, and for an answer over gRPC and over HTTP.

Environment: ROUTER (its host), TIMEOUT_S (for all of it; workers may still load), GRPC_PORT and HTTP_PORT, HEALTH_SERVICE (readiness),
SECRET_FILE (the deployment's, which opens routers that ask for API keys), and, with TLS, TLS_CA, TLS_CERT and TLS_KEY.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twostep import Client, TwostepError
from twostep.keys.api_keys import system_key
from twostep.keys.secret import load_secret

PROMPT = "Say hello."
MAX_TOKENS = 4
PAUSE_S = 2.0


class Smoke:
    """One router, as a client sees it. Each check raises what went wrong, or says what it saw."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._host = environ["ROUTER"]
        self._grpc = f"{self._host}:{environ.get('GRPC_PORT', '50051')}"
        self._http = f"{self._host}:{environ.get('HTTP_PORT', '8000')}"
        self._ca, self._cert, self._key = (environ.get(name) or None for name in ("TLS_CA", "TLS_CERT", "TLS_KEY"))
        self._service = environ.get("HEALTH_SERVICE", "readiness")
        secret = environ.get("SECRET_FILE")
        self._api_key = system_key(load_secret(Path(secret))) if secret else None

    def health(self, timeout: float) -> str:
        with self._channel() as channel:
            request = health_pb2.HealthCheckRequest(service=self._service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise ConnectionError(f"the router is not ready ({self._service}): no worker has registered, or it drains")
        return f"gRPC health of {self._grpc}: {self._service}"

    def generate(self, timeout: float) -> str:
        tls = {"tls_ca": self._ca, "tls_cert": self._cert, "tls_key": self._key}
        with Client(self._grpc, api_key=self._api_key, timeout=timeout, **tls) as client:
            names = [model.name for model in client.models(timeout=timeout)]
            completion = client.generate(PROMPT, max_tokens=MAX_TOKENS).result()
        if not completion.usage.completion_tokens:
            raise ConnectionError("the answer has no tokens")
        return f"gRPC: {', '.join(names)} answered with {completion.usage.completion_tokens} tokens ({completion.finish_reason})"

    def chat(self, timeout: float) -> str:
        """Asks for an answer; a model without a chat template for a completion."""
        asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": MAX_TOKENS}
        try:
            return self._post("/v1/chat/completions", asked, timeout)
        except urllib.error.HTTPError as error:
            if error.code != 400:
                raise
            return self._post("/v1/completions", {"prompt": PROMPT, "max_tokens": MAX_TOKENS}, timeout)

    def _post(self, path: str, body: object, timeout: float) -> str:
        scheme, context = "http", None
        if self._ca:
            scheme, context = "https", ssl.create_default_context(cafile=self._ca)
            if self._cert:
                context.load_cert_chain(self._cert, self._key)
        request = urllib.request.Request(f"{scheme}://{self._http}{path}", data=json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        if self._api_key:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        with urllib.request.urlopen(request, timeout=timeout, context=context) as answer:
            usage = json.load(answer)["usage"]
        if not usage["completion_tokens"]:
            raise ConnectionError("the answer has no tokens")
        return f"HTTP {path}: {usage['completion_tokens']} tokens"

    def _channel(self) -> grpc.Channel:
        if not self._ca:
            return grpc.insecure_channel(self._grpc)
        ca, key, cert = (Path(path).read_bytes() if path else None for path in (self._ca, self._key, self._cert))
        return grpc.secure_channel(self._grpc, grpc.ssl_channel_credentials(ca, key, cert))


def until_it_holds(check: Callable[[float], str], deadline: float) -> bool:
    """Tries until the deadline (of time.monotonic), and says what came of it."""
    while True:
        try:
            print(check(max(1.0, deadline - time.monotonic())), flush=True)
            return True
        except (grpc.RpcError, TwostepError, OSError) as error:
            why = error.details() if isinstance(error, grpc.Call) else str(error)
        if time.monotonic() + PAUSE_S > deadline:
            print(f"{check.__name__}: {why}", file=sys.stderr, flush=True)
            return False
        time.sleep(PAUSE_S)


def main(environ: Mapping[str, str] = os.environ) -> int:
    smoke = Smoke(environ)
    deadline = time.monotonic() + float(environ.get("TIMEOUT_S", "120"))
    return 0 if all(until_it_holds(check, deadline) for check in (smoke.health, smoke.generate, smoke.chat)) else 1


if __name__ == "__main__":
    sys.exit(main())
