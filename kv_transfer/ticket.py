"""Tickets: the right to fetch what one worker life published for one attempt of one request of one tenant. Passes: the right to ask a
worker where its transports are found. And the form in which both name a pool's layout.

A ticket is signed with the deployment secret (HMAC-SHA256 over a canonical encoding of every field), so that a decode worker can
carry it and a prefill worker need not look anything up to know that it wrote it.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from twostep.cluster.records import KEYS_AND_VALUES, LayoutRecord
from twostep.errors import Incompatible, Unauthenticated, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.v1 import kv_pb2

# They separate what the same secret signs, and change with the encoding.
_TICKET_DOMAIN = b"twostep.ticket.v2\0"
_PASS_DOMAIN = b"twostep.probe.v1\0"
# How long a pass is good: clocks of one deployment agree to within seconds.
PASS_LIFE_S = 60.0

S = TypeVar("S", "Ticket", "ProbePass")


def _signed_text(domain: bytes, fields: Iterable[str | int]) -> bytes:
    """Returns the fields in order, strings as UTF-8 behind their length, ints as 8 bytes little-endian: no two encode alike. The domain
    separates what the same secret signs."""
    parts = [domain]
    for value in fields:
        if isinstance(value, str):
            raw = value.encode("utf-8", "surrogatepass")
            parts += (struct.pack("<Q", len(raw)), raw)
        else:
            parts.append(value.to_bytes(8, "little", signed=False))
    return b"".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """`layout` is fingerprint(...); `expires_unix_ms` is wall time, which the workers' clocks share to within seconds."""

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

    def signed(self, secret: DeploymentSecret) -> Ticket:
        return replace(self, mac=secret.keys.sign(self._text()))

    def check_signature(self, secret: DeploymentSecret) -> None:
        """Raises Unauthenticated, in constant time, unless `mac` is this deployment's over exactly these fields."""
        if not secret.keys.is_signed(self._text(), self.mac):
            raise Unauthenticated("the ticket's signature does not verify; give every worker and router the same --secret-file")

    def verify(self, secret: DeploymentSecret, *, worker_id: str, epoch: int, layout: str, now_unix_ms: int | None = None) -> None:
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

    def _text(self) -> bytes:
        named = self.worker_id, self.address, self.epoch, self.request_id, self.attempt, self.layout, self.expires_unix_ms, self.tenant
        return _signed_text(_TICKET_DOMAIN, named)

    def to_proto(self) -> kv_pb2.Ticket:
        return kv_pb2.Ticket(**_fields_of(Ticket, self))

    @classmethod
    def from_proto(cls, message: kv_pb2.Ticket) -> Ticket:
        """Nothing is checked but that the numbers can be signed: call `verify`. Raises Unauthenticated."""
        return _from_proto(cls, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePass:
    """Says that a member of the deployment asks this life of this worker. Signed like a ticket, under a domain of its own."""

    worker_id: str
    epoch: int
    expires_unix_ms: int
    mac: bytes = b""

    @classmethod
    def issue(cls, secret: DeploymentSecret, *, worker_id: str, epoch: int) -> ProbePass:
        unsigned = cls(worker_id=worker_id, epoch=epoch, expires_unix_ms=time.time_ns() // 1_000_000 + int(PASS_LIFE_S * 1000))
        return unsigned.signed(secret)

    def signed(self, secret: DeploymentSecret) -> ProbePass:
        return replace(self, mac=secret.keys.sign(self._text()))

    def verify(self, secret: DeploymentSecret, *, worker_id: str, epoch: int) -> None:
        """Raises Unauthenticated (forged, or too old) and Unavailable (meant for another worker or life)."""
        if not secret.keys.is_signed(self._text(), self.mac):
            raise Unauthenticated("the probe's signature does not verify; give every worker and router the same --secret-file")
        if not 0 <= time.time_ns() // 1_000_000 < self.expires_unix_ms:
            raise Unauthenticated("the probe's time is up; set the machines' clocks")
        if (self.worker_id, self.epoch) != (worker_id, epoch):
            raise Unavailable(f"the probe is for {self.worker_id} of epoch {self.epoch}, this is {worker_id} of {epoch}; look it up again")

    def _text(self) -> bytes:
        return _signed_text(_PASS_DOMAIN, (self.worker_id, self.epoch, self.expires_unix_ms))

    def to_proto(self) -> kv_pb2.ProbeRequest:
        return kv_pb2.ProbeRequest(**_fields_of(ProbePass, self))

    @classmethod
    def from_proto(cls, message: kv_pb2.ProbeRequest) -> ProbePass:
        """Nothing is checked but that the numbers can be signed: call `verify`. Raises Unauthenticated."""
        return _from_proto(cls, message)


def _from_proto(kind: type[S], message: kv_pb2.Ticket | kv_pb2.ProbeRequest) -> S:
    """Raises Unauthenticated."""
    if message.expires_unix_ms < 0:
        raise Unauthenticated("its expiry is negative; no member of this deployment signed it")
    return kind(**_fields_of(kind, message))


def _fields_of(kind: type[Ticket | ProbePass], x: object) -> dict[str, Any]:
    """Returns what a ticket or its message holds, by name; every request needs it, and dataclasses.asdict takes a hundred times as long."""
    return {name: getattr(x, name) for name in kind.__slots__}  # its fields


def fingerprint(layout: LayoutRecord) -> str:
    """Returns a pool's layout in 32 hex digits; equal if and only if all fields are."""
    return hashlib.sha256(repr(tuple(layout.said().items())).encode()).hexdigest()[:32]


def layout_to_proto(layout: LayoutRecord) -> kv_pb2.KvLayout:
    return kv_pb2.KvLayout(**layout.said())


def layout_from_proto(message: kv_pb2.KvLayout) -> LayoutRecord:
    named = {field.name: getattr(message, field.name) for field in fields(LayoutRecord)}
    # Left out where it is what is taken for granted.
    return LayoutRecord(**named | {"num_planes": message.num_planes or KEYS_AND_VALUES, "num_groups": message.num_groups or 1})
