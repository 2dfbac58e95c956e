"""Which arrival rate to try next on the way to the goodput knee: the highest at which targets are kept. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.metrics import LatencyTargets, latency_of
from twostep.lab.bench.serve.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Tried:
    """A rate, and whether enough of its requests met all targets."""

    rate: float
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Doubles from `first` until a rate fails (or halves until one passes), then halves the interval between the highest that passed
    and the lowest above it that failed, until these lie within `resolution` of each other."""

    first: float
    resolution: float = 0.05  # relative
    max_points: int = 16
    max_halvings: int = 8  # below first / 2^this nothing is tried

    def __post_init__(self) -> None:
        if not 0 < self.first < float("inf"):
            raise InvalidRequest(f"the sweep begins at {self.first:g} requests per second; give a rate above 0")

    def next_rate(self, tried: Sequence[Tried]) -> float | None:
        """None: done; `knee` has the result."""
        if len(tried) >= self.max_points:
            return None
        if not tried:
            return self.first
        low = knee(tried)
        if low is None:
            lowest = min(t.rate for t in tried)
            return lowest / 2 if lowest > self.first / 2**self.max_halvings else None
        above = [t.rate for t in tried if not t.passed and t.rate > low]
        if not above:
            return low * 2
        high = min(above)
        return None if high <= low * (1 + self.resolution) else (low + high) / 2


@dataclass(slots=True)
class Doom:
    """Whether a run can still pass: asked after every request that ended. True, from the first time on, once so many measured ones have
    missed a target that not enough of the `expected` can meet them all."""

    targets: LatencyTargets
    attainment: float
    expected: int  # measured requests of the whole run
    missed: int = 0

    def __call__(self, record: RequestRecord) -> bool:
        self.missed += record.measured and bool(self.targets.missed(latency_of(record)))
        return self.expected - self.missed < self.attainment * self.expected


def knee(tried: Sequence[Tried]) -> float | None:
    """The highest rate that passed; None if none did."""
    return max((t.rate for t in tried if t.passed), default=None)
