"""When requests come. Open loop: at times drawn beforehand, whatever the server does."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from twostep.errors import InvalidRequest

OpenLoop = Literal["poisson", "gamma", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """An open-loop arrival process.

    `gamma` draws gaps of mean 1/rate from a gamma distribution of shape `burstiness`, as vLLM's `--burstiness` does: below 1 requests
    come in bursts, 1 is Poisson, above 1 they come more evenly. `rate` of infinity: all at once.
    """

    kind: OpenLoop
    rate: float  # requests (conversations, where they have several turns) per second
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise InvalidRequest(f"the rate is {self.rate:g} requests per second; give one above 0, or inf for all at once")
        if not 0 < self.burstiness < math.inf:
            raise InvalidRequest(f"the burstiness is {self.burstiness:g}; give one above 0: 1 is Poisson, less comes in bursts")

    def times(self, seed: str) -> Iterator[float]:
        """Seconds since the start, ascending, without end. Processes of the same kind and seed that differ in rate alone have the same
        gaps but for a factor, so that two rates are compared on one pattern."""
        rng = random.Random(f"arrivals/{seed}")
        at = 0.0
        while True:
            at += self._gap(rng)
            yield at

    def within(self, seed: str, length_s: float) -> list[float]:
        """Times before `length_s`: rate x length of them, to the nearest, so that what is offered is the rate and not what chance made of
        it. Random gaps are drawn as by `times` and scaled together; of a Poisson process that gives the very distribution that it has
        when so many come."""
        if self.kind == "constant":
            return list(until(self.times(seed), length_s))
        num = round(self.rate * length_s)
        drawn = list(islice(self.times(seed), num + 1))
        scale = length_s / drawn[-1] if drawn[-1] > 0 else 0.0
        return [at * scale for at in drawn[:-1]]

    def _gap(self, rng: random.Random) -> float:
        if math.isinf(self.rate):
            return 0.0
        match self.kind:
            case "constant":
                return 1.0 / self.rate
            case "poisson":
                return rng.expovariate(1.0) / self.rate
            case "gamma":
                return rng.gammavariate(self.burstiness, 1.0 / self.burstiness) / self.rate


def until(times: Iterator[float], end_s: float) -> Iterator[float]:
    """Those before `end_s`."""
    for at in times:
        if at >= end_s:
            return
        yield at
