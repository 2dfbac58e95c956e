"""The deployment secret: one file, the same on every process, that keys tickets, prefix hashes and calls between processes."""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from pathlib import Path

from twostep.errors import SetupError

MIN_SECRET_BYTES = 16


_MAC_BYTES = hashlib.sha256().digest_size


class SigningKeys:
    """Keys of one purpose, one for each secret. A message is signed with all of them, and any one's signature will do: so processes that
    have a secret in common understand each other, whichever of them was restarted with a new one already."""

    __slots__ = ("_keys",)

    def __init__(self, *keys: bytes) -> None:
        self._keys = keys

    def sign(self, message: bytes) -> bytes:
        """Returns HMAC-SHA256 of the message under each key, one behind the other."""
        return b"".join(hmac.digest(key, message, hashlib.sha256) for key in self._keys)

    def is_signed(self, message: bytes, signature: bytes) -> bool:
        """Returns whether one of the keys has signed. In constant time, whatever the signature is but its length."""
        if not signature or len(signature) % _MAC_BYTES or len(signature) > MAX_SIGNATURE_BYTES:
            return False
        given = [signature[start : start + _MAC_BYTES] for start in range(0, len(signature), _MAC_BYTES)]
        own = [hmac.digest(key, message, hashlib.sha256) for key in self._keys]
        return sum(hmac.compare_digest(mine, theirs) for mine in own for theirs in given) > 0


# Of the deployment's secret and the former one.
MAX_SIGNATURE_BYTES = 2 * _MAC_BYTES


@dataclass(frozen=True, slots=True)
class DeploymentSecret:
    """The secret, and while it is being changed the former one (docs/access.md). What one process alone derives, as keys of prefix hashes,
    follows from `own`."""

    own: bytes = field(repr=False)
    former: bytes = field(default=b"", repr=False)

    @property
    def accepted(self) -> tuple[bytes, ...]:
        return (self.own, self.former) if self.former else (self.own,)

    @property
    def keys(self) -> SigningKeys:
        """The secrets themselves as keys, for messages that begin with a domain of their own."""
        return SigningKeys(*self.accepted)

    def keys_for(self, purpose: str) -> SigningKeys:
        return SigningKeys(*(purpose_key(secret, purpose) for secret in self.accepted))


def load_secret(path: Path | None, *, former: Path | None = None, of_running: bool = False) -> DeploymentSecret:
    """The files' bytes without white space at either end. `of_running`: for whoever speaks to a deployment that runs already, where a new
    secret would open nothing. Raises SetupError (not given, unreadable, too short, twice the same)."""
    if path is None:
        made = "give the one that its processes have; `twostep up` keeps it beside the logs that it names"
        make = "make one with `openssl rand -hex 32 > secret` and give it to every process"
        raise SetupError(f"--secret-file is missing; {made if of_running else make}")
    own = _read("--secret-file", path)
    if former is None:
        return DeploymentSecret(own)
    before = _read("--former-secret-file", former)
    if before == own:
        raise SetupError(
            f"--former-secret-file {former} and --secret-file {path} hold the same secret; give the former one, or leave it out"
        )
    return DeploymentSecret(own, before)


def _read(flag: str, path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise SetupError(f"{flag} {path}: {error.strerror}; give a readable file") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise SetupError(f"{flag} {path} holds {len(secret)} bytes; give at least {MIN_SECRET_BYTES}, for example `openssl rand -hex 32`")
    return secret


def purpose_key(secret: bytes, purpose: str) -> bytes:
    """Returns a key of 32 bytes for one purpose: HMAC-SHA256 of the purpose's label under the secret. It tells nothing about the secret or
    the keys of other purposes. A label names what the key does and a version, such as `twostep.system-key.v1`."""
    return hmac.new(secret, purpose.encode(), hashlib.sha256).digest()


def secret_check(secret: DeploymentSecret) -> str:
    """Returns what tells whether two processes have a secret in common (`in_common`), and tells nothing else about them."""
    return " ".join(purpose_key(each, "twostep secret check 1").hex()[:32] for each in secret.accepted)


def in_common(one: str, other: str) -> bool:
    """Returns whether two processes, each with what `secret_check` returned there, have a secret in common."""
    return not set(one.split()).isdisjoint(other.split())


# ---- how a worker shows that it lives: in the name of its present life at its address, whatever Redis says -----------------------

CHALLENGE_BYTES = 16
_PURPOSE = "twostep.keys.vouch.v1"


def vouch(secret: DeploymentSecret, challenge: bytes, *, worker_id: str, address: str, epoch: int) -> bytes:
    """Returns the answer to a challenge of any length. It is signed under a key for this alone."""
    return secret.keys_for(_PURPOSE).sign(_vouched(challenge, worker_id, address, epoch))


def is_vouched(answer: bytes, secret: DeploymentSecret, challenge: bytes, *, worker_id: str, address: str, epoch: int) -> bool:
    """Returns whether whoever answered has the secret, and lives there under that name and epoch."""
    return secret.keys_for(_PURPOSE).is_signed(_vouched(challenge, worker_id, address, epoch), answer)


def _vouched(challenge: bytes, worker_id: str, address: str, epoch: int) -> bytes:
    parts = (challenge, worker_id.encode("utf-8", "surrogatepass"), address.encode("utf-8", "surrogatepass"))
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts) + struct.pack("<Q", epoch)
