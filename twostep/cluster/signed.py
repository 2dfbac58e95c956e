"""Signs what processes of a deployment write in Redis for each other: someone who can write to Redis, and does not have the deployment's
secret, can take away what is there or put back what was there before, and cannot make anything up.

    object   a JSON object whose last field is "mac": {...,"mac":"<64 hexadecimal digits>"}. Readers of older versions pass the field over
    value    any other text, a space, and the same 64 digits

While the deployment's secret is being changed there are 128 digits: 64 of the new one and 64 of the former.

The MAC is HMAC-SHA256 of the text before it and of its place (`where`: the parts of its key that the text itself does not say), under a key
for one purpose. It is checked before anything is parsed.
"""

from __future__ import annotations

import re

from twostep.errors import Unauthenticated
from twostep.keys.secret import DeploymentSecret

RECORDS = "twostep.redis.worker.v1"
DECISIONS = "twostep.redis.decision.v1"
DEMAND = "twostep.redis.demand.v1"
API_KEYS = "twostep.redis.api-keys.v1"
RESPONSES = "twostep.redis.responses.v1"

_HEAD, _TAIL = b',"mac":"', b'"}'


class Signer:
    """Signs and reads for one purpose. `purpose` is one of those above."""

    def __init__(self, secret: DeploymentSecret, purpose: str) -> None:
        self._keys = secret.keys_for(purpose)

    def sign_object(self, text: str) -> str:
        """Returns the text of a JSON object, which has a field at least, with its MAC as the last field."""
        assert text.startswith('{"'), "only objects with fields are signed"
        return f"{text[:-1]}{_HEAD.decode()}{self._signature(text, ())}{_TAIL.decode()}"

    def read_object(self, signed: bytes) -> bytes:
        """Returns the object without its MAC. Raises Unauthenticated."""
        body, head, end = signed.rpartition(_HEAD)
        if not head or not end.endswith(_TAIL):
            raise Unauthenticated("it is not signed")
        self._check(body + b"}", end[: -len(_TAIL)], ())
        return body + b"}"

    def sign_value(self, text: str, *where: str) -> str:
        """Returns the text with its MAC behind it."""
        return f"{text} {self._signature(text, where)}"

    def read_value(self, signed: bytes, *where: str) -> bytes:
        """Returns the text without its MAC. Raises Unauthenticated."""
        body, space, digits = signed.rpartition(b" ")
        if not space:
            raise Unauthenticated("it is not signed")
        self._check(body, digits, where)
        return body

    def _signature(self, text: str, where: tuple[str, ...]) -> str:
        return self._keys.sign(_placed(text.encode(), where)).hex()

    def _check(self, body: bytes, digits: bytes, where: tuple[str, ...]) -> None:
        # In the form in which it is written alone: neither capitals nor spaces.
        given = bytes.fromhex(digits.decode()) if _DIGITS.fullmatch(digits) else b""
        if not self._keys.is_signed(_placed(body, where), given):
            raise Unauthenticated("it is signed with another secret, or was changed")


_DIGITS = re.compile(rb"(?:[0-9a-f]{64}){1,2}")


def _placed(body: bytes, where: tuple[str, ...]) -> bytes:
    """The text behind the parts of its place, each with its length, so that no two sets of parts read alike."""
    raw = [part.encode("utf-8", "surrogatepass") for part in where]
    return b"".join(len(part).to_bytes(8, "little") + part for part in raw) + body
