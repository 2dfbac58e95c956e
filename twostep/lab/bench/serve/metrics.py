"""From recorded times to figures. Pure: every definition of docs/benchmarking.md is a function here.

A *message* is one arrival that carried at least one token. Gaps are between messages, since tokens that come together are seen together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import sub

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.record import RequestRecord


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest of ascending values, as numpy's default. `share` from 0 to 1; NaN if there are none."""
    if not ordered:
        return math.nan
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # Clamped: rounding may otherwise lead outside of the two.
    return min(max(low + (high - low) * (at - below), low), high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A set of values by its percentiles; all NaN if it is empty."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        ordered = sorted(values)
        nan = math.nan
        if not ordered:
            return cls(count=0, mean=nan, min=nan, p50=nan, p90=nan, p95=nan, p99=nan, max=nan)
        return cls(
            count=len(ordered),
            mean=math.fsum(ordered) / len(ordered),
            min=ordered[0],
            p50=percentile(ordered, 0.5),
            p90=percentile(ordered, 0.9),
            p95=percentile(ordered, 0.95),
            p99=percentile(ordered, 0.99),
            max=ordered[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The times that one completed request's user felt, in seconds."""

    ttft_s: float  # sending to the first message
    tpot_s: float | None  # (last message - first message) / (tokens - 1). None: there was one token only.
    longest_gap_s: float | None
    """The longest time between two consecutive messages, that between the first and the second included. None: there was one only."""
    e2e_s: float  # sending to the end of the stream


def gaps_s(times_s: Sequence[float]) -> list[float]:
    """Inter-token latencies: times between consecutive messages."""
    return list(map(sub, times_s[1:], times_s))


def latency_of_times(times_s: Sequence[float], *, num_tokens: int, sent_s: float, ended_s: float) -> Latency:
    """`times_s`: when each message came, one at least."""
    first, last = times_s[0], times_s[-1]
    return Latency(
        ttft_s=first - sent_s,
        tpot_s=(last - first) / (num_tokens - 1) if num_tokens > 1 else None,
        longest_gap_s=max(gaps_s(times_s), default=None),
        e2e_s=ended_s - sent_s,
    )


def latency_of(record: RequestRecord) -> Latency | None:
    """None: it was not answered, or without a token."""
    if not record.completed or not record.times_s:
        return None
    return latency_of_times(record.times_s, num_tokens=record.output_tokens, sent_s=record.sent_s, ended_s=record.ended_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """Times that a request must keep to count, in milliseconds; None: no matter."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, words: Iterable[str]) -> LatencyTargets:
        """`ttft:500 tpot:10 gap:25 e2e:2000`, any of them, with spaces or commas between, `=` as good as a colon (vLLM's name for the last,
        `e2el`, will do). Raises InvalidRequest."""
        found: dict[str, float] = {}
        for word in (part for group in words for part in group.replace(",", " ").split()):
            name, _, value = word.replace("=", ":").partition(":")
            field = {"ttft": "ttft_ms", "tpot": "tpot_ms", "gap": "gap_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}.get(name.lower())
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if field is None or not 0 < number < math.inf:
                raise InvalidRequest(f"target {word!r}: give ttft, tpot, gap or e2e and milliseconds above 0, as in ttft:500")
            if field in found:
                raise InvalidRequest(f"target {name} is given twice; give it once")
            found[field] = number
        return cls(**found)

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.ttft_ms, self.tpot_ms, self.gap_ms, self.e2e_ms))

    def __str__(self) -> str:
        named = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms), ("gap", self.gap_ms), ("E2E", self.e2e_ms))
        return ", ".join(f"{name} ≤ {value:g} ms" for name, value in named if value is not None)

    def missed(self, latency: Latency | None) -> tuple[str, ...]:
        """Names of the targets not kept: "answer" alone if there was none. A one-token answer has neither TPOT nor gaps to miss."""
        if latency is None:
            return ("answer",)
        kept = {
            "ttft": _kept(latency.ttft_s, self.ttft_ms),
            "tpot": _kept(latency.tpot_s, self.tpot_ms),
            "gap": _kept(latency.longest_gap_s, self.gap_ms),
            "e2e": _kept(latency.e2e_s, self.e2e_ms),
        }
        return tuple(name for name, ok in kept.items() if not ok)


def _kept(seconds: float | None, limit_ms: float | None) -> bool:
    return seconds is None or limit_ms is None or seconds * 1e3 <= limit_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that kept all targets. Whatever came in the window and did not, errors and refusals included, counts against it."""

    num_requests: int
    num_met: int
    window_s: float  # the time in which these requests came
    num_gpus: int | None
    missed: dict[str, int]  # requests that missed a target, by its name; one may have missed several

    @property
    def attainment(self) -> float:
        """Share of the requests that kept all targets."""
        return self.num_met / self.num_requests if self.num_requests else math.nan

    @property
    def per_s(self) -> float:
        return self.num_met / self.window_s if self.window_s > 0 else math.nan

    @property
    def per_minute(self) -> float:
        return self.num_met * 60 / self.window_s if self.window_s > 0 else math.nan

    @property
    def per_s_per_gpu(self) -> float | None:
        return self.per_s / self.num_gpus if self.num_gpus else None


def goodput(latencies: Sequence[Latency | None], targets: LatencyTargets, window_s: float, num_gpus: int | None = None) -> Goodput:
    """`latencies` of all requests that came within a window of so many seconds; None for one that was not answered."""
    missed: dict[str, int] = {}
    met = 0
    for latency in latencies:
        names = targets.missed(latency)
        met += not names
        for name in names:
            missed[name] = missed.get(name, 0) + 1
    return Goodput(num_requests=len(latencies), num_met=met, window_s=window_s, num_gpus=num_gpus, missed=missed)
