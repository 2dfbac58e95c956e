"""Asks a worker which role it has, and for the other one: for operators (`twostep role`) and whoever scales a deployment.

The right to change a role has whoever holds the deployment secret: a pass is signed for one life of one worker, and for a minute.
"""

from __future__ import annotations

import struct
import time
from dataclasses import asdict, dataclass, fields, replace

import grpc
import grpc.aio

from twostep.errors import Unauthenticated, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.channel import error_from_rpc
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc

_ASK_S = 5.0
# Beyond the drain: requests are failed, one edge ends and the other begins, and perhaps the first one again.
_SWITCH_S = 180.0
# How long a pass is good: clocks of one deployment agree to within seconds.
PASS_LIFE_S = 60.0
_DOMAIN = b"twostep.role.v1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePass:
    """All that a SwitchRole call says. A switch ends the life that it names, so that nobody can use a pass twice."""

    worker_id: str
    epoch: int
    role: str
    drain_timeout_s: float
    expires_unix_ms: int
    mac: bytes = b""

    @classmethod
    def issue(cls, secret: DeploymentSecret, *, worker_id: str, epoch: int, role: str, drain_timeout_s: float) -> RolePass:
        expires = time.time_ns() // 1_000_000 + int(PASS_LIFE_S * 1000)
        unsigned = cls(worker_id=worker_id, epoch=epoch, role=role, drain_timeout_s=drain_timeout_s, expires_unix_ms=expires)
        return unsigned.signed(secret)

    def signed(self, secret: DeploymentSecret) -> RolePass:
        return replace(self, mac=secret.keys.sign(self._text()))

    def verify(self, secret: DeploymentSecret, *, worker_id: str, epoch: int) -> None:
        """Raises Unauthenticated (forged, or too old) and Unavailable (meant for another worker or life)."""
        if not secret.keys.is_signed(self._text(), self.mac):
            raise Unauthenticated("only holders of the deployment secret may change a worker's role: give the worker's own --secret-file")
        if not 0 <= time.time_ns() // 1_000_000 < self.expires_unix_ms:
            raise Unauthenticated("the call's time is up; set the machines' clocks")
        if (self.worker_id, self.epoch) != (worker_id, epoch):
            raise Unavailable(f"the call is for {self.worker_id} of epoch {self.epoch}, this is {worker_id} of {epoch}; look again")

    def _text(self) -> bytes:
        names = [text.encode("utf-8", "surrogatepass") for text in (self.worker_id, self.role)]
        canonical = b"".join(struct.pack("<Q", len(name)) + name for name in names)
        canonical += struct.pack("<QdQ", self.epoch, self.drain_timeout_s, self.expires_unix_ms)
        return _DOMAIN + canonical

    def to_proto(self) -> worker_pb2.SwitchRoleRequest:
        return worker_pb2.SwitchRoleRequest(**asdict(self))

    @classmethod
    def from_proto(cls, message: worker_pb2.SwitchRoleRequest) -> RolePass:
        """Nothing is checked but that the numbers can be signed: call `verify`. Raises Unauthenticated."""
        if message.expires_unix_ms < 0:
            raise Unauthenticated("the call's expiry is negative; no member of this deployment asked")
        return cls(**{each.name: getattr(message, each.name) for each in fields(cls)})


async def who_is(channel: grpc.aio.Channel) -> worker_pb2.WorkerStats:
    """The worker at the other end. Raises Unavailable, and what else its error says."""
    try:
        stats: worker_pb2.WorkerStats = await worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest(), timeout=_ASK_S)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    return stats


async def switch_role(
    channel: grpc.aio.Channel, secret: DeploymentSecret, *, role: str, drain_timeout_s: float, worker: worker_pb2.WorkerStats | None = None
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
