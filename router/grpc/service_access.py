"""API keys over gRPC: whoever shows none is refused before its message is read, whatever it asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.access.account import Identity
from router.access.control import Access
from router.request.targets import TENANT_HEADER

# Whoever calls with the deployment's own key; no key's id has a space.
_SYSTEM = "the deployment"

Plain = Sequence[tuple[str, str]]


def plain_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> Plain:
    return [(key, value if isinstance(value, str) else value.decode("utf-8", "replace")) for key, value in metadata or ()]


def identify(access: Access, metadata: Plain, *, peer: str = "") -> Identity:
    """`peer` as gRPC names it, with a port. Raises Unauthenticated. Of what is said twice, the last counts."""
    told = dict(metadata)
    return access.identify(told.get("authorization"), told.get(TENANT_HEADER), address=peer.rpartition(":")[0])


class KeyGate:
    """Which calls show a key, where keys are asked for."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def admit(self, _method: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """See twostep.rpc.guard.Admit. A key's calls are one caller's, whatever connections they come over. Raises Unauthenticated."""
        if not self._access.enabled:
            return ""
        return identify(self._access, plain_metadata(metadata)).key_id or _SYSTEM
