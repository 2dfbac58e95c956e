"""The Worker service: what this worker holds right now, for operators and tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from twostep.engine.engine import Engine
from twostep.errors import InternalError
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc


class WorkerService(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self, engine: Engine, describe: Callable[[], worker_pb2.WorkerStats], fill: Callable[[worker_pb2.WorkerStats], Awaitable[None]]
    ) -> None:
        """`describe` makes the message with who the worker is, `fill` adds what its edge holds."""
        self._engine = engine
        self._describe = describe
        self._fill = fill

    async def Stats(self, request: worker_pb2.WorkerStatsRequest, context: grpc.aio.ServicerContext[Any, Any]) -> worker_pb2.WorkerStats:
        stats = self._describe()
        if request.check_integrity:
            try:
                # In a thread: walking a large pool takes milliseconds that the event loop does not have.
                await asyncio.to_thread(self._engine.check_integrity)
            except InternalError as error:
                stats.integrity_error = error.message
        engine = self._engine.stats()
        for name in ("running", "waiting", "reserved", "held", "blocks", "free_blocks", "cached_blocks"):
            setattr(stats, f"num_{name}", getattr(engine, f"num_{name}"))
        stats.steps = engine.steps
        stats.num_preemptions = engine.num_preemptions
        stats.swapped_bytes = engine.swapped_bytes
        stats.stalled_s = engine.stalled_s
        await self._fill(stats)
        return stats

    async def SwitchRole(
        self, request: worker_pb2.SwitchRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.SwitchRoleResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker keeps its role; start one of the other role")
        raise AssertionError("abort raises")
