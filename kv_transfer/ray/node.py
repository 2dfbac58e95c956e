"""A node of a Ray that outlives its parts: `python -P -m kv_transfer.ray.node`, one in each pod or machine with workers, and one as head.

1. A raylet's node waits until the head answers: `ray start` itself gives up, and a restart by others may take minutes.
2. `ray start` runs in the foreground, its log and those of all its processes on stdout and stderr, until one of them ends.
3. It is started again, at once the first time and then less and less often.
4. SIGTERM and SIGINT end all of it. Processes that Ray leaves behind are reaped here, where this is the first of a container.

Workers need none of this to start: without it they have no `ray` transport (docs/ray.md). Never imports ray.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from kv_transfer.ray.head import RAY_ENV, check_temp_dir, head_flags, ray_start
from twostep.errors import SetupError
from twostep.process.ending import how_it_ended, oom_kills
from twostep.process.files import check_files
from twostep.process.log import setup_logging
from twostep.settings.ray_node import RayNodeSettings
from twostep.settings.reading import read_settings
from twostep.settings.table import Rule

log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.2
_CONNECT_S = 1.0
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 8.0
# A node that served for so long begins its next trouble with the first pause again.
_SETTLED_S = 30.0
_STOP_S = 15.0
_NUM_BELOW_WORKERS = 9
# A raylet's own processes take none of them, and two workers that are started again at once want eight.
_LEAST_WORKER_PORTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPorts:
    """Which TCP ports a node of Ray listens on, where they are to be known beforehand: behind a NetworkPolicy or a firewall.

        first + 0   object manager        raylets pull KV from each other here
        first + 1   node manager          the head's GCS, and the node's own processes
        first + 2   metrics               of Ray itself
        first + 3   dashboard agent, HTTP
        first + 4   dashboard agent, gRPC
        first + 5   runtime environments  the node's own raylet alone
        first + 9 … first + 8 + num_worker_ports      Ray's worker processes and drivers: two for each KV agent, its helper and its actor

    The last are taken at random and given back at their owner's end: there should be some more than are needed at once. Raises SetupError
    if they do not fit.
    """

    first: int = 11001
    num_worker_ports: int = 40

    def __post_init__(self) -> None:
        if self.num_worker_ports < _LEAST_WORKER_PORTS:
            raise SetupError(f"--ray-worker-ports {self.num_worker_ports} are too few; give at least {_LEAST_WORKER_PORTS}")
        if self.first < 1024 or self.last > 65535:
            raise SetupError(f"ports {self.first} to {self.last} are not within 1024 and 65535; give another --ray-first-port")

    @property
    def first_worker_port(self) -> int:
        return self.first + _NUM_BELOW_WORKERS

    @property
    def last(self) -> int:
        """The highest of them. A head's GCS and client server listen on ports of their own flags."""
        return self.first_worker_port + self.num_worker_ports - 1

    def flags(self) -> list[str]:
        """Returns those of `ray start`."""
        names = (
            "object-manager-port",
            "node-manager-port",
            "metrics-export-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
        )
        fixed = [f"--{name}={self.first + offset}" for offset, name in enumerate(names)]
        return [*fixed, f"--min-worker-port={self.first_worker_port}", f"--max-worker-port={self.last}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(RayNodeSettings):
    """The settings, and the password out of the file."""

    redis_password: str = field(default="", repr=False)

    @property
    def ports(self) -> RayPorts | None:
        """None: Ray takes any. Raises SetupError for ports that do not fit (the rules have looked)."""
        return RayPorts(first=self.ray_first_port, num_worker_ports=self.ray_worker_ports) if self.ray_first_port else None

    def _directory_wrong(self) -> str:
        try:
            check_temp_dir(self.ray_temp_dir)
        except SetupError as error:
            return f"--ray-temp-dir {error.message}"
        return ""

    def _ports_wrong(self) -> str:
        try:
            ports = self.ports
        except SetupError as error:
            return error.message
        heads = {"ray-address": int(self.ray_address.rpartition(":")[2]), "ray-client-port": self.ray_client_port} if self.ray_head else {}
        for name, port in heads.items():
            if ports is not None and ports.first <= port <= ports.last:
                return f"{{{name}}} is one of the ports from {{ray-first-port}} on, {ports.first} to {ports.last}; give another one"
        return "{ray-address} and {ray-client-port} are one port; give another one" if len(set(heads.values())) < len(heads) else ""

    RULES: ClassVar[tuple[Rule, ...]] = (Rule(_directory_wrong), Rule(_ports_wrong))

    def argv(self) -> list[str]:
        """Returns the command of `ray start`, whose log and those of all its processes are this process's."""
        where = self._head_flags() if self.ray_head else [f"--address={self.ray_address}"]
        where += ports.flags() if (ports := self.ports) else []
        return [
            *ray_start(where, node_ip=self.ray_node_ip, temp_dir=self.ray_temp_dir, store_bytes=self.ray_store_bytes),
            "--no-redirect-output",
        ]

    def _head_flags(self) -> list[str]:
        return [
            *head_flags(self.ray_address.rpartition(":")[2], self.ray_client_port),
            # For the Redis that RAY_REDIS_ADDRESS names. Ray does not take them from the environment.
            *([f"--redis-username={self.ray_redis_username}"] if self.ray_redis_username else []),
            *([f"--redis-password={self.redis_password}"] if self.redis_password else []),
        ]


def node_env(base: Mapping[str, str]) -> dict[str, str]:
    """Returns `base`, and what it does not say. Ray's own RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH, RAY_REDIS_ADDRESS (of a head) are there."""
    return {
        **RAY_ENV,
        # How long nodes, agents and their helpers go on while no GCS answers; Ray's own 60 s are less than a head may take to come back.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        "RAY_BACKEND_LOG_LEVEL": "warning",
        # Nothing collects Ray's own metrics here, and each process would complain of that every ten seconds.
        "RAY_enable_metrics_collection": "0",
        "RAY_enable_open_telemetry": "0",
        # Ray would count its neighbours' memory, and kill agents for it.
        "RAY_memory_monitor_refresh_ms": "0",
        **base,
    }


def parse_node(argv: Sequence[str] | None = None) -> NodeConfig:
    """Exits with a usage message if a flag does not make sense. Raises SetupError."""
    config = read_settings(
        NodeConfig, argv, prog="python -P -m kv_transfer.ray.node", description="One node of Ray, started again whenever it ends."
    )
    return replace(config, redis_password=_first_line(config.ray_redis_password_file))


def _first_line(path: Path | None) -> str:
    """Raises SetupError."""
    try:
        return (path.read_text().splitlines() or [""])[0].strip() if path is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read --ray-redis-password-file {path}: {error}; give a text file") from error


class RayNode:
    """run(), until `stop` is called, by a signal's handler or another thread."""

    def __init__(self, config: NodeConfig, env: Mapping[str, str]) -> None:
        self._config = config
        self._env = env
        self._stop_asked = False

    def stop(self) -> None:
        self._stop_asked = True

    def _stopped(self) -> bool:
        """Returns whether to stop, asked anew each time: a signal's handler may have changed it."""
        return self._stop_asked

    def run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopped():
            if not self._config.ray_head and not self._wait_for_head():
                break
            begin, kills = time.monotonic(), oom_kills()
            status = self._live()
            if self._stopped():
                break
            if time.monotonic() - begin >= _SETTLED_S:
                backoff_s = _FIRST_BACKOFF_S
            log.warning("Ray %s; it is started again in %g s", how_it_ended(status, oom_kills_before=kills), backoff_s)
            self._pause(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _wait_for_head(self) -> bool:
        """Returns False if it is to stop."""
        host, _, port = self._config.ray_address.rpartition(":")
        said = False
        while not self._stopped():
            try:
                with socket.create_connection((host, int(port)), timeout=_CONNECT_S):
                    return True
            except OSError as error:
                if not said:
                    log.warning("Ray's head does not answer at %s (%s); this node joins once it does", self._config.ray_address, error)
                    said = True
            self._pause(_POLL_S * 5)
        return False

    def _live(self) -> int:
        """Keeps Ray running from the start of `ray start` to its end, which `stop` brings about. Returns its exit status."""
        pid = os.posix_spawn(sys.executable, self._config.argv(), self._env)
        log.info("Ray's %s starts", "head" if self._config.ray_head else f"node of {self._config.ray_address}")
        kill_at: float | None = None
        while True:
            status = _reap(pid)
            if status is not None:
                return status
            if self._stopped() and kill_at is None:
                os.kill(pid, signal.SIGTERM)
                kill_at = time.monotonic() + _STOP_S
            if kill_at is not None and time.monotonic() > kill_at:
                os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopped() and time.monotonic() < until:
            time.sleep(_POLL_S)


def _reap(wanted: int) -> int | None:
    """Reaps every child that has ended; returns the exit status of `wanted` if it is among them (negative: the signal that ended it)."""
    found: int | None = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == wanted:
                found = os.waitstatus_to_exitcode(status)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after a signal, 2 if it cannot start."""
    try:
        config = parse_node(argv)
        setup_logging(level=config.log_level, json_lines=config.log_json, process="ray-head" if config.ray_head else "ray-node")
        check_files(config)
        try:
            config.ray_temp_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"cannot make --ray-temp-dir {config.ray_temp_dir}: {error.strerror}; give another one") from error
    except SetupError as error:
        sys.stderr.write(f"cannot start: {error.message}\n")
        return 2
    if _SHARED_MEMORY.is_dir() and (free := shutil.disk_usage(_SHARED_MEMORY).free) < config.ray_store_bytes:
        # The next life may find more: what an earlier one left is removed as that ends.
        log.warning(
            "--ray-store-bytes %d is more than %s has left, %d: Ray takes a disk instead, or does not start; make it larger, or give less",
            config.ray_store_bytes,
            _SHARED_MEMORY,
            free,
        )
    node = RayNode(config, node_env(os.environ))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stop())
    node.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
