"""Settles the workers of one pod (twostep.local.pod): how many, and where each is.

worker i, prefill first:   gRPC first + 10 i   health + 1   metrics + 2   GPUs from i * gpus per worker
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from twostep.settings.pod import PodSettings
from twostep.settings.reading import read_settings

PORTS_EACH = 10


@dataclass(frozen=True, slots=True)
class PodWorker:
    """One worker's process: the rest of its flags are the environment's."""

    name: str
    role: str
    port: int
    flags: tuple[str, ...]

    @property
    def health_address(self) -> str:
        return f"127.0.0.1:{self.port + 1}"

    @property
    def argv(self) -> tuple[str, ...]:
        where = (f"--port={self.port}", f"--health-port={self.port + 1}", f"--metrics-port={self.port + 2}", f"--worker-id={self.name}")
        return (sys.executable, "-P", "-m", f"{self.role}_worker", *where, *self.flags)


def pod_workers(config: PodSettings) -> list[PodWorker]:
    """Prefill workers first, then decode workers."""
    roles = [("prefill", i) for i in range(config.prefill)] + [("decode", i) for i in range(config.decode)]
    workers = []
    for index, (role, number) in enumerate(roles):
        flags = config.prefill_flags if role == "prefill" else config.decode_flags
        if config.gpus_per_worker:
            flags = (f"--device=cuda:{index * config.gpus_per_worker}", *flags)
        if config.gpus_per_worker > 1:
            flags = (f"--tensor-parallel-size={config.gpus_per_worker}", *flags)
        name = f"{config.pod_name}-{role}-{number}"
        workers.append(PodWorker(name, role, config.port + index * PORTS_EACH, flags))
    return workers


def parse_pod(argv: Sequence[str] | None = None) -> PodSettings:
    """Exits with a usage message if a flag does not make sense."""
    return read_settings(
        PodSettings, argv, prog="python -P -m twostep.local.pod", description="Several workers as processes of one container."
    )
