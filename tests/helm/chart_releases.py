"""Releases that helm itself installs, tests and takes away, in a cluster's stand-in: an API server that keeps what it is told, and runs
nothing. Jobs and pods are over as soon as they are made, as they were told to end."""

from __future__ import annotations

import base64
import itertools
import json
import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from chart_render import CHART, MODEL, NAMESPACE, RELEASE, Object, helm, merged

TIMEOUT_S = 120
LOG = "what the pod has said\n"
# Helm keeps its releases in them.
_SECRET = ("v1", "Secret")


# How a body in Kubernetes' protobuf encoding begins: helm's own Secrets come so.
_MAGIC = b"k8s\0"


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of the fields of a protobuf message, of those that have a length."""
    place = 0

    def whole() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place, value, shift = place + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while place < len(message):
        number, kind = divmod(whole(), 8)
        length = whole()
        if kind == 2:
            yield number, message[place : place + length]
            place += length


def _secret(body: bytes) -> Object:
    """Of Kubernetes' protobuf: an envelope (runtime.Unknown) with a Secret in it."""
    envelope = dict(_fields(body.removeprefix(_MAGIC)))
    assert dict(_fields(envelope[1]))[2] == b"Secret"
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"labels": {}}, "data": {}}
    for number, content in _fields(envelope[2]):
        if number == 1:
            for part, value in _fields(content):
                if part in (1, 3):
                    secret["metadata"]["name" if part == 1 else "namespace"] = value.decode()
                elif part == 11:
                    label = dict(_fields(value))
                    secret["metadata"]["labels"][label[1].decode()] = label[2].decode()
        elif number == 2:
            entry = dict(_fields(content))
            secret["data"][entry[1].decode()] = base64.b64encode(entry[2]).decode()
    return secret


def plural(kind: str) -> str:
    """As it stands in paths."""
    name = kind.lower()
    return re.sub("y$", "ies", name) if name.endswith("cy") else name + ("es" if name.endswith("s") else "s")


class Server(ThreadingHTTPServer):
    """`objects` by path. `failing`: names of Jobs and pods that fail."""

    daemon_threads = True

    def __init__(self, kinds: set[tuple[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kinds = kinds | {_SECRET}
        self.objects: dict[str, Object] = {}
        self.failing: set[str] = set()
        self.versions = itertools.count(1)

    def said_of_itself(self, path: str) -> Any:
        """Which kinds there are, and that it checks their fields itself; None: it is not asked for that."""
        versions = sorted({version for version, _ in self.kinds})
        groups: dict[str, list[Any]] = {}
        for version in versions:
            if "/" in version:
                groups.setdefault(version.split("/")[0], []).append({"groupVersion": version, "version": version.split("/")[1]})
        homes = {f"/apis/{version}" if "/" in version else f"/api/{version}": version for version in versions}
        if path == "/version":
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            found = [{"name": name, "versions": each, "preferredVersion": each[0]} for name, each in groups.items()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
        if path == "/openapi/v3":
            return {"paths": {home.lstrip("/"): {"serverRelativeURL": f"/openapi/v3{home}"} for home in homes}}
        home = path.removeprefix("/openapi/v3")
        if home not in homes:
            return None
        version = homes[home]
        kinds = sorted(kind for of, kind in self.kinds if of == version)
        if not path.startswith("/openapi"):
            resources = [{"name": plural(kind), "kind": kind, "namespaced": True, "verbs": ["get", "list", "watch"]} for kind in kinds]
            return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        group, _, short = version.rpartition("/")
        paths = {}
        for kind in kinds:
            of = {"group": group, "version": short, "kind": kind}
            checked = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
            patch = {"x-kubernetes-group-version-kind": of, "parameters": checked}
            paths[f"{home}/{plural(kind)}"] = {"patch": patch}
        return {"openapi": "3.0.0", "info": {"title": "", "version": ""}, "paths": paths}

    def made(self, path: str, object: Object) -> Object:
        """As it stands in the cluster from now on."""
        name, number = object["metadata"]["name"], str(next(self.versions))
        object["metadata"] |= {"uid": number, "resourceVersion": number, "creationTimestamp": "2026-01-01T00:00:00Z"}
        failed = name in self.failing
        if object["kind"] == "Job":
            condition = {"type": "Failed" if failed else "Complete", "status": "True", "reason": "BackoffLimitExceeded" if failed else ""}
            object["status"] = {"conditions": [condition]}
        elif object["kind"] == "Pod":
            object["status"] = {"phase": "Failed" if failed else "Succeeded"}
        self.objects[f"{path}/{name}"] = object
        return object


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(asked.query).items()}
        said = self.server.said_of_itself(asked.path)
        if said is not None:
            return self._answer(200, said)
        if asked.path in self.server.objects:
            return self._answer(200, self.server.objects[asked.path])
        if asked.path.endswith("/log") and asked.path.removesuffix("/log") in self.server.objects:
            return self._answer(200, LOG)
        if asked.path.rpartition("/")[2] not in {plural(kind) for _, kind in self.server.kinds}:
            return self._missing()
        of = [object for path, object in self.server.objects.items() if path.rpartition("/")[0] == asked.path]
        for term in filter(None, query.get("labelSelector", "").split(",")):
            label, _, value = term.partition("=")
            of = [object for object in of if object["metadata"].get("labels", {}).get(label) == value.lstrip("=")]
        if "fieldSelector" in query:
            of = [object for object in of if object["metadata"]["name"] == query["fieldSelector"].partition("=")[2]]
        if query.get("watch"):
            # What was listed before this is all that will ever be.
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            return None
        version, kind = next((version, kind) for version, kind in self.server.kinds if plural(kind) == asked.path.rpartition("/")[2])
        return self._answer(200, {"kind": f"{kind}List", "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": of})

    def do_POST(self) -> None:
        path, object = urlsplit(self.path).path, self._body()
        if f"{path}/{object['metadata']['name']}" in self.server.objects:
            self._answer(409, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "AlreadyExists", "code": 409})
        else:
            self._answer(201, self.server.made(path, object))

    def do_PUT(self) -> None:
        path = urlsplit(self.path).path
        self._answer(200, self.server.made(path.rpartition("/")[0], self._body()))

    def do_PATCH(self) -> None:
        """Changes nothing: what tests ask for is there or not."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(200, self.server.objects[urlsplit(self.path).path])

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.objects.pop(urlsplit(self.path).path, None) is None:
            self._missing()
        else:
            self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _body(self) -> Any:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return _secret(body) if body.startswith(_MAGIC) else json.loads(body)

    def _missing(self) -> None:
        self._answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404})

    def _answer(self, status: int, said: Any) -> None:
        body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(said, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@dataclass
class Releases:
    """Helm, and the cluster that it works on."""

    server: Server
    scratch: Path

    def helm(self, *words: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command over the release. With `values` it gets the chart, too."""
        chart = [] if values is None else [str(CHART), "--values", "-"]
        server = ["--kubeconfig", str(self.scratch / "kubeconfig"), "--namespace", NAMESPACE]
        command = [helm(), words[0], RELEASE, *chart, *server, *words[1:]]
        given = None if values is None else json.dumps(merged(MODEL, values))
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    def there(self) -> set[tuple[str, str]]:
        """Kind and name of what is in the cluster, helm's own records apart."""
        found = {(object["kind"], object["metadata"]["name"]) for object in self.server.objects.values()}
        return {(kind, name) for kind, name in found if not name.startswith("sh.helm.release")}


@contextmanager
def releases(kinds: set[tuple[str, str]], scratch: Path) -> Iterator[Releases]:
    with Server(kinds) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        cluster = {"name": "it", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        context = {"name": "it", "context": {"cluster": "it", "user": ""}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "current-context": "it"}
        (scratch / "kubeconfig").write_text(yaml.safe_dump(config))
        try:
            yield Releases(server, scratch)
        finally:
            server.shutdown()
            thread.join()
