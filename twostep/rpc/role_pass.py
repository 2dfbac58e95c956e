"""The right to change a worker's role: whoever holds the deployment secret signs for one life of one worker, and for a minute."""

from __future__ import annotations

import hashlib
import hmac
import struct
import time
from dataclasses import dataclass, replace

from twostep.errors import Unauthenticated, Unavailable
from twostep.rpc.v1 import worker_pb2

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
    def issue(cls, secret: bytes, *, worker_id: str, epoch: int, role: str, drain_timeout_s: float) -> RolePass:
        expires = time.time_ns() // 1_000_000 + int(PASS_LIFE_S * 1000)
        unsigned = cls(worker_id=worker_id, epoch=epoch, role=role, drain_timeout_s=drain_timeout_s, expires_unix_ms=expires)
        return replace(unsigned, mac=unsigned._mac(secret))

    def verify(self, secret: bytes, *, worker_id: str, epoch: int) -> None:
        """Raises Unauthenticated (forged, or too old) and Unavailable (meant for another worker or life)."""
        if not hmac.compare_digest(self.mac, self._mac(secret)):
            raise Unauthenticated("only holders of the deployment secret may change a worker's role: give the worker's own --secret-file")
        if not 0 <= time.time_ns() // 1_000_000 < self.expires_unix_ms:
            raise Unauthenticated("the call's time is up; set the machines' clocks")
        if (self.worker_id, self.epoch) != (worker_id, epoch):
            raise Unavailable(f"the call is for {self.worker_id} of epoch {self.epoch}, this is {worker_id} of {epoch}; look again")

    def _mac(self, secret: bytes) -> bytes:
        names = [text.encode("utf-8", "surrogatepass") for text in (self.worker_id, self.role)]
        canonical = b"".join(struct.pack("<Q", len(name)) + name for name in names)
        canonical += struct.pack("<QdQ", self.epoch, self.drain_timeout_s, self.expires_unix_ms)
        return hmac.new(secret, _DOMAIN + canonical, hashlib.sha256).digest()

    def to_proto(self) -> worker_pb2.SwitchRoleRequest:
        return worker_pb2.SwitchRoleRequest(
            role=self.role,
            drain_timeout_s=self.drain_timeout_s,
            worker_id=self.worker_id,
            epoch=self.epoch,
            expires_unix_ms=self.expires_unix_ms,
            mac=self.mac,
        )

    @classmethod
    def from_proto(cls, message: worker_pb2.SwitchRoleRequest) -> RolePass:
        """Nothing is checked but that the numbers can be signed: call `verify`. Raises Unauthenticated."""
        if message.expires_unix_ms < 0:
            raise Unauthenticated("the call's expiry is negative; no member of this deployment asked")
        return cls(
            worker_id=message.worker_id,
            epoch=message.epoch,
            role=message.role,
            drain_timeout_s=message.drain_timeout_s,
            expires_unix_ms=message.expires_unix_ms,
            mac=message.mac,
        )
