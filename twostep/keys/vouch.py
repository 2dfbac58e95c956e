"""How a worker shows that it lives: it answers a challenge under the deployment secret, in the name of its present life at its address.
What Redis says may be old, or gone; this is neither."""

from __future__ import annotations

import hashlib
import hmac
import struct

from twostep.keys.secret import purpose_key

CHALLENGE_BYTES = 16
_PURPOSE = "twostep.keys.vouch.v1"


def vouch(secret: bytes, challenge: bytes, *, worker_id: str, address: str, epoch: int) -> bytes:
    """Returns the answer to a challenge of any length. It is signed under a key for this alone."""
    mac = hmac.new(purpose_key(secret, _PURPOSE), digestmod=hashlib.sha256)
    for part in (challenge, worker_id.encode("utf-8", "surrogatepass"), address.encode("utf-8", "surrogatepass")):
        mac.update(len(part).to_bytes(8, "little") + part)
    mac.update(struct.pack("<Q", epoch))
    return mac.digest()


def is_vouched(answer: bytes, secret: bytes, challenge: bytes, *, worker_id: str, address: str, epoch: int) -> bool:
    """Returns whether whoever answered has the secret, and lives there under that name and epoch."""
    return hmac.compare_digest(answer, vouch(secret, challenge, worker_id=worker_id, address=address, epoch=epoch))
