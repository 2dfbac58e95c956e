"""How long prompts and answers are."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

from twostep.errors import InvalidRequest

# Of the standard normal distribution: 9 of 10 values lie below.
_Z90 = 1.2815515655446004


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: random.Random) -> int:
        """At least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def __post_init__(self) -> None:
        _at_least_one(self.tokens)

    def draw(self, rng: random.Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Normal:
    """Standard deviation `spread` x mean; cut off at three of them, and at 1, by drawing again."""

    mean: float
    spread: float

    def __post_init__(self) -> None:
        _at_least_one(self.mean)
        if not 0 <= self.spread <= 1:
            raise InvalidRequest(f"the spread is {self.spread * 100:g} %; give 0 to 100, the standard deviation in percent of the mean")

    @property
    def high(self) -> float:
        """The most that is drawn."""
        return self.mean * (1 + 3 * self.spread)

    def draw(self, rng: random.Random) -> int:
        deviation = self.mean * self.spread
        low = max(0.5, self.mean - 3 * deviation)
        while True:
            value = rng.gauss(self.mean, deviation)
            if low <= value <= self.high:
                return max(1, round(value))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Given by its median and its 90th percentile; cut off at `low` and `high` by drawing again."""

    median: float
    p90: float
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.median < self.p90 <= self.high:
            raise InvalidRequest(f"a log-normal length needs 1 ≤ low ≤ median < p90 ≤ high; there are {self}")

    def draw(self, rng: random.Random) -> int:
        sigma = math.log(self.p90 / self.median) / _Z90
        while True:
            value = round(rng.lognormvariate(math.log(self.median), sigma))
            if self.low <= value <= self.high:
                return value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Both ends included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _at_least_one(self.low)
        if self.high < self.low:
            raise InvalidRequest(f"lengths from {self.low} to {self.high}: give the smaller first")

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def _at_least_one(tokens: float) -> None:
    if not tokens >= 1:
        raise InvalidRequest(f"a length of {tokens:g} tokens: give at least 1")


# Medians and 90th percentiles as published: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve",
# OSDI 2024, table 2 (openchat_sharegpt4 and arxiv_summarization).
SHAREGPT_PROMPT = LogNormal(1730, 5696, 4, 32_768)
SHAREGPT_OUTPUT = LogNormal(415, 834, 4, 4_096)
DOCUMENT_PROMPT = LogNormal(7059, 12_985, 512, 65_536)
DOCUMENT_OUTPUT = LogNormal(208, 371, 4, 2_048)
