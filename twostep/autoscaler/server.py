"""An autoscaler as one object: everything it is made of, started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from twostep.autoscaler.collect import LOOK_AGAIN_S, ObservationCollector
from twostep.autoscaler.config import AutoscalerConfig
from twostep.autoscaler.controller import Controller, Policy
from twostep.autoscaler.decision_log import DecisionLog
from twostep.autoscaler.external_scaler import DecisionBoard, ExternalScaler
from twostep.autoscaler.fleet import Fleet
from twostep.autoscaler.leadership import Leadership
from twostep.autoscaler.model import ROLES, Role
from twostep.autoscaler.pods import PodMarks
from twostep.autoscaler.policy import decide
from twostep.autoscaler.switches import Outcome, Switcher
from twostep.cluster.cancellation import end_if_cancelled
from twostep.cluster.connection import connect, wait_for_redis
from twostep.cluster.records import WorkerRecord
from twostep.cluster.signed import DECISIONS, Signer
from twostep.keys.secret import load_secret, secret_check
from twostep.metrics.autoscaler import AutoscalerMetrics
from twostep.metrics.process import register_process
from twostep.metrics.registry import MetricsRegistry
from twostep.metrics.server import MetricsServer
from twostep.rpc.health import READINESS
from twostep.rpc.keda import externalscaler_pb2_grpc
from twostep.rpc.server import GrpcServer, ServerConfig

log = logging.getLogger(__name__)

SERVICE = "externalscaler.ExternalScaler"
# A loop that has not come round for so long beyond its interval is stuck: liveness fails and the process is restarted. One round may wait
# for Redis, for workers that seem to be gone, and for the API server.
_STUCK_S = 30.0


class Autoscaler:
    """start(), then drain(). Constructing it reads the secret, and raises SetupError for what cannot be."""

    def __init__(
        self,
        config: AutoscalerConfig,
        *,
        clock: Callable[[], float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        look_again_s: float = LOOK_AGAIN_S,
        policy: Policy = decide,
    ) -> None:
        """Needs a running event loop. `clock`: instead of Redis' own, seconds since 1970; `monotonic`: that leases and decisions age by."""
        self.config = config
        secret = load_secret(config.secret_file, former=config.former_secret_file)
        settings = config.policy()
        self.autoscaler_id = config.autoscaler_id or f"autoscaler-{uuid.uuid4().hex[:12]}"
        self._redis = connect(config.redis_url)
        self.leadership = Leadership(self._redis, self.autoscaler_id, Signer(secret, DECISIONS), ttl_s=config.leader_lease, clock=monotonic)
        self._fleet = Fleet(secret_check(secret), {role: settings.pool(role).cold_start_s for role in ROLES})
        self.board = DecisionBoard(stale_s=config.stale_after * config.interval, max_listeners=config.max_streams, clock=monotonic)
        self._switcher = Switcher(
            secret, drain_s=config.worker_drain, tls=config.tls, on_result=self._on_switch, may=lambda: self.leadership.held
        )
        self._decisions = None if config.decision_log is None else DecisionLog(config.decision_log, settings)
        registry = MetricsRegistry()
        register_process(registry, "autoscaler")
        self.metrics = AutoscalerMetrics(registry, lambda: self.controller.samples())
        self.controller = Controller(
            settings,
            self.metrics,
            name=self.autoscaler_id,
            leadership=self.leadership,
            collector=ObservationCollector(
                self._redis, self._fleet, secret, span_s=config.demand_window, clock=clock, look_again_s=look_again_s
            ),
            board=self.board,
            switcher=self._switcher,
            marks=PodMarks(config.kubernetes_api, config.kubernetes_dir, namespace=config.pod_namespace) if config.kubernetes_api else None,
            decisions=self._decisions,
            hpa_tolerance=config.hpa_tolerance,
            policy=policy,
            # Ready once it has looked at Redis; from then on, since it says itself where it does not know.
            looked=lambda: self._server.health.set(READINESS, True),
        )
        self._metrics_server = MetricsServer.beside(registry, host=config.host, port=config.grpc_port, metrics_port=config.metrics_port)
        self._server = GrpcServer(
            ServerConfig(
                host=config.host,
                port=config.grpc_port,
                health_port=config.health_port,
                tls=config.front_tls,
                max_message_bytes=1 << 20,
                max_concurrent_rpcs=config.max_streams + 64,
            ),
            alive=self._alive,
        )
        scaler = ExternalScaler(self.board, hpa_tolerance=config.hpa_tolerance)
        self._server.add(scaler, externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server, SERVICE)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def health_port(self) -> int:
        return self._server.health_port

    @property
    def metrics_port(self) -> int:
        """0: no metrics are served."""
        return 0 if self._metrics_server is None else self._metrics_server.port

    async def start(self) -> None:
        """Returns once it listens; whether it leads is up to the lease. Raises SetupError: no Redis, port taken."""
        try:
            if self._metrics_server is not None:
                self._metrics_server.start()
            await wait_for_redis(self._redis, self.config.redis_start_timeout)
            await self.leadership.renew()
            await self._server.start()
        except BaseException:
            await self.leadership.release()
            await self._close()
            raise
        self._tasks = [asyncio.create_task(work) for work in (self.controller.run(), self._renew())]
        for task in self._tasks:
            task.add_done_callback(_tell_end)
        log.info("autoscaler %s listens on %s:%d", self.autoscaler_id, self.config.host, self.port)

    async def drain(self, grace_s: float) -> None:
        """Stops deciding, hands the lease back, and lets calls end for `grace_s`."""
        self._server.health.set(READINESS, False)
        await self._stop_tasks()
        await self.leadership.release()
        self.board.close()
        await self._server.drain(grace_s)
        await self._close()

    async def _close(self) -> None:
        await self._stop_tasks()
        await self._switcher.close()
        await self._redis.aclose()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
        if self._decisions is not None:
            self._decisions.close()

    async def _stop_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _alive(self) -> bool:
        # A task that has ended by itself is a bug; a restart mends it.
        return (
            not any(task.done() for task in self._tasks)
            and time.monotonic() - self.controller.progress_at < self.config.interval + _STUCK_S
        )

    def _on_switch(self, record: WorkerRecord, to: Role, outcome: Outcome) -> None:
        self.metrics.switches.labels(outcome).inc()
        if outcome == "refused":
            self._fleet.would_not_switch(record)

    async def _renew(self) -> None:
        while True:
            held = self.leadership.held
            if await self.leadership.renew() and not held:
                self.controller.wake()
            end_if_cancelled()
            await asyncio.sleep(self.leadership.renew_every_s)


def _tell_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        log.error("a task that keeps the autoscaler going has ended; restart the autoscaler", exc_info=task.exception())
