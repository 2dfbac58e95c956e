"""Where others reach a worker."""

from __future__ import annotations

import socket

from twostep.errors import SetupError
from twostep.worker.config import WorkerConfig


def reachable_address(config: WorkerConfig, port: int) -> str:
    """host:port for others; `port`: the one it listens on."""
    host, _, given_port = config.advertise_address.rpartition(":")
    if host and given_port.isdecimal():
        return config.advertise_address
    host = config.advertise_address or config.host
    if host in ("0.0.0.0", "::"):
        try:
            host = socket.gethostbyname(socket.gethostname())
        except OSError as error:
            raise SetupError(f"--host {host} is no address that others can use; give --advertise-address") from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
