"""Prefix hashes: what the router, the index and the block pools call the same piece of prompt. Torch-free and numpy-free.

    key   = HMAC-SHA256(deployment secret, tenant, salt, model fingerprint, dtype, quantization)
    hash  = HMAC-SHA256(key, every token id before the boundary, each as 4 bytes little-endian)[:16]

A hash names everything before its boundary and knows nothing of the unit it was asked at: a pool hashes at every block, the
router at every hash unit, and where the boundaries meet the hashes are equal. Without the key, a hash tells nothing of the
tokens, and two tenants, salts, models or KV formats never meet.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections.abc import Sequence

from twostep.errors import InvalidRequest
from twostep.keys.secret import DeploymentSecret

HASH_BYTES = 16
# HMAC's two pads, over each byte of a key.
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Canonical bytes of token ids: uint32, little-endian. Raises InvalidRequest for an id that is none."""
    try:
        ids = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(f"token ids are whole numbers from 0 to 4294967295: {error}") from error
    assert ids.itemsize == 4, "C's unsigned int has 4 bytes wherever CPython runs"
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def derive_key(
    secret: DeploymentSecret, *, tenant: str, salt: str, model_fingerprint: str, dtype: str, quantization: str = "none"
) -> bytes:
    """The key under which one tenant's (and salt's) prefixes of one model in one KV format are hashed. Every field goes in with
    its length, so that no two sets of fields read alike."""
    fields = [field.encode() for field in (tenant, salt, model_fingerprint, dtype, quantization)]
    counted = b"".join(len(raw).to_bytes(8, "little") + raw for raw in fields)
    return hmac.digest(secret.own, b"twostep prefix key 1" + counted, hashlib.sha256)


class PrefixHasher:
    """Hashes of one growing sequence: one pass, whatever the number of boundaries."""

    def __init__(self, key: bytes, unit: int) -> None:
        """`unit`: tokens from one boundary to the next, at least 1."""
        if unit < 1:
            raise InvalidRequest(f"hash unit is {unit}; give at least 1 token")
        # HMAC by its definition (RFC 2104): copying an object of the hmac module at each boundary takes twice as long.
        block = (key if len(key) <= 64 else hashlib.sha256(key).digest()).ljust(64, b"\0")
        self._inner = hashlib.sha256(block.translate(_INNER))
        self._outer = hashlib.sha256(block.translate(_OUTER))
        self.unit = unit
        self._num_bytes = 0
        self.hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far; `hashes` holds one for every full unit of them."""
        return self._num_bytes // 4

    def extend(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """Takes in the next tokens and returns the hashes of the boundaries they reach."""
        data = memoryview(token_bytes(token_ids))
        inner, unit = self._inner, 4 * self.unit
        known = len(self.hashes)
        start, end = 0, unit - self._num_bytes % unit
        while end <= len(data):
            inner.update(data[start:end])
            outer = self._outer.copy()
            outer.update(inner.digest())
            self.hashes.append(outer.digest()[:HASH_BYTES])
            start, end = end, end + unit
        inner.update(data[start:])
        self._num_bytes += len(data)
        return self.hashes[known:]


def prefix_hashes(key: bytes, token_ids: Sequence[int], unit: int) -> list[bytes]:
    """The hash at every multiple of `unit` tokens; a last part of less than a unit has none."""
    return list(PrefixHasher(key, unit).extend(token_ids))
