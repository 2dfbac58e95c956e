"""Workers refuse calls of processes whose version is too far from theirs (twostep/version_skew.py).

Every channel between processes says its version at the head of its user agent, `twostep/0.1.0 grpc-python-asyncio/...`: a header that each
call carries anyway. Callers without one are older than that, or not ours.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from twostep.errors import Incompatible
from twostep.version_skew import UNSAID, version_in_agent, why_not

log = logging.getLogger(__name__)

# Callers that were refused are remembered, so that each is said once; no more of them.
_MAX_SAID = 256


class VersionGate:
    """In front of `services`, by their full names. All others (health, reflection, administration) are for every version."""

    def __init__(self, version: str, services: Collection[str], *, us: str) -> None:
        """`us`: who refuses, for the reason."""
        self._version = version
        self._prefixes = tuple(f"/{name}/" for name in services)
        self._us = us
        self._said: set[str] = set()

    def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        if method.startswith(self._prefixes):
            theirs = _version_in(metadata)
            if reason := why_not(self._version, theirs, us=self._us, them="the caller"):
                if theirs not in self._said and len(self._said) < _MAX_SAID:
                    self._said.add(theirs)
                    log.warning("calls of %s are refused: %s", method, reason)
                raise Incompatible(reason)
        return ""


def _version_in(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        if key == "user-agent":
            return version_in_agent(value if isinstance(value, str) else value.decode("latin-1"))
    return UNSAID
