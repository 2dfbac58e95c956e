"""One read over NIXL, from the event loop that wants it to the agent's thread that does it, and to its end.

waiting ──▶ reading ──▶ landing ──▶ ended          `abandon` before it lands: the read goes on, and nothing lands
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from kv_transfer.nixl.endpoint import Descriptors


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that stays registered for the agent's life. `memory` is "DRAM" or "VRAM"."""

    address: int
    num_bytes: int
    memory: str
    device: int


@dataclass(frozen=True, slots=True)
class Peer:
    """An agent elsewhere, by its name, and its metadata, which the first read from it loads."""

    name: str
    metadata: bytes


class Landing(Protocol):
    """What is done with the bytes that a read brought. Used in the agent's thread only."""

    def prepare(self) -> None:
        """Once the read is posted."""
        ...

    def begin(self) -> None:
        """All bytes are here."""
        ...

    def done(self) -> bool:
        """Whether what was begun has ended; does not block."""
        ...


class Read:
    """One read, from `start_read` to its end."""

    def __init__(self, peer: Peer, near: Descriptors, near_memory: str, far: Descriptors, far_memory: str, landing: Landing | None) -> None:
        self.peer = peer
        self.near, self.near_memory = near, near_memory
        self.far, self.far_memory = far, far_memory
        self.landing = landing
        # Ends when nothing of the read, nor of its landing, can be written any more; fails with Unavailable where the peer or the path
        # is gone, and with what the landing raised.
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # it cannot be cancelled
        # Seconds from the last byte's arrival to the end of the landing.
        self.landing_s = 0.0
        # Why the landing could not be prepared: nothing lands.
        self.unprepared: Exception | None = None
        self.handle: Any = None
        self.posted_at = self.arrived_at = 0.0
        self._lock = threading.Lock()
        self._abandoned = False
        self._landing_begun = False

    def abandon(self) -> bool:
        """Nobody wants it any more. True: nothing will land, though the read itself may go on up to `ended`. False: it is landing, or has;
        `ended` comes within milliseconds."""
        with self._lock:
            self._abandoned = not self._landing_begun
            return self._abandoned

    def may_land(self) -> bool:
        """The agent's thread asks once, before it lets anything land."""
        with self._lock:
            self._landing_begun = self.landing is not None and not self._abandoned
            return self._landing_begun

    @property
    def is_landing(self) -> bool:
        return self._landing_begun
