"""A proxy between an agent and the system: it notes what is asked and answered, and makes a model of made-up weights take part.

Such a model never calls a tool by itself, and never stops. The first request that offers the agent's harmless tool must call it; every
other answer is a few letters, by a grammar. All else goes through as it is.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_TIMEOUT_S = 300.0
_CHUNK_BYTES = 4096
_KEPT_HEADERS = ("Content-Type", "Authorization", "x-api-key", "Accept", "anthropic-version", "anthropic-beta")


@dataclass
class Exchange:
    path: str
    status: int
    asked: dict[str, Any]
    answer: str


@dataclass
class Seen:
    """`tool`: a name that ends so is called once."""

    url: str
    tool: str
    exchanges: list[Exchange] = field(default_factory=list)
    called: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def steered(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the body with what makes this model answer like one that can."""
        if "count_tokens" in path or "input_tokens" in path:
            return body
        named = [name for name in tool_names(body) if name.endswith(self.tool)]
        with self.lock:
            calls, self.called = bool(named) and not self.called, self.called or bool(named)
        if calls:
            return body | {"tool_choice": choice(path, named[0])}
        return body | {"structured_outputs": {"regex": "[a-z]{3,12}"}}

    def failures(self) -> list[str]:
        return [f"{each.path}: {each.status} {each.answer[:600]}" for each in self.exchanges if each.status >= 400]


def tool_names(body: dict[str, Any]) -> list[str]:
    tools = [tool.get("function", tool) for tool in body.get("tools") or []]
    return [tool["name"] for tool in tools if "name" in tool]


def choice(path: str, name: str) -> dict[str, Any]:
    if path.startswith("/v1/messages"):
        return {"type": "tool", "name": name}
    return {"type": "function", "name": name} if path.startswith("/v1/responses") else {"type": "function", "function": {"name": name}}


@contextmanager
def proxy(url: str, tool: str) -> Iterator[tuple[str, Seen]]:
    """Yields the proxy's own URL, and what it sees."""
    seen = Seen(url, tool)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(None)

        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            self._pass_on(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def _pass_on(self, raw: bytes | None) -> None:
            asked: dict[str, Any] = json.loads(raw) if raw else {}
            sent = json.dumps(seen.steered(self.path, asked)).encode() if raw else None
            headers = {name: self.headers[name] for name in _KEPT_HEADERS if name in self.headers}
            request = urllib.request.Request(seen.url + self.path, sent, headers, method=self.command)
            try:
                answer = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
            except urllib.error.HTTPError as error:
                answer = error
            told = bytearray()
            with answer:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
                self.send_header("Connection", "close")
                self.end_headers()
                while chunk := answer.read1(_CHUNK_BYTES):
                    told += chunk
                    self.wfile.write(chunk)
                    self.wfile.flush()
            seen.exchanges.append(Exchange(self.path, answer.status, asked, told.decode("utf-8", "replace")))

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
