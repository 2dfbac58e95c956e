"""The Worker service: what this worker holds right now, for operators and tests, and its change of roles."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc
import grpc.aio

from twostep.engine.engine import Engine
from twostep.errors import InternalError
from twostep.keys.vouch import vouch
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import RolePass
from twostep.worker.roles import RoleChange, RoleConflict

_Context = grpc.aio.ServicerContext[Any, Any]


class ServedWorker(Protocol):
    """The worker that the service speaks for (twostep/worker/worker.py)."""

    worker_id: str
    engine: Engine

    @property
    def epoch(self) -> int: ...

    @property
    def address(self) -> str: ...

    def describe(self) -> worker_pb2.WorkerStats: ...

    async def fill_stats(self, stats: worker_pb2.WorkerStats) -> None: ...

    async def switch_role(self, role: str, drain_timeout_s: float) -> RoleChange: ...


class WorkerService(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker: ServedWorker, secret: bytes) -> None:
        """`secret` is the deployment's, whose holders may change the worker's role."""
        self._worker = worker
        self._secret = secret

    async def Stats(self, request: worker_pb2.WorkerStatsRequest, context: _Context) -> worker_pb2.WorkerStats:
        worker = self._worker
        stats = worker.describe()
        if request.challenge:
            stats.vouched = vouch(self._secret, request.challenge, worker_id=worker.worker_id, address=worker.address, epoch=worker.epoch)
        if request.check_integrity:
            try:
                # In a thread: walking a large pool takes milliseconds that the event loop does not have.
                await asyncio.to_thread(self._worker.engine.check_integrity)
            except InternalError as error:
                stats.integrity_error = error.message
        engine = self._worker.engine.stats()
        for name in ("running", "waiting", "reserved", "held", "blocks", "free_blocks", "cached_blocks", "host_blocks", "host_hit_tokens"):
            setattr(stats, f"num_{name}", getattr(engine, f"num_{name}"))
        stats.steps = engine.steps
        stats.num_preemptions = engine.num_preemptions
        stats.swapped_bytes = engine.swapped_bytes
        stats.stalled_s = engine.stalled_s
        await self._worker.fill_stats(stats)
        return stats

    async def SwitchRole(self, request: worker_pb2.SwitchRoleRequest, context: _Context) -> worker_pb2.SwitchRoleResponse:
        RolePass.from_proto(request).verify(self._secret, worker_id=self._worker.worker_id, epoch=self._worker.epoch)
        try:
            change = await self._worker.switch_role(request.role, request.drain_timeout_s)
        except RoleConflict as conflict:
            await context.abort(grpc.StatusCode.ABORTED, str(conflict))
            raise AssertionError("abort raises") from conflict
        return worker_pb2.SwitchRoleResponse(role=change.role, epoch=change.epoch, drain_s=change.drain_s, switch_s=change.switch_s)
