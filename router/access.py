"""Who calls, and what that caller may do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """`tenant`: whose share of the system the caller uses. None: nobody knows, and the request may say."""

    tenant: str | None = None
