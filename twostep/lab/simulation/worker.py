"""A simulated pod with its worker: it starts, serves in one role, drains to end or to take the other role, or is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostep.autoscaler.model import Role
from twostep.lab.simulation.decode_side import DecodeSide
from twostep.lab.simulation.hardware import Hardware
from twostep.lab.simulation.prefill_side import PrefillSide


@dataclass(slots=True, eq=False)
class SimWorker:
    """`owner` is the Deployment that made the pod, `role` what the worker does now. Instants in seconds since the start."""

    number: int
    owner: Role
    role: Role
    created_at: float
    side: PrefillSide | DecodeSide | None = None  # None: it starts, or switches
    alive: bool = True
    ready_at: float = math.inf  # in its present role
    first_ready_at: float = math.inf
    draining: bool = False
    drain_until: float = math.inf
    terminating: bool = False
    switch_to: Role | None = None

    @property
    def worker_id(self) -> str:
        return f"{self.owner}-{self.number}"

    @property
    def serving(self) -> bool:
        """Routers may send it something."""
        return self.alive and self.side is not None and not self.draining

    @property
    def empty(self) -> bool:
        match self.side:
            case PrefillSide() as side:
                return side.num_prompts == 0
            case DecodeSide() as side:
                return side.num_seqs == 0
        return True

    def begin(self, hardware: Hardware, now: float) -> None:
        """Ready in its role."""
        self.side = PrefillSide(hardware) if self.role == "prefill" else DecodeSide(hardware, now)
        self.ready_at = now
        self.first_ready_at = min(self.first_ready_at, now)
        self.draining = False
        self.drain_until = math.inf
        self.switch_to = None

    def drain(self, until: float, *, to: Role | None = None) -> None:
        """Nothing new comes; what runs may end until then. `to`: in order to take this role, else to end."""
        self.draining = True
        self.drain_until = until
        self.switch_to = to
        self.terminating = to is None
