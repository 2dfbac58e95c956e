"""The autoscaler's configuration: parsed once, frozen."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from twostep.autoscaler.model import PolicyConfig, PoolConfig
from twostep.cluster.demand_flags import DEFAULT_TPOT_MS, DEFAULT_TTFT_MS, target_flags
from twostep.errors import InvalidRequest
from twostep.rpc.channel import PLAINTEXT, TlsFiles
from twostep.settings.flag_values import not_negative, seconds, share, whole
from twostep.settings.flags import FlagParser

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
DEFAULT_PORT = 50081
SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What the Deployment of one role may have and costs. `price` is that of a GPU-hour, in any currency that both pools share."""

    min_workers: int = 1
    max_workers: int = 8
    gpus_per_worker: int = 1
    price: float = 1.0
    cold_start: float = 60.0

    def policy(self) -> PoolConfig:
        return PoolConfig(
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            gpus_per_worker=self.gpus_per_worker,
            price_per_gpu_hour=self.price,
            cold_start_s=self.cold_start,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerConfig:
    """Everything an autoscaler can be told. Times are seconds. An empty `autoscaler_id` is drawn at start. `max_cost` (an hour),
    `max_workers` and `scale_to_zero_after` 0: there is none. `kubernetes_api` empty: no pod is marked."""

    redis_url: str = DEFAULT_REDIS_URL
    secret_file: Path | None = None
    autoscaler_id: str = ""
    host: str = "0.0.0.0"
    external_scaler_port: int = DEFAULT_PORT
    health_port: int | None = None
    metrics_port: int | None = None
    max_streams: int = 64
    redis_start_timeout: float = 10.0
    tls: TlsFiles = PLAINTEXT
    tls_client_auth: str = "require"
    interval: float = 15.0
    demand_window: float = 30.0
    leader_lease: float = 15.0
    stale_after: int = 4
    target_ttft_ms: float = DEFAULT_TTFT_MS
    target_tpot_ms: float = DEFAULT_TPOT_MS
    attainment: float = 0.95
    prefill: Pool = Pool()
    decode: Pool = Pool()
    max_cost: float = 0.0
    max_workers: int = 0
    spare: int = 1
    surge: int = 4
    cool_down: float = 180.0
    hysteresis: float = 0.35
    max_utilization: float = 0.9
    scale_to_zero_after: float = 0.0
    worker_drain: float = 30.0
    switch_roles: bool = True
    switch_time: float = 0.1
    hpa_tolerance: float = 0.1
    kubernetes_api: str = ""
    kubernetes_dir: Path = SERVICE_ACCOUNT_DIR
    pod_namespace: str = ""
    decision_log: Path | None = None
    log_level: str = "info"
    log_json: bool = False

    @property
    def front_tls(self) -> TlsFiles:
        """Of the port that KEDA comes to."""
        # With an authority alone there is nothing to serve TLS with, which is refused as ever.
        return self.tls if self.tls_client_auth == "require" or self.tls.cert is None else replace(self.tls, ca=None)

    def policy(self) -> PolicyConfig:
        """What of it the policy looks at. Raises InvalidRequest for numbers that contradict each other."""
        return PolicyConfig(
            prefill=self.prefill.policy(),
            decode=self.decode.policy(),
            ttft_ms=self.target_ttft_ms,
            tpot_ms=self.target_tpot_ms,
            attainment=self.attainment,
            interval_s=self.interval,
            window_s=self.demand_window,
            cool_down_s=self.cool_down,
            hysteresis=self.hysteresis,
            surge=self.surge,
            spare=self.spare,
            max_cost=self.max_cost or None,
            max_workers=self.max_workers or None,
            switching=self.switch_roles,
            switch_s=self.switch_time,
            drain_s=self.worker_drain,
            scale_to_zero_after_s=self.scale_to_zero_after,
            max_utilization=self.max_utilization,
        )


def parse_config(argv: Sequence[str] | None = None) -> AutoscalerConfig:
    """Exits with a usage message if a flag does not make sense."""
    parser = FlagParser(
        prog="python -P -m twostep.autoscaler", description="Twostep autoscaler: how many prefill and decode workers there should be."
    )
    default = AutoscalerConfig()
    _network_flags(parser, default)
    _policy_flags(parser, default)
    _kubernetes_flags(parser, default)
    parser.flag(
        "--decision-log",
        type=Path,
        default=None,
        metavar="FILE",
        help="write down what each decision saw and said, for `python -P -m twostep.autoscaler.replay FILE`; two files of 256 MiB at most",
    )
    parser.flag(
        "--log-level", default=default.log_level, choices=["debug", "info", "warning", "error"], help="least severe level that is logged"
    )
    parser.flag("--log-json", action="store_true", default=False, help="one JSON object a line")
    args = vars(parser.parse_args(argv))
    tls = TlsFiles(cert=args.pop("tls_cert"), key=args.pop("tls_key"), ca=args.pop("tls_ca"), peer_name=args.pop("tls_peer_name"))
    pools = {role: Pool(**{name: args.pop(f"{role}_{name}") for name in _POOL_FIELDS}) for role in ("prefill", "decode")}
    config = AutoscalerConfig(tls=tls, prefill=pools["prefill"], decode=pools["decode"], **args)
    if config.scale_to_zero_after and (config.prefill.min_workers or config.decode.min_workers):
        parser.error("--scale-to-zero-after needs --prefill-min-workers 0 and --decode-min-workers 0")
    for role, pool in pools.items():
        if pool.max_workers < pool.min_workers:
            parser.error(f"--{role}-max-workers {pool.max_workers} is less than --{role}-min-workers {pool.min_workers}; raise it")
    try:
        config.policy()
    except InvalidRequest as error:
        parser.error(error.message)
    return config


_POOL_FIELDS = ("min_workers", "max_workers", "gpus_per_worker", "price", "cold_start")


def _network_flags(parser: FlagParser, default: AutoscalerConfig) -> None:
    parser.flag("--redis-url", default=default.redis_url, help="where workers and routers say what they do")
    parser.flag("--secret-file", type=Path, default=None, help="deployment secret, the same file on every process")
    parser.flag("--autoscaler-id", default="", help="unique name of this replica; drawn at start if not given")
    parser.flag("--host", default=default.host, help="address to listen on")
    parser.flag(
        "--external-scaler-port",
        type=whole(0, 65535),
        default=default.external_scaler_port,
        help="gRPC port that KEDA asks, 0 for any free one",
    )
    parser.flag(
        "--health-port",
        type=whole(-1, 65535),
        default=None,
        help="plaintext health-only port; --external-scaler-port + 1 if not given, -1 for none",
    )
    parser.flag(
        "--metrics-port",
        type=whole(-1, 65535),
        default=None,
        help="plaintext HTTP, GET /metrics; --external-scaler-port + 2 if not given, -1 for none",
    )
    parser.flag("--max-streams", type=whole(1, 4096), default=default.max_streams, help="callers of StreamIsActive at once")
    parser.flag("--redis-start-timeout", type=seconds(), default=default.redis_start_timeout, help="how long to wait for Redis at start")
    parser.flag("--tls-cert", type=Path, default=None, help="PEM certificate; with --tls-key it switches TLS on")
    parser.flag("--tls-key", type=Path, default=None, help="PEM key of --tls-cert")
    parser.flag("--tls-ca", type=Path, default=None, help="PEM authority that peers must be certified by: KEDA, and the workers")
    parser.flag(
        "--tls-peer-name",
        default="",
        help="name that workers' certificates must have, whatever address they are reached at; the address itself if not given",
    )
    parser.flag(
        "--tls-client-auth",
        default=default.tls_client_auth,
        choices=["require", "none"],
        help="whether KEDA needs a certificate of --tls-ca; workers need one in any case",
    )


def _policy_flags(parser: FlagParser, default: AutoscalerConfig) -> None:
    parser.flag("--interval", type=seconds(), default=default.interval, help="seconds between two decisions")
    parser.flag("--demand-window", type=seconds(1.0, 120.0), default=default.demand_window, help="seconds over which the load is averaged")
    parser.flag(
        "--leader-lease",
        type=seconds(),
        default=default.leader_lease,
        help="seconds after which another replica may lead, if the leader is not heard of",
    )
    parser.flag(
        "--stale-after",
        type=whole(2, 1000),
        default=default.stale_after,
        help="intervals after which a decision is no answer any more: UNAVAILABLE, for which KEDA keeps what there is",
    )
    target_flags(parser)
    parser.flag("--attainment", type=share, default=default.attainment, help="share of answers that are to keep the targets")
    for role in ("prefill", "decode"):
        pool: Pool = getattr(default, role)
        parser.flag(f"--{role}-min-workers", type=whole(0, 10_000), default=pool.min_workers, help=f"fewest pods of the {role} Deployment")
        parser.flag(f"--{role}-max-workers", type=whole(1, 10_000), default=pool.max_workers, help="most of them")
        parser.flag(f"--{role}-gpus-per-worker", type=whole(1, 64), default=pool.gpus_per_worker, help="GPUs that one of them has")
        parser.flag(f"--{role}-price", type=not_negative, default=pool.price, help="what one of its GPUs costs an hour")
        parser.flag(f"--{role}-cold-start", type=not_negative, default=pool.cold_start, help="seconds until a new one serves")
    parser.flag("--max-cost", type=not_negative, default=default.max_cost, help="most that all workers may cost an hour; 0: no bound")
    parser.flag(
        "--max-workers", type=whole(0, 20_000), default=default.max_workers, help="most workers of both roles together; 0: no bound"
    )
    parser.flag("--spare", type=whole(0, 10_000), default=default.spare, help="workers that may be lost at once without a target missed")
    parser.flag(
        "--surge", type=whole(1, 10_000), default=default.surge, help="workers that one decision adds, takes away or switches at most"
    )
    parser.flag("--hysteresis", type=not_negative, default=default.hysteresis, help="what is kept must carry so much more load, as a share")
    parser.flag(
        "--max-utilization",
        type=share,
        default=default.max_utilization,
        help="share of a worker's time, seats and blocks that is planned for",
    )
    parser.flag(
        "--cool-down", type=not_negative, default=default.cool_down, help="seconds of less load before workers go, and between two turns"
    )
    parser.flag(
        "--scale-to-zero-after",
        type=not_negative,
        default=default.scale_to_zero_after,
        help="seconds without a request after which no worker is kept; 0: never",
    )
    parser.flag(
        "--worker-drain",
        type=not_negative,
        default=default.worker_drain,
        help="seconds that a worker's requests may go on for when it changes its role or goes; the workers' own --drain-timeout",
    )
    parser.flag(
        "--switch-roles",
        action=argparse.BooleanOptionalAction,
        default=default.switch_roles,
        help="let workers take the other role where that is quicker than a new pod",
    )
    parser.flag("--switch-time", type=not_negative, default=default.switch_time, help="seconds that it takes, beside the drain")


def _kubernetes_flags(parser: FlagParser, default: AutoscalerConfig) -> None:
    parser.flag(
        "--hpa-tolerance",
        type=_tolerance,
        default=default.hpa_tolerance,
        help="share of a change that the HorizontalPodAutoscaler lets pass: 0.1 unless its `behavior` or the cluster says otherwise",
    )
    parser.flag(
        "--kubernetes-api",
        default=_in_cluster(),
        metavar="URL",
        type=_api,
        help="mark pods that should go first there; if not given, the cluster's that this process runs in; none: nowhere",
    )
    parser.flag(
        "--kubernetes-dir",
        type=Path,
        default=default.kubernetes_dir,
        metavar="DIR",
        help="token, ca.crt and namespace of the service account",
    )
    parser.flag("--pod-namespace", default="", help="namespace of the workers' pods; if not given, the service account's")


def _in_cluster() -> str:
    """As Kubernetes tells every pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


def _api(text: str) -> str:
    if text in ("", "none"):
        return ""
    if not text.startswith(("https://", "http://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL; give one such as https://10.0.0.1:443, or none")
    return text.rstrip("/")


def _tolerance(text: str) -> float:
    value = not_negative(text)
    if value > 0.5:
        raise argparse.ArgumentTypeError(f"{text} is too much; give a share from 0 to 0.5")
    return value
