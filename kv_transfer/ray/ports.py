"""Which TCP ports a node of Ray listens on, where they are to be known beforehand: behind a NetworkPolicy or a firewall.

    first + 0   object manager        raylets pull KV from each other here
    first + 1   node manager          the head's GCS, and the node's own processes
    first + 2   metrics               of Ray itself
    first + 3   dashboard agent, HTTP
    first + 4   dashboard agent, gRPC
    first + 5   runtime environments  the node's own raylet alone
    first + 9 … first + 8 + num_worker_ports      Ray's worker processes and drivers: two for each KV agent, its helper and its actor

The last are taken at random and given back at their owner's end: there should be some more than are needed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from twostep.errors import SetupError

_NUM_BELOW_WORKERS = 9
# A raylet's own processes take none of them, and two workers that are started again at once want eight.
_LEAST_WORKER_PORTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPorts:
    """Raises SetupError if they do not fit."""

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
        """Nothing of the node listens above it, but the GCS and the client server of a head, whose ports are given apart."""
        return self.first_worker_port + self.num_worker_ports - 1

    def flags(self) -> list[str]:
        """Of `ray start`."""
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
