"""Which router a request goes to, and over which connection. No grpc and no clock of its own: both clients use it, and so do tests.

A router is *well* until a call to it fails with UNAVAILABLE, or its deadline passes without a word. From then on new requests go to the
others, and it is asked for its health (`grpc.health.v1`, service "readiness"): at once, since what failed may have been a worker behind
it, and then whenever a request is sent and a second has passed. It is well again when it says so, or when it answers a request that was
sent to it because none was well. Nothing runs between requests: no thread, no timer, no stream on the router for each of its clients.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from twostep.client._types import RouterState

W = TypeVar("W")

# Peers and proxies commonly allow a hundred streams or so on one HTTP/2 connection; more would wait in the channel unseen.
STREAMS_PER_CONNECTION = 100
PROBE_EVERY_S = 1.0
# gRPC looks a name up again only when a connection is lost: without this, new replicas behind a name would stay idle.
RENEW_NAMES_AFTER_S = 300.0


@dataclass(eq=False, slots=True)
class Connection(Generic[W]):
    wire: W
    opened: float
    num_open: int = 0


@dataclass(eq=False, slots=True)
class RouterEndpoint(Generic[W]):
    """One target. `num_failures` tells a call begun before the last failure, whose success says nothing, from one begun after."""

    target: str
    is_name: bool = False
    connections: list[Connection[W]] = field(default_factory=list)
    retired: list[Connection[W]] = field(default_factory=list)
    num_open: int = 0
    well: bool = True
    num_failures: int = 0
    failed_at: float = 0.0
    probing: bool = False
    probe_at: float = 0.0


@dataclass(eq=False, slots=True)
class HealthProbe(Generic[W]):
    router: RouterEndpoint[W]
    wire: W
    num_failures: int
    # The call that asks, for as long as it is under way.
    held: object = None


class ConnectionLease(Generic[W]):
    """A place for one call on one connection, until released."""

    __slots__ = ("_connection", "_held", "_num_failures", "_pool", "_router")

    def __init__(self, pool: Pool[W], router: RouterEndpoint[W], connection: Connection[W]) -> None:
        """With the pool's lock held."""
        self._pool, self._router, self._connection = pool, router, connection
        self._num_failures = router.num_failures
        self._held = True
        router.num_open += 1
        connection.num_open += 1

    @property
    def target(self) -> str:
        return self._router.target

    @property
    def wire(self) -> W:
        return self._connection.wire

    def release(self) -> None:
        """The call has ended, however it did. From any thread, any number of times."""
        with self._pool.lock:
            if self._held:
                self._held = False
                self._router.num_open -= 1
                self._connection.num_open -= 1

    def abandon(self) -> None:
        """Something from outside (Ctrl-C) came out of the midst of grpc's own code, which then may keep its locks for ever: no further call
        takes this connection. It is not closed, which would wait for those locks."""
        with self._pool.lock:
            for connections in (self._router.connections, self._router.retired):
                if self._connection in connections:
                    connections.remove(self._connection)
        self.release()

    def answered(self) -> None:
        """The router has said something of its own: it is well, unless it has failed since the call began (a router that drains goes on
        with the answers it has begun)."""
        router = self._router
        if not router.well:
            with self._pool.lock:
                router.well = router.num_failures == self._num_failures

    def failed(self) -> None:
        """The call failed in a way that speaks against the router."""
        router = self._router
        with self._pool.lock:
            router.well = False
            router.num_failures += 1
            router.failed_at = router.probe_at = self._pool.clock()


class Pool(Generic[W]):
    """Thread-safe. `open_wire(target)` makes a connection that connects when it is first used."""

    def __init__(
        self,
        routers: Sequence[RouterEndpoint[W]],
        open_wire: Callable[[str], W],
        *,
        max_connections: int,
        clock: Callable[[], float] = time.monotonic,
        draw: random.Random | None = None,
    ) -> None:
        assert routers, "checked where the targets are read"
        self._routers = tuple(routers)
        self._open_wire, self._max_connections, self.clock = open_wire, max_connections, clock
        self._draw = draw or random.Random()
        # Reentrant: the collector may run a generation's __del__, which releases its lease, while this very thread holds it.
        self.lock = threading.RLock()
        # By the client that has it: what ends now was ended by it.
        self.closed = False

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(router.target for router in self._routers)

    def take(self, avoid: Collection[str] = ()) -> ConnectionLease[W]:
        """A place at the router that has least to do, at one not in `avoid` if any other is well."""
        with self.lock:
            router = choose(self._routers, avoid, self._draw)
            return ConnectionLease(self, router, self._connection(router))

    def elsewhere(self, tried: Collection[str]) -> bool:
        return any(router.well and router.target not in tried for router in self._routers)

    def states(self) -> tuple[RouterState, ...]:
        return tuple(
            RouterState(target=router.target, well=router.well, num_open=router.num_open, num_connections=len(router.connections))
            for router in self._routers
        )

    # ---- health -------------------------------------------------------------------------------------------------------

    def due(self) -> list[HealthProbe[W]]:
        """The questions to be asked now. With one router alone there is nothing to choose, and nothing is asked."""
        if len(self._routers) == 1 or all(router.well for router in self._routers):
            return []
        with self.lock:
            now = self.clock()
            due = [router for router in self._routers if not router.well and not router.probing and now >= router.probe_at]
            for router in due:
                router.probing = True
            return [HealthProbe(router, self._connection(router).wire, router.num_failures) for router in due]

    def probed(self, probe: HealthProbe[W], *, well: bool) -> None:
        """A router's word on itself; it does not count if the router has failed since it was asked."""
        with self.lock:
            router = probe.router
            router.probing = False
            if router.num_failures != probe.num_failures:
                return
            router.well = router.well or well
            router.probe_at = self.clock() + PROBE_EVERY_S * self._draw.uniform(0.75, 1.25)

    # ---- connections --------------------------------------------------------------------------------------------------

    def _connection(self, router: RouterEndpoint[W]) -> Connection[W]:
        """The router's connection with the fewest streams; a new one if all have enough, and there may be more."""
        now = self.clock()
        if router.is_name:
            old = [connection for connection in router.connections if now - connection.opened >= RENEW_NAMES_AFTER_S]
            router.retired += old
            router.connections = [connection for connection in router.connections if connection not in old]
        best = min(router.connections, key=lambda connection: connection.num_open, default=None)
        if best is None or (best.num_open >= STREAMS_PER_CONNECTION and len(router.connections) < self._max_connections):
            best = Connection(self._open_wire(router.target), now)
            router.connections.append(best)
        return best

    def worn(self) -> list[W]:
        """Connections that are out of use by now, for the client to close."""
        if not any(router.retired for router in self._routers):
            return []
        with self.lock:
            wires = []
            for router in self._routers:
                wires += [connection.wire for connection in router.retired if not connection.num_open]
                router.retired = [connection for connection in router.retired if connection.num_open]
            return wires

    def wires(self) -> list[W]:
        with self.lock:
            return [connection.wire for router in self._routers for connection in (*router.connections, *router.retired)]


def choose(routers: Sequence[RouterEndpoint[W]], avoid: Collection[str], draw: random.Random) -> RouterEndpoint[W]:
    """The well router with the fewest calls of this client under way, among equals any; one in `avoid` only if no other is well. If none
    is well, the one that failed longest ago.

    All counts are this client's own and exact, so that it compares all of them: power-of-two-choices is for stale counts."""
    well = [router for router in routers if router.well]
    candidates = [router for router in well if router.target not in avoid] or well
    if candidates:
        fewest = min(router.num_open for router in candidates)
        return draw.choice([router for router in candidates if router.num_open == fewest])
    return min(routers, key=lambda router: (router.target in avoid, router.failed_at))
