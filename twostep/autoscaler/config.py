"""The autoscaler's configuration: parsed once, frozen."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from twostep.autoscaler.model import PolicyConfig, PoolConfig
from twostep.errors import InvalidRequest
from twostep.settings.autoscaler import AutoscalerSettings, PoolSettings
from twostep.settings.reading import read_settings
from twostep.settings.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerConfig(AutoscalerSettings):
    """The settings, and what never changes. Times are seconds. An empty `autoscaler_id` is drawn at start. `kubernetes_api` empty: no pod
    is marked."""

    # Seconds after which another replica may lead, if the leader is not heard of: long enough for a pause of its machine, and short beside
    # what a new worker takes to start.
    leader_lease: float = 15.0
    # Callers of StreamIsActive at once: KEDA has one for each ScaledObject.
    max_streams: int = 64
    # Share of a worker's time, seats and blocks that is planned for: what the model of a worker cannot see has the rest.
    max_utilization: float = 0.9
    # Seconds that a change of role takes, beside the drain, as measured (docs/roles.md).
    switch_time: float = 0.1
    # Where Kubernetes puts token, ca.crt and namespace of the service account.
    kubernetes_dir: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")

    @property
    def front_tls(self) -> TlsFiles:
        """Returns the files of the port that KEDA comes to."""
        # With an authority alone there is nothing to serve TLS with, which is refused as ever.
        return self.tls if self.tls_client_auth == "require" or self.tls.cert is None else replace(self.tls, ca=None)

    def policy(self) -> PolicyConfig:
        """Returns what the policy looks at. Raises InvalidRequest for numbers that contradict each other."""
        return PolicyConfig(
            prefill=_pool(self.prefill),
            decode=_pool(self.decode),
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

    def contradiction(self) -> str:
        if self.scale_to_zero_after and (self.prefill.min_workers or self.decode.min_workers):
            return "--scale-to-zero-after needs --prefill-min-workers 0 and --decode-min-workers 0"
        for role, pool in (("prefill", self.prefill), ("decode", self.decode)):
            if pool.max_workers < pool.min_workers:
                return f"--{role}-max-workers {pool.max_workers} is less than --{role}-min-workers {pool.min_workers}; raise it"
        try:
            self.policy()
        except InvalidRequest as error:
            return error.message
        return ""


def parse_config(argv: Sequence[str] | None = None) -> AutoscalerConfig:
    """Exits with a usage message if a flag does not make sense."""
    return read_settings(
        AutoscalerConfig,
        argv,
        prog="python -P -m twostep.autoscaler",
        description="Twostep autoscaler: how many prefill and decode workers there should be.",
        defaults={"kubernetes_api": _in_cluster(os.environ)},
    )


def _pool(pool: PoolSettings) -> PoolConfig:
    return PoolConfig(
        min_workers=pool.min_workers,
        max_workers=pool.max_workers,
        gpus_per_worker=pool.gpus_per_worker,
        price_per_gpu_hour=pool.price,
        cold_start_s=pool.cold_start,
    )


def _in_cluster(environ: Mapping[str, str]) -> str:
    """Returns the API's URL as Kubernetes tells every pod; empty outside."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""
