"""When requests come in open loop: at times drawn beforehand, whatever the server does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from twostep.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Gaps of mean 1/rate, drawn from a gamma distribution of shape `burstiness`, as vLLM's `--burstiness` does: 1 is a Poisson process,
    below it requests come in bursts, above it more evenly. `rate` of infinity: all at once."""

    rate: float  # requests (conversations, where they have several turns) per second
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise InvalidRequest(f"the rate is {self.rate:g} requests per second; give one above 0, or inf for all at once")

    def times(self, seed: str) -> Iterator[float]:
        """Seconds since the start, ascending, without end. Processes of the same seed that differ in rate alone have the same gaps but for
        a factor, so that two rates are compared on one pattern."""
        rng = random.Random(f"arrivals/{seed}")
        shape, at = self.burstiness, 0.0
        while True:
            gap = rng.expovariate(1.0) if shape == 1 else rng.gammavariate(shape, 1.0 / shape)
            at += gap / self.rate
            yield at

    def within(self, seed: str, length_s: float) -> list[float]:
        """Times before `length_s`: rate x length of them, to the nearest, so that what is offered is the rate and not what chance made of
        it. Gaps are drawn as by `times` and scaled together; of a Poisson process that gives the very distribution that it has when so
        many come."""
        num = round(self.rate * length_s)
        drawn = list(islice(self.times(seed), num + 1))
        scale = length_s / drawn[-1] if drawn[-1] > 0 else 0.0
        return [at * scale for at in drawn[:-1]]

    def until(self, seed: str, end_s: float) -> Iterator[float]:
        """Times before `end_s`, as many as chance has it."""
        for at in self.times(seed):
            if at >= end_s:
                return
            yield at
