"""Settings of `twostep up` and `twostep demo`: what they settle for a whole system. All others of router, workers and autoscaler are passed
on to them (FORWARDED)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from twostep.settings.autoscaler import AutoscalerSettings
from twostep.settings.ray_node import MIN_OBJECT_STORE_BYTES
from twostep.settings.readers import PORT, SECONDS, Whole, host_and_port
from twostep.settings.router import DEFAULT_GRPC_PORT, DEFAULT_PORT, RouterSettings
from twostep.settings.service import MODEL_REVISION
from twostep.settings.table import FileKind, SettingRow, Settings, setting, settings_of
from twostep.settings.worker import WorkerSettings

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings(Settings):
    """Holds what `twostep up` may be told besides; times in seconds. An empty address: one is started here."""

    model: str = setting(DEFAULT_MODEL, "a model directory, ORG/NAME of the Hugging Face hub, or a known name", metavar="DIR|NAME")
    model_revision: str = setting("", MODEL_REVISION, metavar="REV")
    prefill: int | None = setting(None, "prefill workers; 1 if not given, none with --aggregated", Whole(0, 1 << 20), metavar="N")
    decode: int = setting(1, "decode workers, with --aggregated those that do everything", Whole(0, 1 << 20), metavar="M")
    aggregated: bool = setting(
        False, "no prefill workers and no Ray: decode workers serve whole requests, prompts in chunks between the others' tokens"
    )
    autoscale: bool = setting(
        False,
        "start and stop workers as the load asks for it, --prefill and --decode being those of the start, between --prefill-min-workers "
        "and --prefill-max-workers and the same of decode; what this machine has room for if not given (docs/autoscaling.md)",
    )
    host: str = setting("127.0.0.1", "address the router listens on")
    port: int = setting(DEFAULT_PORT, "the router's HTTP port: OpenAI's API and the page; 0 for any free one", PORT)
    grpc_port: int | None = setting(None, f"the router's gRPC port; {DEFAULT_GRPC_PORT} if not given, any free one if --port is 0", PORT)
    redis_url: str = setting("", "use this Redis instead of starting one", metavar="URL")
    ray_address: str = setting("", "join this Ray instead of starting one", host_and_port, metavar="HOST:PORT")
    ray_store_bytes: int = setting(
        0,
        "shared memory KV caches travel through; 0: an eighth of the memory",
        Whole(MIN_OBJECT_STORE_BYTES, 1 << 50, or_zero=True),
        metavar="BYTES",
    )
    batch_dir: Path | None = setting(
        None, "keep files and batches here; without it they go with the system", metavar="DIR", file=FileKind.FOLDER
    )
    start_timeout: float = setting(180.0, "how long the start may take", SECONDS)
    drain_timeout: float = setting(30.0, "time for running requests at the stop", SECONDS)
    overcommit: bool = setting(False, "start more workers than this machine has cores for")
    verbose: bool = setting(False, "show the processes' logs")

    @property
    def wanted_grpc_port(self) -> int:
        """0: any free one."""
        return self.grpc_port if self.grpc_port is not None else DEFAULT_GRPC_PORT if self.port else 0


# What `up` settles for every process, or what is meant for a client of another system: wrong for all processes of this one alike.
_SETTLED = frozenset((
    "tls-ca", "tls-cert", "tls-key", "tls-peer-name", "tls-client-auth", "advertise-address", "router-id", "worker-id", "autoscaler-id",
    "run-dir", "secret-file", "health-port", "metrics-port", "pod-name", "pod-namespace", "pod-owner",
    "kv-budget-bytes", "kubernetes-api", "hpa-tolerance", "worker-drain", "max-workers", "prefill-gpus-per-worker",
    "decode-gpus-per-worker",
))  # fmt: skip


def _forwarded(own: Iterable[SettingRow]) -> dict[str, tuple[SettingRow, ...]]:
    seen = {each.name for each in own} | _SETTLED
    found = {}
    for title, table in (("workers", WorkerSettings), ("the router", RouterSettings), ("the autoscaler", AutoscalerSettings)):
        found[title] = tuple(each for each in settings_of(table) if each.name not in seen)
        seen |= {each.name for each in found[title]}
    return found


# By whose they are. What several processes have is given to all of them.
FORWARDED = _forwarded(settings_of(UpSettings))
# Everything that `up` takes.
ALL = (*settings_of(UpSettings), *(each for settings in FORWARDED.values() for each in settings))
