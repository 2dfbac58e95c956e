"""Passes, which give the right to ask a worker where its transports are found, and the bytes that a probe copies."""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kv_transfer.ticket import sign
from twostep.errors import Unauthenticated, Unavailable
from twostep.rpc.v1 import kv_pb2

# Stands where a lease's id does; real ones contain slashes.
PROBE_LEASE = "probe"
PROBE_BYTES = 16 << 20
# How long a pass is good: clocks of one deployment agree to within seconds.
PASS_LIFE_S = 60.0

# A prime, so that a copy shifted by any power of two differs.
_PERIOD = 251
_DOMAIN = b"twostep.probe.v1\0"


def probe_pattern(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns uint8 [num_bytes] that both sides can work out, so that a wrong copy is no proof of a working path."""
    return np.resize(np.arange(_PERIOD, dtype=np.uint8), num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePass:
    """Says that a member of the deployment asks this life of this worker. Signed like a ticket, under a domain of its own."""

    worker_id: str
    epoch: int
    expires_unix_ms: int
    mac: bytes = b""

    @classmethod
    def issue(cls, secret: bytes, *, worker_id: str, epoch: int) -> ProbePass:
        unsigned = cls(worker_id=worker_id, epoch=epoch, expires_unix_ms=time.time_ns() // 1_000_000 + int(PASS_LIFE_S * 1000))
        return replace(unsigned, mac=unsigned._mac(secret))

    def verify(self, secret: bytes, *, worker_id: str, epoch: int) -> None:
        """Raises Unauthenticated (forged, or too old) and Unavailable (meant for another worker or life)."""
        if not hmac.compare_digest(self.mac, self._mac(secret)):
            raise Unauthenticated("the probe's signature does not verify; give every worker and router the same --secret-file")
        if not 0 <= time.time_ns() // 1_000_000 < self.expires_unix_ms:
            raise Unauthenticated("the probe's time is up; set the machines' clocks")
        if (self.worker_id, self.epoch) != (worker_id, epoch):
            raise Unavailable(f"the probe is for {self.worker_id} of epoch {self.epoch}, this is {worker_id} of {epoch}; look it up again")

    def _mac(self, secret: bytes) -> bytes:
        return sign(secret, _DOMAIN, (self.worker_id, self.epoch, self.expires_unix_ms))

    def to_proto(self) -> kv_pb2.ProbeRequest:
        return kv_pb2.ProbeRequest(worker_id=self.worker_id, epoch=self.epoch, expires_unix_ms=self.expires_unix_ms, mac=self.mac)

    @classmethod
    def from_proto(cls, message: kv_pb2.ProbeRequest) -> ProbePass:
        """Nothing is checked but that the numbers can be signed: call `verify`. Raises Unauthenticated."""
        if message.expires_unix_ms < 0:
            raise Unauthenticated("the probe's expiry is negative; no member of this deployment asked")
        return cls(worker_id=message.worker_id, epoch=message.epoch, expires_unix_ms=message.expires_unix_ms, mac=message.mac)
