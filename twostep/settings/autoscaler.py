"""Settings of autoscalers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twostep.settings.readers import MILLISECONDS, NOT_NEGATIVE, PORT, SECONDS, SHARE, Number, Whole, kubernetes_api
from twostep.settings.router import RouterSettings
from twostep.settings.service import ServiceSettings
from twostep.settings.table import FileKind, Settings, group, setting, settings_of

DEFAULT_PORT = 50081
_TARGETS = {each.name: each for each in settings_of(RouterSettings) if each.name.startswith("target-")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings(Settings):
    """Says what the Deployment of one role may have and costs. `price` is that of a GPU-hour, in any currency that both pools share."""

    min_workers: int = setting(1, "fewest pods of the {group} Deployment", Whole(0, 10_000))
    max_workers: int = setting(8, "most of them", Whole(1, 10_000))
    gpus_per_worker: int = setting(1, "GPUs that one of them has", Whole(1, 64))
    price: float = setting(1.0, "what one of its GPUs costs an hour", NOT_NEGATIVE)
    cold_start: float = setting(60.0, "seconds until a new one serves", NOT_NEGATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerSettings(ServiceSettings):
    """Holds what an autoscaler may be told; times in seconds. 0: there is no such bound."""

    autoscaler_id: str = setting("", "unique name of this replica; drawn at start if not given")
    grpc_port: int = setting(DEFAULT_PORT, "gRPC port that KEDA asks, 0 for any free one", PORT)
    redis_start_timeout: float = setting(10.0, "how long to wait for Redis at start", SECONDS)
    tls_client_auth: str = setting(
        "require", "whether KEDA needs a certificate of --tls-ca; workers need one in any case", choices=("require", "none")
    )
    interval: float = setting(15.0, "seconds between two decisions", SECONDS)
    demand_window: float = setting(30.0, "seconds over which the load is averaged", Number(1, 120, unit="seconds"))
    stale_after: int = setting(
        4, "intervals after which a decision is no answer any more: UNAVAILABLE, for which KEDA keeps what there is", Whole(2, 1000)
    )
    target_ttft_ms: float = setting(_TARGETS["target-ttft-ms"].default, _TARGETS["target-ttft-ms"].help, MILLISECONDS)
    target_tpot_ms: float = setting(_TARGETS["target-tpot-ms"].default, _TARGETS["target-tpot-ms"].help, MILLISECONDS)
    attainment: float = setting(0.95, "share of answers that are to keep the targets", SHARE)
    prefill: PoolSettings = group(PoolSettings())
    decode: PoolSettings = group(PoolSettings())
    max_cost: float = setting(0.0, "most that all workers may cost an hour; 0: no bound", NOT_NEGATIVE)
    max_workers: int = setting(0, "most workers of both roles together; 0: no bound", Whole(0, 20_000))
    spare: int = setting(1, "workers that may be lost at once without a target missed", Whole(0, 10_000))
    surge: int = setting(4, "workers that one decision adds, takes away or switches at most", Whole(1, 10_000))
    hysteresis: float = setting(0.35, "what is kept must carry so much more load, as a share", NOT_NEGATIVE)
    cool_down: float = setting(180.0, "seconds of less load before workers go, and between two turns", NOT_NEGATIVE)
    scale_to_zero_after: float = setting(0.0, "seconds without a request after which no worker is kept; 0: never", NOT_NEGATIVE)
    worker_drain: float = setting(
        30.0,
        "seconds that a worker's requests may go on for when it changes its role or goes; the workers' own --drain-timeout",
        NOT_NEGATIVE,
    )
    switch_roles: bool = setting(True, "let workers take the other role where that is quicker than a new pod")
    hpa_tolerance: float = setting(
        0.1,
        "share of a change that the HorizontalPodAutoscaler lets pass: 0.1 unless its `behavior` or the cluster says otherwise",
        Number(0, 0.5),
    )
    kubernetes_api: str = setting(
        "",
        "mark pods that should go first there; if not given, the cluster's that this process runs in; none: nowhere",
        kubernetes_api,
        metavar="URL",
    )
    pod_namespace: str = setting("", "namespace of the workers' pods; if not given, the service account's")
    decision_log: Path | None = setting(
        None,
        "write down what each decision saw and said, for `python -P -m twostep.autoscaler.replay FILE`; two files of 256 MiB at most",
        metavar="FILE",
        file=FileKind.WRITTEN,
    )
