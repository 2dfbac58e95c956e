"""Endpoints of one-sided transports as text for a manifest. No secrets but these: a process that has one, and the network or the
host that it speaks of, has the memory.

    {transport}:{version}:{field}:{field}: ...        numbers in decimal, bytes as base64url
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from twostep.errors import Unavailable

# Addresses have 64 bits, and so have numbers of the kernel's.
_MAX_NUMBER = 1 << 64


def endpoint_text(transport: str, version: str, fields: Sequence[str | int | bytes]) -> str:
    return ":".join((transport, version, *(base64.urlsafe_b64encode(x).decode() if isinstance(x, bytes) else str(x) for x in fields)))


def parse_endpoint(text: str, transport: str, version: str, types: Sequence[type], *, max_length: int) -> list[Any]:
    """Returns the fields, each str, int or bytes as `types` says. Raises Unavailable for text that no source of ours wrote."""
    parts = text.split(":")
    if len(text) > max_length or len(parts) != 2 + len(types) or parts[:2] != [transport, version]:
        raise Unavailable(f"{text[:40]!r} is no {transport} endpoint of version {version}; run the same version on both workers")
    try:
        return [_field(part, kind) for part, kind in zip(parts[2:], types, strict=True)]
    except (ValueError, binascii.Error):
        raise Unavailable(f"the {transport} endpoint {text[:40]!r} is damaged; prefill again") from None


def _field(text: str, kind: type) -> str | int | bytes:
    """Raises ValueError."""
    if kind is bytes:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    if kind is not int:
        return text
    number = int(text)
    if not 0 <= number < _MAX_NUMBER:
        raise ValueError(f"{number} does not have 64 bits")
    return number
