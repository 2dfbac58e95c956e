"""How urgent a request is. Lower goes first."""

from __future__ import annotations

from enum import IntEnum

# Of a request's targets; what is above is no target.
MAX_TARGET_MS = 3_600_000


class RequestClass(IntEnum):
    """BATCH fills the gaps that the others leave, and gives way to them within one step."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2
