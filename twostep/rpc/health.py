"""grpc.health.v1 where health means progress, not an open port.

Services: "liveness" (the process gets its work done: a failed check asks for a restart), "readiness" (it takes new work) and ""
(both). Not the servicer of grpcio-health-checking: that one writes to a watcher while it holds the lock that `set` needs, so
one stuck watcher would freeze the state for all, and a watcher that leaves cuts off the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

LIVENESS = "liveness"
READINESS = "readiness"
_WATCH_EVERY_S = 0.5


class HealthBoard:
    """Holds the states that the health checks read. `alive` is called at every check and must return at once."""

    def __init__(self, alive: Callable[[], bool] = lambda: True) -> None:
        self._alive = alive
        self._states: dict[str, bool] = {READINESS: False}

    def set(self, service: str, serving: bool) -> None:
        """Sets "readiness", or the state of any other named service; liveness is only ever computed."""
        assert service not in ("", LIVENESS), "liveness is computed: give HealthBoard a callable"
        self._states[service] = serving

    def serving(self, service: str) -> bool | None:
        """None: no such service."""
        if service == LIVENESS:
            return self._alive()
        if service == "":
            return self._alive() and self._states[READINESS]
        return self._states.get(service)


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc, unused-ignore]  # stubs of grpc_health are optional
    """Serves a HealthBoard. Check of an unknown service: NOT_FOUND; Watch of one: SERVICE_UNKNOWN until it is known."""

    def __init__(self, board: HealthBoard) -> None:
        self._board = board

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> health_pb2.HealthCheckResponse:
        serving = self._board.serving(request.service)
        if serving is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}; ask for '', {LIVENESS!r} or {READINESS!r}")
        return _response(serving)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last: health_pb2.HealthCheckResponse | None = None
        while True:
            now = _response(self._board.serving(request.service))
            if now != last:
                yield now
                last = now
            await asyncio.sleep(_WATCH_EVERY_S)


def _response(serving: bool | None) -> health_pb2.HealthCheckResponse:
    kind = health_pb2.HealthCheckResponse
    if serving is None:
        return kind(status=kind.SERVICE_UNKNOWN)
    return kind(status=kind.SERVING if serving else kind.NOT_SERVING)
