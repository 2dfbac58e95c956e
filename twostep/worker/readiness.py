"""Tells a worker's health service whether the worker takes new work, and logs why it does not."""

from __future__ import annotations

import logging

from twostep.rpc.health import READINESS, HealthBoard
from twostep.worker.life import Life

log = logging.getLogger(__name__)


class Readiness:
    """A worker that is ready itself is still of no use where KV has no way: both are said, and said again when that changes."""

    def __init__(self, worker_id: str, health: HealthBoard) -> None:
        self._worker_id = worker_id
        self._health = health
        self._announced = False
        self.why_of_no_use = ""

    def announced(self) -> None:
        """It stands in Redis: from now on it may be ready."""
        self._announced = True

    def tell(self, life: Life, ready: bool) -> None:
        """At its start, when it changes its role, and with every heartbeat."""
        why = life.why_of_no_use if ready else ""
        if why and not self.why_of_no_use:
            log.warning("%s is not ready: %s", self._worker_id, why)
        elif self.why_of_no_use and not why and ready:
            log.info("%s is ready: KV travels by %s", self._worker_id, ", ".join(life.edge.ready_transports))
        self.why_of_no_use = why
        self._health.set(READINESS, self._announced and ready and not why)
