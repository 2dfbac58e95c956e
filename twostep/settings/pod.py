"""Settings of the process that runs several workers in one container (twostep/local/pod.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from twostep.settings.readers import SECONDS, Whole, worker_flags
from twostep.settings.service import LogSettings
from twostep.settings.table import Rule, setting

_MOST_WORKERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings(LogSettings):
    """Holds what it may be told; times in seconds. Everything else in its environment is the workers'."""

    # From one worker's gRPC port to the next one's.
    PORTS_EACH: ClassVar[int] = 10

    prefill: int = setting(1, "prefill workers", Whole(0, _MOST_WORKERS))
    decode: int = setting(1, "decode workers", Whole(1, _MOST_WORKERS))
    gpus_per_worker: int = setting(
        1,
        "GPUs of each, one worker's after the other's; more than 1: one model cut over them; 0: as --device of the workers says",
        Whole(0, 64),
    )
    prefill_flags: tuple[str, ...] = setting((), 'flags of prefill workers only, as in {"max-num-seqs": 64}', worker_flags, metavar="JSON")
    decode_flags: tuple[str, ...] = setting((), "flags of decode workers only", worker_flags, metavar="JSON")
    pod_name: str = setting("pod", "what the workers' names begin with")
    host: str = setting("0.0.0.0", "address of --health-port")
    grpc_port: int = setting(50101, "gRPC port of the first worker; the next one's is 10 up", Whole(1, 65000))
    health_port: int = setting(50100, "plaintext gRPC health of all of them", Whole(1, 65535))
    drain_timeout: float = setting(30.0, "time for running requests to end after SIGTERM", SECONDS)
    start_timeout: float = setting(600.0, "how long a worker may take until it is ready", SECONDS)

    @property
    def last_port(self) -> int:
        return self.grpc_port + (self.prefill + self.decode) * self.PORTS_EACH - 1

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda pod: pod.grpc_port <= pod.health_port <= pod.last_port,
            "{health-port} is among the workers' ports from {grpc-port} on; give another one",
        ),
    )
