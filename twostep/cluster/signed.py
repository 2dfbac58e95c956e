"""Signs what processes of a deployment write in Redis for each other: someone who can write to Redis, and does not have the deployment's
secret, can take away what is there or put back what was there before, and cannot make anything up.

    object   a JSON object whose last field is "mac": {...,"mac":"<64 hexadecimal digits>"}. Readers of older versions pass the field over
    value    any other text, a space, and the same 64 digits

The MAC is HMAC-SHA256 of the text before it and of its place (`where`: the parts of its key that the text itself does not say), under a key
for one purpose. It is checked before anything is parsed.
"""

from __future__ import annotations

import hashlib
import hmac

from twostep.errors import Unauthenticated
from twostep.keys.secret import purpose_key

RECORDS = "twostep.redis.worker.v1"
DECISIONS = "twostep.redis.decision.v1"
DEMAND = "twostep.redis.demand.v1"
API_KEYS = "twostep.redis.api-keys.v1"
RESPONSES = "twostep.redis.responses.v1"

_DIGITS = 2 * hashlib.sha256().digest_size
_HEAD, _TAIL = ',"mac":"', '"}'
_SIGNED = len(_HEAD) + _DIGITS + len(_TAIL)


class Signer:
    """Signs and reads for one purpose. `purpose` is one of those above."""

    def __init__(self, secret: bytes, purpose: str) -> None:
        self._key = purpose_key(secret, purpose)

    def sign_object(self, text: str) -> str:
        """Returns the text of a JSON object, which has a field at least, with its MAC as the last field."""
        assert text.startswith('{"'), "only objects with fields are signed"
        return f"{text[:-1]}{_HEAD}{self._mac(text.encode(), ())}{_TAIL}"

    def read_object(self, signed: bytes) -> bytes:
        """Returns the object without its MAC. Raises Unauthenticated."""
        body, end = signed[:-_SIGNED] + b"}", signed[-_SIGNED:]
        head, digits = end[: len(_HEAD)], end[len(_HEAD) : len(_HEAD) + _DIGITS]
        if head != _HEAD.encode() or not end.endswith(_TAIL.encode()):
            raise Unauthenticated("it is not signed")
        self._check(body, digits, ())
        return body

    def sign_value(self, text: str, *where: str) -> str:
        """Returns the text with its MAC behind it."""
        return f"{text} {self._mac(text.encode(), where)}"

    def read_value(self, signed: bytes, *where: str) -> bytes:
        """Returns the text without its MAC. Raises Unauthenticated."""
        body, space, digits = signed.rpartition(b" ")
        if not space:
            raise Unauthenticated("it is not signed")
        self._check(body, digits, where)
        return body

    def _check(self, body: bytes, digits: bytes, where: tuple[str, ...]) -> None:
        if not hmac.compare_digest(digits, self._mac(body, where).encode()):
            raise Unauthenticated("it is signed with another secret, or was changed")

    def _mac(self, body: bytes, where: tuple[str, ...]) -> str:
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        # With its length, so that no two sets of parts read alike.
        for part in where:
            raw = part.encode("utf-8", "surrogatepass")
            mac.update(len(raw).to_bytes(8, "little") + raw)
        mac.update(body)
        return mac.hexdigest()
