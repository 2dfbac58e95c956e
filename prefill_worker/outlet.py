"""One transport as the source uses it: whether it can take a lease, and its budget, of which a lease takes its part whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kv_transfer.transport import KvTransport
from kv_transfer.transports import Transports
from kv_transfer.waiting import FifoGate
from twostep.errors import Incompatible, InvalidRequest, Unavailable


class Outlet:
    """Leases that each held a part of the budget and waited for the rest would wait for each other: so a lease's room is taken before its
    first chunk is published, first come, first served, and given back once it holds nothing any more."""

    def __init__(self, transport: KvTransport) -> None:
        self.transport = transport
        self._promised_bytes = 0
        self._room = FifoGate(f"published KV of the {transport.name} transport")

    @property
    def name(self) -> str:
        return self.transport.name

    def fits(self, num_bytes: int) -> bool:
        """Whether so much could ever be published under one lease."""
        most = self.transport.max_lease_bytes
        return not most or num_bytes <= most

    async def take(self, num_bytes: int, *, deadline: float) -> None:
        """Raises ResourceExhausted at the deadline (monotonic seconds)."""

        def attempt() -> bool | None:
            most = self.transport.max_lease_bytes
            if most and self._promised_bytes + num_bytes > most:
                return None
            self._promised_bytes += num_bytes
            return True

        await self._room.take(attempt, deadline=deadline)

    def give_back(self, num_bytes: int) -> None:
        self._promised_bytes -= num_bytes
        self._room.pump()


class Outlets:
    """Those of one worker, best first."""

    def __init__(self, transports: Transports) -> None:
        self.transports = transports
        self._by_name: dict[str, Outlet] = {}

    def _find(self, names: Iterable[str]) -> list[Outlet]:
        """Those that are here."""
        found = [transport for name in names if (transport := self.transports.get(name)) is not None]
        return [self._by_name.setdefault(transport.name, Outlet(transport)) for transport in found]

    def check_size(self, num_bytes: int) -> None:
        """A lease that could never be published whole would wait for room until its deadline. Raises Unavailable (nothing is ready) and
        InvalidRequest."""
        ready = self._find(transport.name for transport in self.transports.ready)
        if not ready:
            raise Unavailable(
                f"no KV transport is ready on this worker (it has {', '.join(self.transports.names)}); they come back by themselves, "
                "try another worker"
            )
        if not any(outlet.fits(num_bytes) for outlet in ready):
            most = max(outlet.transport.max_lease_bytes for outlet in ready)
            raise InvalidRequest(
                f"the prompt's KV cache takes {num_bytes} bytes and this worker hands over {most} at most; shorten the prompt, "
                "or raise --kv-budget-bytes (and the object store)"
            )

    def choose(self, offered: Sequence[str], num_bytes: int) -> Outlet:
        """The reader's first that can be used here. `offered` empty: any that copies out, which asks nothing of the reader but to fetch.
        Raises Incompatible (nothing in common, ever) and Unavailable."""
        names = offered or [transport.name for transport in self.transports if transport.copies_out]
        known = self._find(names)
        for outlet in known:
            if outlet.transport.ready and outlet.fits(num_bytes):
                return outlet
        if not known:
            raise Incompatible(
                f"the decode worker fetches by {', '.join(names) or 'nothing'}, this worker publishes by "
                f"{', '.join(self.transports.names)}; align --kv-transfer"
            )
        raise Unavailable(
            f"of the KV transports in common ({', '.join(outlet.name for outlet in known)}) none is ready or large enough on the prefill "
            "worker; they come back by themselves"
        )
