"""Starts a small Ray head on this machine: the command, its environment, and how to see that it is up. Never imports ray.

    head = RayHead(temp_dir=Path("/tmp/ts1"), port=free_port(), client_port=free_port())
    head.prepare()
    process = subprocess.Popen(head.argv(), env=head.env(os.environ), stdin=subprocess.DEVNULL, ...)
    while not head.ready(): ...                      # 4-6 s
    worker_env = head.env(os.environ)                # the same token lets KV agents join `head.address`

The process runs `ray start --head --block` and ends when its parent does, however that ends; SIGTERM ends all of Ray's processes
with it (under 1 s), and so does SIGKILL.
"""

from __future__ import annotations

import os
import runpy
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from twostep.errors import SetupError
from twostep.settings.ray_node import MIN_OBJECT_STORE_BYTES

# Ray puts its unix sockets at {temp_dir}/session_{date}_{time}_{micros}_{pid}/sockets/plasma_store, and a socket's name has 107 bytes.
_SOCKET_SUFFIX = len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
_MAX_SOCKET_PATH = 107
_WATCH_S = 0.5
# From SIGTERM to a hard end, which takes Ray's other processes along.
_END_S = 20.0


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHead:
    """One local head. `temp_dir` is private and short; its token file is made by `prepare` and kept between starts.

    `node_ip` defaults to a loopback address that Ray does not replace by the machine's own, as it does with 127.0.0.1. Ray listens
    on all interfaces whatever it says: token authentication, which is always on here, is what keeps others out.
    """

    temp_dir: Path
    port: int
    client_port: int
    object_store_bytes: int = 512 << 20
    node_ip: str = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"

    @property
    def address(self) -> str:
        """What a KV agent joins: `--ray-address`."""
        return f"{self.node_ip}:{self.port}"

    @property
    def token_path(self) -> Path:
        return self.temp_dir / "token"

    def prepare(self) -> None:
        """Makes the directory (0700) and the token file (0600), and forgets an earlier life. Raises SetupError."""
        check_temp_dir(self.temp_dir)
        if self.object_store_bytes < MIN_OBJECT_STORE_BYTES:
            raise SetupError(
                f"an object store of {self.object_store_bytes} bytes is too small for Ray; give at least {MIN_OBJECT_STORE_BYTES}"
            )
        self.temp_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.token_path.exists():
            descriptor = os.open(self.token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
        self._address_file.unlink(missing_ok=True)

    def argv(self) -> list[str]:
        """The command; runs in the foreground."""
        return [sys.executable, "-P", "-m", "kv_transfer.ray.head", *self._ray_arguments()]

    def env(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` plus what head, KV agents and `ray` commands need to share one token."""
        return {**base, **ray_env(self.token_path)}

    def ready(self) -> bool:
        """Ray is up and its GCS answers. Blocks for at most 0.2 s."""
        if not self._address_file.is_file():
            return False
        try:
            with socket.create_connection((self.node_ip, self.port), timeout=0.2):
                return True
        except OSError:
            return False

    @property
    def _address_file(self) -> Path:
        # Written by `ray start` when GCS and raylet are up.
        return self.temp_dir / "ray_current_cluster"

    def _ray_arguments(self) -> list[str]:
        return [
            "start",
            "--head",
            "--block",
            f"--node-ip-address={self.node_ip}",
            f"--port={self.port}",
            f"--ray-client-server-port={self.client_port}",
            f"--object-store-memory={self.object_store_bytes}",
            f"--temp-dir={self.temp_dir}",
            "--num-cpus=0",
            "--num-gpus=0",
            "--include-dashboard=false",
            "--include-log-monitor=false",
            "--no-monitor",
            "--disable-usage-stats",
            # The byte budgets of the KV agents keep the store from filling up; nothing of it belongs on disk.
            '--system-config={"automatic_object_spilling_enabled":false}',
            "--log-style=record",
            "--log-color=false",
        ]


def check_temp_dir(path: Path) -> None:
    """Raises SetupError."""
    if len(os.fsencode(path)) + _SOCKET_SUFFIX > _MAX_SOCKET_PATH:
        raise SetupError(
            f"{path} is too long for Ray's unix sockets; give a directory of at most {_MAX_SOCKET_PATH - _SOCKET_SUFFIX} bytes"
        )


def ray_env(token_path: Path) -> dict[str, str]:
    """Environment of every process that talks to a Ray with token authentication."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_enable_worker_prestart": "0",
        # Ray runs actors at niceness 15, where a busy machine starves them; a KV agent is part of every request's way.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def main(arguments: list[str]) -> None:
    """Is `ray`, and a thread that ends it when the parent has ended. (The kernel's death signal is no good here: it comes when the
    parent's *thread* that started this process ends.)"""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    sys.argv = ["ray", *arguments]
    runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_S)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
