"""One worker: engine, server, registration, and its edge, of both roles or of the one that it has; started, switched, stopped in order.

start   engine thread · edge (KV transport) · server listens · transport answers · registered · ready
stop    not ready, and said so in Redis · no new work · what runs ends, or is failed at the drain timeout · deregistered · edge frees ·
        server and engine stop
switch  not ready, and said so in Redis · no new work · what runs ends, or is failed at the drain timeout · edge frees, and leaves its
        transports running · engine reconfigured · another edge under a new epoch · registered in the role · ready   (docs/roles.md)
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from twostep import __version__
from twostep.cluster.records import WorkerRecord
from twostep.cluster.registration import Registration
from twostep.engine.config import prompt_room
from twostep.engine.types import StepOutput
from twostep.errors import InternalError, InvalidRequest, SetupError, Unavailable
from twostep.keys.secret import DeploymentSecret, secret_check, vouch
from twostep.rpc.call_signing import CallGate
from twostep.rpc.health import READINESS
from twostep.rpc.server import GrpcServer, ServerConfig
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.rpc.version_gate import VersionGate
from twostep.rpc.worker_role import RolePass
from twostep.sampling_params import NEWER_PARAMETERS
from twostep.worker.config import ROLES, WorkerConfig, config_in_role, reachable_address
from twostep.worker.curve_tracker import CurveTracker
from twostep.worker.edge import SERVICE_NAMES, Edge, EdgeParts, KvTransports, Switchboard, until
from twostep.worker.engine_port import EngineEvents, EnginePort
from twostep.worker.requests import RequestReader
from twostep.worker.telemetry import Telemetry

log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]

# For routers to read how their requests ended, and for calls to return.
_GOODBYE_S = 2.0
# Launched steps end within it once nothing is left in them; one that does not hangs.
_ENGINE_IDLE_S = 10.0
_IDLE_POLL_S = 0.005


class RoleConflict(Exception):
    """Another change of the worker is under way, or came in between: a switch, a stop. Says what to do."""


class Worker:
    """`config`, `epoch` and `edge` are those of its life in the role that it has now."""

    def __init__(
        self, config: WorkerConfig, engine: EnginePort, secret: DeploymentSecret, make_edge: Callable[[EdgeParts], Edge], epoch: int
    ) -> None:
        """`make_edge` makes that of `parts.config.role`, which may change. `epoch` of its first life (twostep/cluster/epochs.py). Needs a
        running event loop. Raises SetupError."""
        self.worker_id = config.worker_id or f"{config.role}-{socket.gethostname()}-{config.grpc_port or os.getpid()}"
        self.address = ""
        self._secret = secret
        self._secret_check = secret_check(secret)
        self._make_edge = make_edge
        self.engine, facts = engine, engine.facts
        self._curve = CurveTracker(facts.curve)
        self.telemetry = Telemetry(config, engine, self.worker_id, facts.gpu_ids, graph_bytes=facts.captured_bytes)
        self._reader = RequestReader(secret=secret, layout=facts.layout, eos_token_ids=facts.eos_token_ids)
        # Nothing can be served any more, by whatever fault: the process is to end.
        self.engine_failed = asyncio.Event()
        self._draining = False
        self._ready = False
        self._stopping = False
        # It stands in Redis: from now on it may be ready.
        self._announced = False
        self._why_of_no_use = ""
        self._switching: asyncio.Task[worker_pb2.SwitchRoleResponse] | None = None
        self.config, self.epoch = config, epoch
        self.edge = self._new_edge(config, epoch)
        self.server = GrpcServer(
            ServerConfig(
                host=config.host,
                port=config.grpc_port,
                health_port=config.health_port,
                tls=config.tls,
                max_concurrent_rpcs=config.max_concurrent_rpcs,
            ),
            alive=lambda: self.engine.alive(config.stall_timeout),
            admit=[
                VersionGate(__version__, SERVICE_NAMES, us=self.worker_id).admit,
                CallGate(secret, lambda: (self.worker_id, self.epoch)).admit,
            ],
        )
        self._board = Switchboard()
        self._connect()
        self._board.add_to(self.server)
        self.server.add(WorkerService(self, secret), worker_pb2_grpc.add_WorkerServicer_to_server, "twostep.v1.Worker")
        self._registration = Registration(config.redis_url, secret=secret, describe=self.record, take_delta=self.engine.take_prefix_delta)

    def record(self) -> WorkerRecord:
        """Returns the record that the worker writes in Redis now."""
        self._tell_readiness()
        stats, facts, config = self.engine.stats(), self.engine.facts, self.config
        curve = self._curve.curve
        self.engine.set_curve(curve)
        return WorkerRecord(
            worker_id=self.worker_id,
            role=config.role,
            address=self.address,
            epoch=self.epoch,
            version=__version__,
            model=facts.name,
            layout=facts.layout,
            hash_unit=config.hash_unit,
            secret_check=self._secret_check,
            num_blocks=facts.shape.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=facts.max_model_len,
            num_host_blocks=facts.num_host_blocks,
            ready=self._ready,
            draining=self._draining,
            not_ready_reason=self._why_of_no_use,
            transports=tuple(transport.name for transport in self.edge.transports.ready),
            step_tokens=self.engine.max_num_batched_tokens,
            local_prefill=config.serves_alone,
            both_roles=config.both_roles,
            max_step_s=(config.max_step_ms or 0.0) / 1e3,
            curve=curve,
            load=replace(self.telemetry.load(stats, self.edge.counts), hand_overs=tuple(self.edge.measured)),
            pod_name=config.pod_name,
            pod_namespace=config.pod_namespace,
            pod_owner=config.pod_owner,
            sampling=NEWER_PARAMETERS,
            cached_at_watch=True,
            embeds=True,
            max_prompt_tokens=prompt_room(self.engine.max_num_batched_tokens, config.max_num_seqs) if facts.shape.has_encoder else 0,
            engine_pid=self.engine.pid,
        )

    async def start(self) -> None:
        """Returns when the worker is ready and registered. Raises SetupError with what to change; everything is stopped then."""
        try:
            self.telemetry.start(self.describe, lambda stats: self.edge.fill_stats(stats))
            self.engine.start(
                EngineEvents(
                    on_step=self._on_step,
                    on_layers=lambda progress: self.edge.on_layers(progress),
                    on_failure=self._on_engine_failure,
                )
            )
            await self.edge.start()
            port = await self.server.start()
            self.address = reachable_address(self.config, port)
            await self._look_for_transport(self.config, self.edge)
            self._ready = True
            await self._registration.start()
            self._announced = True
        except BaseException:
            self._ready = False
            await self._stop()
            raise
        self._tell_readiness()
        how, ports = "not ready yet" if self._why_of_no_use else "ready", (self.server.health_port, self.telemetry.port)
        engine = f", its engine in process {self.engine.pid}" if self.engine.pid else ""
        log.info("%s: %s at %s, health on port %d, metrics on port %d%s", how, self.worker_id, self.address, *ports, engine)

    async def stop(self, drain_timeout_s: float) -> None:
        """Drains: what runs may end within `drain_timeout_s`. Then everything is freed and stopped. A change of roles under way is cut
        short. Call it once."""
        self._stopping = True
        self._refuse(f"{self.worker_id} is draining; use another worker")
        if self._switching is not None:
            await asyncio.wait({self._switching})
        self._refuse(f"{self.worker_id} is draining; use another worker")
        # Its record stays as long as anything runs: to a router, a worker without one is lost as soon as it is silent.
        await self._registration.announce()
        await self._drain(drain_timeout_s, self.engine_failed.is_set)
        self._fail_rest("stopped")
        await self._stop()

    async def _drain(self, timeout_s: float, interrupted: Callable[[], bool]) -> None:
        """Waits until nothing runs any more, for `timeout_s` at most, or until it is interrupted."""
        await until(lambda: self.edge.idle or interrupted(), timeout_s)

    def _fail_rest(self, why: str) -> None:
        """Ends what still runs."""
        if not self.edge.idle:
            log.warning("ending what still runs")
            self.edge.fail_all(Unavailable(f"{self.worker_id} {why} before the request was done; try again"))

    async def _stop(self) -> None:
        await self._registration.close()
        # Frees what is left and lets streams end, then the calls have a moment to return.
        await self.edge.close()
        await self.edge.transports.close()
        await self.server.drain(_GOODBYE_S)
        await self.engine.stop()
        await self.telemetry.close()

    # ---- the other role ---------------------------------------------------------------------------------------------------

    async def switch_role(self, role: str, drain_timeout_s: float) -> worker_pb2.SwitchRoleResponse:
        """Returns when it serves that role; what runs may end within `drain_timeout_s` before. Goes on to its end whether or not anybody
        waits for it. Raises InvalidRequest, RoleConflict (another change is under way, or came in between), and SetupError: it cannot
        serve that role, and goes on in the one it had."""
        if role not in ROLES:
            raise InvalidRequest(f"role is {role!r}; give {' or '.join(ROLES)}")
        if not (math.isfinite(drain_timeout_s) and drain_timeout_s >= 0):
            raise InvalidRequest(f"drain_timeout_s is {drain_timeout_s}; give seconds, 0 or more")
        if self._switching is not None:
            raise RoleConflict(f"{self.worker_id} is changing its role already; ask again when it is ready")
        if self._interrupted() or not self._ready:
            raise RoleConflict(f"{self.worker_id} is {'stopping' if self._interrupted() else 'starting'}; it keeps its role")
        if role == self.config.role:
            return worker_pb2.SwitchRoleResponse(role=role, epoch=self.epoch)
        config = config_in_role(self.config, role)
        self._switching = asyncio.create_task(self._switch(config, drain_timeout_s), name="role switch")
        self._switching.add_done_callback(self._switched)
        return await asyncio.shield(self._switching)

    async def _switch(self, config: WorkerConfig, drain_timeout_s: float) -> worker_pb2.SwitchRoleResponse:
        try:
            return await self._change(config, drain_timeout_s)
        except (RoleConflict, SetupError):
            raise
        except Exception as error:
            log.exception("%s serves no role any more", self.worker_id)
            self._on_engine_failure(error)
            raise

    async def _change(self, config: WorkerConfig, drain_timeout_s: float) -> worker_pb2.SwitchRoleResponse:
        old, begun = self.config, time.monotonic()
        reason = f"{self.worker_id} is becoming a {config.role} worker; use another one"
        log.info("%s becomes a %s worker: draining for %g s at most", self.worker_id, config.role, drain_timeout_s)
        self._refuse(reason)
        await self._registration.announce()
        await self._drain(drain_timeout_s, self._interrupted)
        self._check_not_interrupted()
        self._fail_rest("changed its role")
        drained = time.monotonic()
        self._board.disconnect(reason)
        await self.edge.close()
        try:
            await self._begin(config)
        except Exception as error:
            log.exception("%s cannot be a %s worker, and goes back", self.worker_id, config.role)
            try:
                await self._begin(old, back=True)
            except Exception as worse:
                raise InternalError(f"{self.worker_id} can serve neither role now, and ends: {worse}") from worse
            await self._resume()
            raise SetupError(f"{self.worker_id} is a {old.role} worker still: {error}") from error
        await self._resume()
        drain_s, switch_s = drained - begun, time.monotonic() - drained
        log.info("ready: %s is a %s worker: drained in %.2f s, switched in %.2f", self.worker_id, config.role, drain_s, switch_s)
        return worker_pb2.SwitchRoleResponse(role=config.role, epoch=self.epoch, drain_s=drain_s, switch_s=switch_s)

    async def _begin(self, config: WorkerConfig, *, back: bool = False) -> None:
        """Begins a new life in the role of `config`, that nobody is told of yet; `back` in the one it had, whether or not KV has a way.
        Raises SetupError, and then the life before is the present one."""
        give_up = time.monotonic() + _ENGINE_IDLE_S
        while not await self.engine.reconfigure(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        ):
            if time.monotonic() >= give_up:
                raise InternalError(f"a step that nobody waits for has not ended in {_ENGINE_IDLE_S:g} s; restart the worker")
            await asyncio.sleep(_IDLE_POLL_S)
        epoch = await self._registration.new_epoch(self.epoch)
        edge = self._new_edge(config, epoch, self.edge.transports)
        try:
            await edge.start()
            await (self._look_for_transport if back else self._wait_for_transport)(config, edge)
        except BaseException:
            await edge.close()
            raise
        self.config, self.epoch, self.edge = config, epoch, edge

    async def _wait_for_transport(self, config: WorkerConfig, edge: Edge) -> None:
        """Raises SetupError with what to look at."""
        if config.kv_transfer == "none":
            return
        if not await until(lambda: bool(edge.transports.ready) or self._interrupted(), config.transport_timeout):
            raise SetupError(
                f"no KV transport works after {config.transport_timeout:g} s (--kv-transfer {config.kv_transfer}); "
                f"is Ray running at --ray-address {config.ray_address}?"
            )

    async def _look_for_transport(self, config: WorkerConfig, edge: Edge) -> None:
        """Waits for a KV transport, and goes on without one: transports come and go while a worker runs, so one may come later."""
        try:
            await self._wait_for_transport(config, edge)
        except SetupError as error:
            log.warning("%s goes on all the same: %s", self.worker_id, error.message)

    async def _resume(self) -> None:
        self._check_not_interrupted()
        self._connect()
        self.telemetry.serve(self.config.role)
        self._draining, self._ready = False, True
        await self._registration.announce()
        # Whatever came meanwhile has said that it is not.
        self._tell_readiness()

    def _tell_readiness(self) -> None:
        """Tells the health service whether it takes new work, and logs why not: at its start, when it changes its role, and with every
        heartbeat. A worker that is ready itself is still of no use where KV has no way."""
        config, transports, why = self.config, self.edge.transports, ""
        if self._ready and not (config.kv_transfer == "none" or config.serves_alone or transports.ready):
            why = f"no KV transport works (--kv-transfer {config.kv_transfer}): {transports.why_none}"
        if why and not self._why_of_no_use:
            log.warning("%s is not ready: %s", self.worker_id, why)
        elif self._why_of_no_use and not why and self._ready:
            log.info("%s is ready: KV travels by %s", self.worker_id, ", ".join(transport.name for transport in transports.ready))
        self._why_of_no_use = why
        self.server.health.set(READINESS, self._announced and self._ready and not why)

    def _new_edge(self, config: WorkerConfig, epoch: int, carried: KvTransports | None = None) -> Edge:
        """`carried`: the transports of the life before. Raises SetupError, and then they are as they were."""
        parts = EdgeParts(
            config=config,
            worker_id=self.worker_id,
            epoch=epoch,
            secret=self._secret,
            engine=self.engine,
            reader=self._reader,
            address=lambda: self.address,
            metrics=self.telemetry.registry,
            tracer=self.telemetry.tracer,
            carried=carried,
        )
        return self._make_edge(parts)

    def _connect(self) -> None:
        self._board.connect(self.edge.services, f"{self.worker_id} is a {self.config.role} worker now; look it up again")

    def _refuse(self, reason: str) -> None:
        self._draining, self._ready = True, False
        self.server.health.set(READINESS, False)
        self.edge.refuse(reason)

    def _interrupted(self) -> bool:
        return self._stopping or self.engine_failed.is_set()

    def _check_not_interrupted(self) -> None:
        """Raises RoleConflict."""
        if self._interrupted():
            raise RoleConflict(f"{self.worker_id} stops: it changes its role no more")

    def _switched(self, task: asyncio.Task[worker_pb2.SwitchRoleResponse]) -> None:
        self._switching = None
        if not task.cancelled() and (error := task.exception()) is not None:
            # Perhaps nobody waits for it any more.
            log.warning("no change of roles: %s", error)

    # ---- what happens -----------------------------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        self.edge.on_step(output)
        self.telemetry.on_step(output)
        if output.failures:
            return
        if output.timed:
            self._curve.observe(output.workload, output.duration_s)
        if output.num_prefill_tokens and output.num_decode_tokens:
            self._curve.observe_mixed_launch(output.workload, output.launch_s)

    def _on_engine_failure(self, error: Exception) -> None:
        self._ready = False
        self.server.health.set(READINESS, False)
        reason = f"the engine of {self.worker_id} failed; use another worker"
        self.edge.refuse(reason)
        self.edge.fail_all(Unavailable(reason))
        self.engine_failed.set()

    def describe(self) -> worker_pb2.WorkerStats:
        """Returns who the worker is now."""
        return worker_pb2.WorkerStats(
            worker_id=self.worker_id, role=self.config.role, epoch=self.epoch, ready=self._ready, draining=self._draining
        )


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """The Worker service: what this worker holds right now, for operators and tests, and its change of roles."""

    def __init__(self, worker: Worker, secret: DeploymentSecret) -> None:
        """`secret` is the deployment's, whose holders may change the worker's role."""
        self._worker = worker
        self._secret = secret

    async def Stats(self, request: worker_pb2.WorkerStatsRequest, context: _Context) -> worker_pb2.WorkerStats:
        worker = self._worker
        stats = worker.describe()
        if request.challenge:
            stats.vouched = vouch(self._secret, request.challenge, worker_id=worker.worker_id, address=worker.address, epoch=worker.epoch)
        look = await worker.engine.look(check_integrity=request.check_integrity)
        engine, stats.integrity_error = look.stats, look.integrity_error
        stats.num_running = engine.num_running
        stats.num_waiting = engine.num_waiting
        stats.num_reserved = engine.num_reserved
        stats.num_held = engine.num_held
        stats.num_blocks = engine.num_blocks
        stats.num_free_blocks = engine.num_free_blocks
        stats.num_cached_blocks = engine.num_cached_blocks
        stats.num_host_blocks = engine.num_host_blocks
        stats.num_host_hit_tokens = engine.num_host_hit_tokens
        stats.steps = engine.steps
        stats.num_preemptions = engine.num_preemptions
        stats.swapped_bytes = engine.swapped_bytes
        stats.stalled_s = engine.stalled_s
        await worker.edge.fill_stats(stats)
        return stats

    async def SwitchRole(self, request: worker_pb2.SwitchRoleRequest, context: _Context) -> worker_pb2.SwitchRoleResponse:
        RolePass.from_proto(request).verify(self._secret, worker_id=self._worker.worker_id, epoch=self._worker.epoch)
        try:
            return await self._worker.switch_role(request.role, request.drain_timeout_s)
        except RoleConflict as conflict:
            await context.abort(grpc.StatusCode.ABORTED, str(conflict))
            raise AssertionError("abort raises") from conflict
