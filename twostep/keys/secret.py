"""The deployment secret: one file, the same on every process, that keys tickets, prefix hashes and calls between processes."""

from __future__ import annotations

import hashlib
import hmac
import struct
from pathlib import Path

from twostep.errors import SetupError

MIN_SECRET_BYTES = 16


def load_secret(path: Path | None, *, of_running: bool = False) -> bytes:
    """The file's bytes without white space at either end. `of_running`: for whoever speaks to a deployment that runs already, where a new
    secret would open nothing. Raises SetupError (not given, unreadable, too short)."""
    if path is None:
        made = "give the one that its processes have; `twostep up` keeps it beside the logs that it names"
        make = "make one with `openssl rand -hex 32 > secret` and give it to every process"
        raise SetupError(f"--secret-file is missing; {made if of_running else make}")
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise SetupError(f"--secret-file {path}: {error.strerror}; give a readable file") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise SetupError(
            f"--secret-file {path} holds {len(secret)} bytes; give at least {MIN_SECRET_BYTES}, for example `openssl rand -hex 32`"
        )
    return secret


def purpose_key(secret: bytes, purpose: str) -> bytes:
    """Returns a key of 32 bytes for one purpose: HMAC-SHA256 of the purpose's label under the secret. It tells nothing about the secret or
    the keys of other purposes. A label names what the key does and a version, such as `twostep.system-key.v1`."""
    return hmac.new(secret, purpose.encode(), hashlib.sha256).digest()


# ---- how a worker shows that it lives: in the name of its present life at its address, whatever Redis says -----------------------

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
