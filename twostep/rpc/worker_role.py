"""Asks a worker which role it has, and for the other one: for operators (`twostep role`) and whoever scales a deployment."""

from __future__ import annotations

import grpc
import grpc.aio

from twostep.errors import Unavailable
from twostep.rpc.channel import error_from_rpc
from twostep.rpc.role_pass import RolePass
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc

_ASK_S = 5.0
# Beyond the drain: requests are failed, one edge ends and the other begins, and perhaps the first one again.
_SWITCH_S = 180.0


async def who_is(channel: grpc.aio.Channel) -> worker_pb2.WorkerStats:
    """The worker at the other end. Raises Unavailable, and what else its error says."""
    try:
        stats: worker_pb2.WorkerStats = await worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest(), timeout=_ASK_S)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return stats


async def switch_role(
    channel: grpc.aio.Channel, secret: bytes, *, role: str, drain_timeout_s: float, worker: worker_pb2.WorkerStats | None = None
) -> worker_pb2.SwitchRoleResponse:
    """Returns when the worker serves `role`; running requests may end within `drain_timeout_s` before. `worker`: what it has said of
    itself, if that was asked. Raises Unauthenticated (another secret), Incompatible (it cannot, and has kept its role), Unavailable (it
    is changing already, stopping, or away), InvalidRequest."""
    worker = worker or await who_is(channel)
    request = RolePass.issue(secret, worker_id=worker.worker_id, epoch=worker.epoch, role=role, drain_timeout_s=drain_timeout_s)
    try:
        response: worker_pb2.SwitchRoleResponse = await worker_pb2_grpc.WorkerStub(channel).SwitchRole(
            request.to_proto(), timeout=max(0.0, drain_timeout_s) + _SWITCH_S
        )
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.ABORTED:
            raise Unavailable(error.details() or "another change of the worker is under way; ask again") from None
        raise error_from_rpc(error) from None
    return response
