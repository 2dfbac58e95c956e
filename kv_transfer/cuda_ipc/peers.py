"""Peers' pools as this process's kernels see them: opened once, kept while they are used, closed when the peer is gone.

The driver keeps a dead process's GPU memory until the last mapping of it is closed, so that a read under way ends as if nothing had
happened; and so that a mapping nobody closes would keep a restarted worker from getting its pool.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.cuda_ipc.endpoint import IpcEndpoint, ProcessId
from twostep.errors import ResourceExhausted, Unavailable

_MAX_PEERS = 64
# Of peers whose process cannot be watched (another PID namespace): longer than between two probes of a living one.
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class PeerPool:
    """Addresses of a peer's pool and of its probe region."""

    pool: int
    probe: int


class Opener(Protocol):
    """What the operating system and the driver do."""

    def open(self, endpoint: IpcEndpoint) -> tuple[PeerPool, Callable[[], None]]:
        """The pool, and what closes it. Blocks for milliseconds. Raises Unavailable."""
        ...


@dataclass(slots=True)
class _Mapping:
    endpoint: IpcEndpoint
    pool: PeerPool
    close: Callable[[], None]
    last_used: float
    users: int = 0


class IpcPeers:
    """Safe from any thread. Methods block for milliseconds where something is opened or closed."""

    def __init__(
        self, opener: Opener, own: ProcessId, *, max_peers: int = _MAX_PEERS, idle_s: float = _IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._opener = opener
        self._own = own
        self._max_peers = max_peers
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()
        self._mappings: OrderedDict[str, _Mapping] = OrderedDict()

    @property
    def num_open(self) -> int:
        return len(self._mappings)

    @contextmanager
    def pool_of(self, endpoint: IpcEndpoint) -> Iterator[PeerPool]:
        """It stays open within. Raises Unavailable (the peer is gone, or cannot be read from here) and ResourceExhausted."""
        with self._lock:
            if endpoint.process.gone(self._own):
                raise Unavailable(f"the KV source, process {endpoint.process.pid}, has ended; prefill again")
            mapping = self._mappings.get(endpoint.life)
            if mapping is None:
                self._make_room()
                pool, close = self._opener.open(endpoint)
                mapping = self._mappings[endpoint.life] = _Mapping(endpoint, pool, close, self._clock())
            elif mapping.endpoint != endpoint:
                raise Unavailable(f"there are two cuda_ipc endpoints of life {endpoint.life}; prefill again")
            mapping.users += 1
            self._mappings.move_to_end(endpoint.life)
        try:
            yield mapping.pool
        finally:
            with self._lock:
                mapping.users -= 1
                mapping.last_used = self._clock()

    def sweep(self) -> None:
        """Closes what nobody reads of peers that are gone, or that were not read for long and cannot be watched."""
        with self._lock:
            for mapping in list(self._mappings.values()):
                gone = mapping.endpoint.process.gone(self._own)
                if gone or (gone is None and self._clock() - mapping.last_used > self._idle_s):
                    self._close(mapping)

    def close(self) -> None:
        """Nothing may be read any more."""
        with self._lock:
            for mapping in list(self._mappings.values()):
                assert not mapping.users
                self._close(mapping)

    def _make_room(self) -> None:
        for mapping in list(self._mappings.values()):
            if len(self._mappings) < self._max_peers:
                return
            self._close(mapping)
        if len(self._mappings) >= self._max_peers:
            raise ResourceExhausted(f"the pools of {self._max_peers} peers are being read at once; try again, or another worker")

    def _close(self, mapping: _Mapping) -> None:
        if not mapping.users:
            del self._mappings[mapping.endpoint.life]
            mapping.close()
