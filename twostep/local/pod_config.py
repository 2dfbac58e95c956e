"""What the workers of one pod are (twostep.local.pod): how many, and where each is.

worker i, prefill first:   gRPC first + 10 i   health + 1   metrics + 2   GPUs from i * gpus per worker
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from twostep.settings.flag_values import seconds, whole
from twostep.settings.flags import FlagParser

PORTS_EACH = 10
_MOST_WORKERS = 16

WorkerFlags = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodConfig:
    """Times in seconds. `gpus_per_worker` 0: they run where their own --device says."""

    prefill_workers: int = 1
    decode_workers: int = 1
    gpus_per_worker: int = 1
    prefill_flags: WorkerFlags = ()
    decode_flags: WorkerFlags = ()
    pod_name: str = "pod"
    host: str = "0.0.0.0"
    first_port: int = 50101
    pod_health_port: int = 50100
    drain_timeout: float = 30.0
    start_timeout: float = 600.0
    log_level: str = "info"
    log_json: bool = False


@dataclass(frozen=True, slots=True)
class PodWorker:
    """One worker's process: the rest of its flags are the environment's."""

    name: str
    role: str
    port: int
    flags: WorkerFlags

    @property
    def health_address(self) -> str:
        return f"127.0.0.1:{self.port + 1}"

    @property
    def argv(self) -> tuple[str, ...]:
        where = (f"--port={self.port}", f"--health-port={self.port + 1}", f"--metrics-port={self.port + 2}", f"--worker-id={self.name}")
        return (sys.executable, "-P", "-m", f"{self.role}_worker", *where, *self.flags)


def pod_workers(config: PodConfig) -> list[PodWorker]:
    """Prefill workers first, then decode workers."""
    roles = [("prefill", i) for i in range(config.prefill_workers)] + [("decode", i) for i in range(config.decode_workers)]
    workers = []
    for index, (role, number) in enumerate(roles):
        flags = config.prefill_flags if role == "prefill" else config.decode_flags
        if config.gpus_per_worker:
            flags = (f"--device=cuda:{index * config.gpus_per_worker}", *flags)
        if config.gpus_per_worker > 1:
            flags = (f"--tensor-parallel-size={config.gpus_per_worker}", *flags)
        name = f"{config.pod_name}-{role}-{number}"
        workers.append(PodWorker(name, role, config.first_port + index * PORTS_EACH, flags))
    return workers


def parse_pod(argv: Sequence[str] | None = None) -> PodConfig:
    """Exits with a usage message if a flag does not make sense."""
    default = PodConfig()
    parser = FlagParser(prog="python -P -m twostep.local.pod", description="Several workers as processes of one container.")
    parser.flag("--prefill-workers", type=whole(0, _MOST_WORKERS), default=default.prefill_workers, help="prefill workers")
    parser.flag("--decode-workers", type=whole(1, _MOST_WORKERS), default=default.decode_workers, help="decode workers")
    parser.flag(
        "--gpus-per-worker",
        type=whole(0, 64),
        default=default.gpus_per_worker,
        help="GPUs of each, one worker's after the other's; more than 1: one model cut over them; 0: as --device of the workers says",
    )
    parser.flag(
        "--prefill-flags",
        type=worker_flags,
        default=default.prefill_flags,
        metavar="JSON",
        help='flags of prefill workers only, as in {"max-num-seqs": 64}',
    )
    parser.flag("--decode-flags", type=worker_flags, default=default.decode_flags, metavar="JSON", help="flags of decode workers only")
    parser.flag("--pod-name", default=default.pod_name, help="what the workers' names begin with")
    parser.flag("--host", default=default.host, help="address of --pod-health-port")
    parser.flag(
        "--first-port", type=whole(1, 65000), default=default.first_port, help="gRPC port of the first worker; the next one's is 10 up"
    )
    parser.flag("--pod-health-port", type=whole(1, 65535), default=default.pod_health_port, help="plaintext gRPC health of all of them")
    parser.flag("--drain-timeout", type=seconds(), default=default.drain_timeout, help="time for running requests to end after SIGTERM")
    parser.flag("--start-timeout", type=seconds(), default=default.start_timeout, help="how long a worker may take until it is ready")
    parser.flag(
        "--log-level", default=default.log_level, choices=["debug", "info", "warning", "error"], help="least severe level that is logged"
    )
    parser.flag("--log-json", action="store_true", default=False, help="one JSON object a line")
    return PodConfig(**vars(parser.parse_args(argv)))


def worker_flags(text: str) -> WorkerFlags:
    """Type of --prefill-flags: a JSON object of flags without their dashes; true and false switch a flag on and off."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object; give one like {{"max-num-seqs": 64}}')
    return tuple(
        f"--{name}" if value is True else f"--no-{name}" if value is False else f"--{name}={value}" for name, value in given.items()
    )
