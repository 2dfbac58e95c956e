"""One worker of either role: engine, edge, server and registration, started and stopped in order.

start   engine thread · edge (KV transport) · server listens · transport answers · registered · ready
stop    not ready · deregistered · no new work · what runs ends, or is failed at the drain timeout · edge frees · server and engine stop
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable

from twostep.cluster.records import WorkerLoad, WorkerRecord
from twostep.cluster.registration import Registration
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.preemption import PreemptionMode
from twostep.engine.types import StepOutput
from twostep.errors import SetupError, Unavailable
from twostep.prefix import secret_check
from twostep.rpc.health import READINESS
from twostep.rpc.server import GrpcServer, ServerConfig
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.worker.config import WorkerConfig
from twostep.worker.edge import Edge, EdgeParts
from twostep.worker.engine_loop import EngineLoop
from twostep.worker.model import ServedModel
from twostep.worker.requests import RequestReader
from twostep.worker.stats import WorkerService
from twostep.worker.telemetry import Telemetry

log = logging.getLogger(__name__)

_POLL_S = 0.05
# For routers to read how their requests ended, and for calls to return.
_GOODBYE_S = 2.0


class Worker:
    def __init__(self, config: WorkerConfig, model: ServedModel, secret: bytes, make_edge: Callable[[EdgeParts], Edge]) -> None:
        """Needs a running event loop. Raises SetupError."""
        self.config = config
        self.epoch = time.time_ns() // 1000
        self.worker_id = config.worker_id or f"{config.role}-{socket.gethostname()}-{config.port or os.getpid()}"
        self.address = ""
        shape = model.runner.kv_shape
        # What is held for a hand-over never gives way: a prefill worker swaps nothing.
        swap_bytes = min(int(config.swap_space * 2**30), shape.num_blocks * shape.block_bytes) if config.role == "decode" else 0
        self.engine = Engine(
            model.runner,
            EngineConfig(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                max_waiting=config.max_waiting,
                hash_unit=config.hash_unit,
                preemption_mode=PreemptionMode(config.preemption_mode),
                swap_bytes=swap_bytes,
            ),
        )
        self.telemetry = Telemetry(config, self.engine)
        self.engine_failed = asyncio.Event()
        self._model = model
        self._secret_check = secret_check(secret)
        self._draining = False
        self._ready = False
        self.edge = make_edge(
            EdgeParts(
                config=config,
                worker_id=self.worker_id,
                epoch=self.epoch,
                secret=secret,
                model=model,
                engine=self.engine,
                reader=RequestReader(secret=secret, layout=model.layout, eos_token_ids=model.eos_token_ids),
                address=lambda: self.address,
                metrics=self.telemetry.registry,
            )
        )
        self._loop = EngineLoop(self.engine, self._on_step, self._on_engine_failure, self.edge.on_layers)
        self.server = GrpcServer(
            ServerConfig(
                host=config.host,
                port=config.port,
                health_port=config.health_port,
                tls=config.tls,
                max_concurrent_rpcs=config.max_concurrent_rpcs,
            ),
            alive=lambda: self._loop.alive(config.stall_timeout),
        )
        self.edge.add_to(self.server)
        self.server.add(
            WorkerService(self.engine, self._describe_stats, self.edge.fill_stats),
            worker_pb2_grpc.add_WorkerServicer_to_server,
            "twostep.v1.Worker",
        )
        self._registration = Registration(config.redis_url, describe=self.record, take_delta=self.engine.take_prefix_delta)

    def record(self) -> WorkerRecord:
        """What the worker says of itself in Redis, now."""
        stats, shape = self.engine.stats(), self._model.runner.kv_shape
        return WorkerRecord(
            worker_id=self.worker_id,
            role=self.config.role,
            address=self.address,
            epoch=self.epoch,
            model=self._model.name,
            layout=self._model.layout,
            hash_unit=self.config.hash_unit,
            secret_check=self._secret_check,
            num_blocks=shape.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self._model.runner.max_model_len,
            ready=self._ready,
            draining=self._draining,
            transports=tuple(self.edge.ready_transports),
            step_tokens=self.engine.max_num_batched_tokens,
            local_prefill=self.config.role == "decode" and self.config.local_prefill,
            load=WorkerLoad(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_reserved=stats.num_reserved,
                num_held=stats.num_held,
                num_free_blocks=stats.num_available_blocks,
            ),
        )

    async def start(self) -> None:
        """Returns when the worker is ready and registered. Raises SetupError with what to change; everything is stopped then."""
        try:
            self.telemetry.start(self._describe_stats, self.edge.fill_stats)
            self._loop.start()
            if self._model.ranks is not None:
                self._model.ranks.watch(self._loop.fail)
            await self.edge.start()
            port = await self.server.start()
            self.address = _reachable(self.config, port)
            await self._wait_for_transport()
            self._ready = True
            await self._registration.start()
        except BaseException:
            self._ready = False
            await self._stop()
            raise
        self.server.health.set(READINESS, True)
        log.info(
            "ready: %s at %s, health on port %d, metrics on port %d",
            self.worker_id,
            self.address,
            self.server.health_port,
            self.telemetry.port,
        )

    async def stop(self, drain_timeout_s: float) -> None:
        """Drains: what runs may end within `drain_timeout_s`. Then everything is freed and stopped. Call it once."""
        self._draining, self._ready = True, False
        self.server.health.set(READINESS, False)
        self.edge.refuse(f"{self.worker_id} is draining; use another worker")
        await self._registration.close()
        if not await _until(lambda: self.edge.idle or self.engine_failed.is_set(), drain_timeout_s) or not self.edge.idle:
            log.warning("ending what still runs")
            self.edge.fail_all(Unavailable(f"{self.worker_id} stopped before the request was done; try again"))
        await self._stop()

    async def _stop(self) -> None:
        await self._registration.close()
        # Frees what is left and lets streams end, then the calls have a moment to return.
        await self.edge.close()
        await self.server.drain(_GOODBYE_S)
        await self._loop.stop()
        await self.telemetry.close()

    async def _wait_for_transport(self) -> None:
        if self.config.kv_transfer == "none":
            return
        if not await _until(lambda: bool(self.edge.ready_transports), self.config.transport_timeout):
            raise SetupError(
                f"no KV transport works after {self.config.transport_timeout:g} s (--kv-transfer {self.config.kv_transfer}); "
                f"is Ray running at --ray-address {self.config.ray_address}?"
            )

    def _on_step(self, output: StepOutput) -> None:
        self.edge.on_step(output)
        self.telemetry.on_step(output)

    def _on_engine_failure(self, error: Exception) -> None:
        self._ready = False
        self.server.health.set(READINESS, False)
        reason = f"the engine of {self.worker_id} failed; use another worker"
        self.edge.refuse(reason)
        self.edge.fail_all(Unavailable(reason))
        self.engine_failed.set()

    def _describe_stats(self) -> worker_pb2.WorkerStats:
        return worker_pb2.WorkerStats(
            worker_id=self.worker_id, role=self.config.role, epoch=self.epoch, ready=self._ready, draining=self._draining
        )


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """False: `timeout_s` passed first."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= give_up:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _reachable(config: WorkerConfig, port: int) -> str:
    """host:port for others."""
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
