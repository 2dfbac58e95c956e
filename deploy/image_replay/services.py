"""Runs compose.yaml's services as processes in replayed images' roots: user, mounts, environment, commands and health checks as it says.

What is not Docker's: images that are not built here have stand-ins, volumes are directories, and `setup` has the host's network.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_replay.build import Image
from image_replay.network import Network
from image_replay.root import HOST_FILES, ImageProcess, ImageSandbox

_SETUP_TIMEOUT_S = 900.0
_HEALTH_TIMEOUT_S = 1800.0
_STOP_TIMEOUT_S = 60.0
_ASK_TIMEOUT_S = 300.0


class ServiceError(Exception):
    """A service did not do what compose.yaml has it do."""


@dataclass(slots=True)
class Services:
    """`images` by the name that compose.yaml gives them. `stand_ins`: by service, files of the host that are put into its root."""

    spec: Mapping[str, Any]
    images: Mapping[str, Image]
    stand_ins: Mapping[str, Mapping[str, str]]
    network: Network
    scratch: Path
    say: Callable[[str], None]
    _running: dict[str, ImageProcess] = field(default_factory=dict)
    _healthy: set[str] = field(default_factory=set)

    def up(self) -> None:
        """Everything in the order of depends_on, until every health check is content. Raises ServiceError."""
        self._make_volumes()
        hosts = self.scratch / "hosts"
        hosts.write_text(self.network.hosts_file())
        # Docker answers at once what is in no hosts file; a name server that is not there would be waited for.
        (self.scratch / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        for name in self._order():
            for needed, how in self._services[name].get("depends_on", {}).items():
                if how["condition"] == "service_healthy":
                    self._await_healthy(needed)
            self._start(name)
        for name, service in self._services.items():
            if "healthcheck" in service:
                self._await_healthy(name)

    def ask(self, name: str, command: Sequence[str]) -> str:
        """Output of a command in a service's root, network and environment, as `docker compose exec` has it. Raises ServiceError."""
        done = self._image(name).root.run(command, self._sandbox(name), _ASK_TIMEOUT_S)
        if done.returncode != 0:
            raise ServiceError(f"{name}: {command[0]} ended with {done.returncode}\n{done.stdout[-3000:]}")
        return done.stdout

    def down(self) -> None:
        """SIGTERM to all, workers before what they need. Raises ServiceError if one did not end by itself with 0."""
        codes = {name: self._running.pop(name).terminate(_STOP_TIMEOUT_S) for name in reversed(list(self._running))}
        self.say("stopped: " + ", ".join(f"{name} {code}" for name, code in codes.items()))
        if any(codes.values()) or None in codes.values():
            raise ServiceError("not every service ended with 0 after SIGTERM")

    def kill(self) -> None:
        while self._running:
            self._running.popitem()[1].kill()

    @property
    def _services(self) -> Mapping[str, Any]:
        services: Mapping[str, Any] = self.spec["services"]
        return services

    def _order(self) -> list[str]:
        done: list[str] = []
        while len(done) < len(self._services):
            ready = [
                name for name, service in self._services.items() if name not in done and set(service.get("depends_on", {})) <= set(done)
            ]
            if not ready:
                raise ServiceError("depends_on goes round in a circle")
            done += ready
        return done

    def _start(self, name: str) -> None:
        service = self._services[name]
        command = [*(service.get("entrypoint") or self._image(name).entrypoint), *(service.get("command") or self._image(name).command)]
        if name == "setup":
            started = time.monotonic()
            done = self._image(name).root.run(command, self._sandbox(name), _SETUP_TIMEOUT_S)
            if done.returncode != 0:
                raise ServiceError(f"{name} ended with {done.returncode}\n{done.stdout[-3000:]}")
            self.say(f"ok: {name} is done after {time.monotonic() - started:.0f} s")
            return
        self._running[name] = self._image(name).root.start(command, self._sandbox(name), self.scratch / f"{name}.log")
        self.say(f"started {name}: {' '.join(command)}")

    def _await_healthy(self, name: str) -> None:
        if name in self._healthy:
            return
        kind, *command = self._services[name]["healthcheck"]["test"]
        if kind != "CMD":
            raise ServiceError(f"{name}: a health check that is no CMD is not understood here")
        started, process = time.monotonic(), self._running[name]
        while (done := self._image(name).root.run(command, self._sandbox(name), _ASK_TIMEOUT_S)).returncode != 0:
            if not process.running or time.monotonic() - started > _HEALTH_TIMEOUT_S:
                raise ServiceError(f"{name} is not healthy: {done.stdout.strip()}\n{process.tail()}")
            time.sleep(float(self._services[name]["healthcheck"]["interval"].removesuffix("s")))
        self._healthy.add(name)
        self.say(f"ok: {name} is healthy, looked for {time.monotonic() - started:.0f} s")

    def _image(self, name: str) -> Image:
        return self.images[self._services[name]["image"]]

    def _host(self, name: str) -> str:
        """Whose network and /dev/shm it has."""
        mode = str(self._services[name].get("network_mode", ""))
        return mode.removeprefix("service:") if mode else name

    def _sandbox(self, name: str) -> ImageSandbox:
        service, image, host = self._services[name], self._image(name), self._host(name)
        binds = {f"/etc/{file}": str(self.scratch / file) for file in ("hosts", "resolv.conf")}
        if name == "setup":
            binds = {path: path for path in HOST_FILES if Path(path).exists()}
        binds |= self.stand_ins.get(name, {})
        writable: set[str] = set()
        for volume in service.get("volumes", []):
            source, target, *options = volume.split(":")
            binds[target] = str(self.scratch / "volumes" / source)
            if "ro" not in options:
                writable.add(target)
        if service["read_only"] is not True or service["cap_drop"] != ["ALL"]:
            raise ServiceError(f"{name} is not read-only and without capabilities: only that is understood here")
        given = {
            key: re.sub(r"\$\{(\w+):-(.*)\}", lambda match: os.environ.get(match[1], match[2]), value)
            for key, value in service.get("environment", {}).items()
        }
        if name == "setup":
            given |= {key: value for key, value in os.environ.items() if key in ("PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT")}
        return ImageSandbox(
            env=image.env | given,
            user=service["user"],
            cwd=image.cwd,
            read_only=True,
            binds=binds,
            writable=frozenset(writable),
            tmpfs=tuple(service.get("tmpfs", [])),
            shm_dir=str(self.scratch / "shm" / host),
            before=() if name == "setup" else tuple(self.network.inside(host)),
            beside=int(self._running[host].children[0]) if "pid" in service else 0,
        )

    def _make_volumes(self) -> None:
        """Each a directory of the user's, or memory of the given size. They, and every host's /dev/shm, go with this process's mounts."""
        for volume, options in self.spec["volumes"].items():
            path = self.scratch / "volumes" / volume
            path.mkdir(parents=True, mode=0o755, exist_ok=True)
            os.chown(path, 10001, 10001)
            if options:
                _mount_memory(path, options["driver_opts"]["o"])
        for name, service in self._services.items():
            path = self.scratch / "shm" / name
            path.mkdir(parents=True)
            _mount_memory(path, f"size={service.get('shm_size', '64m')},mode=1777")


def _mount_memory(path: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "replay", str(path)], check=True)
