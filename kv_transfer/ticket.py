"""Tickets: the right to fetch what one worker life published for one attempt of one request of one tenant.

A ticket is signed with the deployment secret (HMAC-SHA256 over a canonical encoding of every field), so that a decode worker can
carry it and a prefill worker need not look anything up to know that it wrote it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from twostep.errors import Incompatible, Unauthenticated, Unavailable
from twostep.rpc.v1 import kv_pb2

# Separates tickets from everything else the same secret signs; changes with the encoding.
_DOMAIN = b"twostep.ticket.v2\0"


def sign(secret: bytes, domain: bytes, fields: Iterable[str | int]) -> bytes:
    """HMAC-SHA256 over the fields in order, strings as UTF-8 behind their length, ints as 8 bytes little-endian: no two encode alike. The
    domain separates what the same secret signs."""
    parts = [domain]
    for value in fields:
        if isinstance(value, str):
            raw = value.encode("utf-8", "surrogatepass")
            parts += (struct.pack("<Q", len(raw)), raw)
        else:
            parts.append(value.to_bytes(8, "little", signed=False))
    return hmac.new(secret, b"".join(parts), hashlib.sha256).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """`layout` is layout.fingerprint(...); `expires_unix_ms` is wall time, which the workers' clocks share to within seconds."""

    worker_id: str
    address: str
    epoch: int
    request_id: str
    attempt: int
    layout: str
    expires_unix_ms: int
    tenant: str = ""
    mac: bytes = b""

    @property
    def lease_id(self) -> str:
        """Unique among all leases of all lives of all workers."""
        return f"{self.worker_id}/{self.epoch}/{self.request_id}/{self.attempt}"

    def signed(self, secret: bytes) -> Ticket:
        return replace(self, mac=self._mac(secret))

    def check_signature(self, secret: bytes) -> None:
        """Raises Unauthenticated, in constant time, unless `mac` is this deployment's over exactly these fields."""
        if not hmac.compare_digest(self.mac, self._mac(secret)):
            raise Unauthenticated("the ticket's signature does not verify; give every worker and router the same --secret-file")

    def verify(self, secret: bytes, *, worker_id: str, epoch: int, layout: str, now_unix_ms: int | None = None) -> None:
        """The issuing worker's check of a ticket that comes back.

        Raises Unauthenticated (forged), Incompatible (another worker's, or another layout) or Unavailable (expired, or issued by
        an earlier life of this worker: what it published is gone, prefill again).
        """
        self.check_signature(secret)
        if self.worker_id != worker_id:
            raise Incompatible(f"the ticket was issued by worker {self.worker_id}, this is {worker_id}; dial the ticket's own address")
        if self.epoch != epoch:
            raise Unavailable(f"the ticket is of epoch {self.epoch} of worker {worker_id}, which now lives in {epoch}; prefill again")
        if self.layout != layout:
            raise Incompatible(f"the ticket's KV layout {self.layout} is not this worker's {layout}; pair workers of one layout")
        self.check_expiry(now_unix_ms)

    def check_expiry(self, now_unix_ms: int | None = None) -> None:
        """Raises Unavailable if the ticket's time is up."""
        now = time.time_ns() // 1_000_000 if now_unix_ms is None else now_unix_ms
        if now >= self.expires_unix_ms:
            raise Unavailable(f"the ticket expired {now - self.expires_unix_ms} ms ago; prefill again")

    def _mac(self, secret: bytes) -> bytes:
        fields = self.worker_id, self.address, self.epoch, self.request_id, self.attempt, self.layout, self.expires_unix_ms, self.tenant
        return sign(secret, _DOMAIN, fields)

    def to_proto(self) -> kv_pb2.Ticket:
        return kv_pb2.Ticket(
            worker_id=self.worker_id,
            address=self.address,
            epoch=self.epoch,
            request_id=self.request_id,
            attempt=self.attempt,
            layout=self.layout,
            expires_unix_ms=self.expires_unix_ms,
            tenant=self.tenant,
            mac=self.mac,
        )

    @classmethod
    def from_proto(cls, message: kv_pb2.Ticket) -> Ticket:
        """Nothing is checked but that the numbers can be signed: call `verify`. Raises Unauthenticated."""
        if message.expires_unix_ms < 0:
            raise Unauthenticated("the ticket's expiry is negative; no worker of this deployment issued it")
        return cls(
            worker_id=message.worker_id,
            address=message.address,
            epoch=message.epoch,
            request_id=message.request_id,
            attempt=message.attempt,
            layout=message.layout,
            expires_unix_ms=message.expires_unix_ms,
            tenant=message.tenant,
            mac=message.mac,
        )
