"""Traces: how many requests come and how long they are, over the time; and when workers are lost.

A trace is a curve of the rate and of the mean lengths, piecewise linear between points; `requests` draws from it. The same trace and seed
give the same requests to every scaler.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass, replace

from twostep.autoscaler.model import Role
from twostep.lab.simulator.cluster import SimulatedRequest

# Lengths are log-normal with this sigma (a 90th percentile of 1.9 times the median), and at most so many times their mean.
_SIGMA = 0.5
_LONGEST = 3.0
# The rate wanders about its curve: standard deviation, and seconds in which it forgets.
_WANDER = 0.05
_WANDER_S = 120.0


@dataclass(frozen=True, slots=True)
class TraceCurve:
    """Linear between (seconds, value) points of growing time, level before the first and after the last."""

    points: tuple[tuple[float, float], ...]

    def at(self, second: float) -> float:
        index = bisect_right(self.points, (second, math.inf))
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (t0, v0), (t1, v1) = self.points[index - 1 : index + 1]
        return v0 + (v1 - v0) * (second - t0) / (t1 - t0)

    def scaled(self, *, value: float = 1.0, time: float = 1.0) -> TraceCurve:
        return TraceCurve(tuple((t * time, v * value) for t, v in self.points))

    @property
    def highest(self) -> float:
        return max(v for _, v in self.points)


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """At `at_s` a ready worker of `role` is gone without a word."""

    at_s: float
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTrace:
    """`rate` in requests/s; `prompts` and `outputs` are means in tokens."""

    name: str
    seconds: float
    rate: TraceCurve = TraceCurve(((0.0, 1.0),))
    prompts: TraceCurve = TraceCurve(((0.0, 2000.0),))
    outputs: TraceCurve = TraceCurve(((0.0, 250.0),))
    losses: tuple[WorkerLoss, ...] = ()

    def scaled(self, peak: float) -> LoadTrace:
        """The same shape with another peak rate."""
        return replace(self, rate=self.rate.scaled(value=peak / self.rate.highest))

    def shortened(self, factor: float) -> LoadTrace:
        """The same in less time: everything changes so much faster. Losses that would come in the last minute are left out."""
        seconds = self.seconds * factor
        losses = [WorkerLoss(loss.at_s * factor, loss.role) for loss in self.losses]
        return replace(
            self,
            seconds=seconds,
            rate=self.rate.scaled(time=factor),
            prompts=self.prompts.scaled(time=factor),
            outputs=self.outputs.scaled(time=factor),
            losses=tuple(loss for loss in losses if loss.at_s < seconds - 60),
        )


def requests(trace: LoadTrace, seed: int) -> list[SimulatedRequest]:
    """A Poisson process whose rate is the trace's and wanders a little, second by second."""
    rng = random.Random(f"{trace.name}/{seed}")
    found: list[SimulatedRequest] = []
    wander, keep = 0.0, math.exp(-1 / _WANDER_S)
    push = _WANDER * math.sqrt(1 - keep * keep)
    hazard = rng.expovariate(1.0)
    for second in range(math.ceil(trace.seconds)):
        wander = keep * wander + push * rng.gauss(0.0, 1.0)
        rate = max(0.0, trace.rate.at(second) * (1 + wander))
        prompt, output = trace.prompts.at(second), trace.outputs.at(second)
        left = 1.0
        while hazard < rate * left:
            left -= hazard / rate
            hazard = rng.expovariate(1.0)
            num_prompt, num_output = _length(rng, prompt), _length(rng, output)
            found.append(SimulatedRequest(arrival_s=second + 1 - left, num_prompt=num_prompt, num_output=num_output))
        hazard -= rate * left
    return found


def _length(rng: random.Random, mean: float) -> int:
    """Log-normal of this mean."""
    value = math.inf
    while value > _LONGEST * mean:
        value = rng.lognormvariate(math.log(mean) - _SIGMA * _SIGMA / 2, _SIGMA)
    return max(2, round(value))


# ---- the traces, as shares of a peak; docs/autoscaling-simulation.md says what happens in each --------------------------------


def _minutes(*points: tuple[float, float]) -> TraceCurve:
    return TraceCurve(tuple((minute * 60, value) for minute, value in points))


def _losses(*losses: tuple[float, Role]) -> tuple[WorkerLoss, ...]:
    return tuple(WorkerLoss(minute * 60, role) for minute, role in losses)


def _wave(minutes: float, low: float, high: float, *, steps: int = 48) -> TraceCurve:
    """One wave, from its lowest point over the highest back."""
    return _minutes(*((minutes * i / steps, low + (high - low) * (1 - math.cos(2 * math.pi * i / steps)) / 2) for i in range(steps + 1)))


def _product(a: TraceCurve, b: TraceCurve) -> TraceCurve:
    return TraceCurve(tuple((t, a.at(t) * b.at(t)) for t in sorted({t for t, _ in (*a.points, *b.points)})))


_BURSTS = ((15, 0.9), (35, 0.9), (55, 1.0))
_FLANKS = _minutes((24, 1.0), (25, 1.4), (29, 1.4), (31, 1.0), (84, 1.0), (85, 1.4), (89, 1.4), (91, 1.0))
TRACES = {
    trace.name: trace
    for trace in (
        LoadTrace(name="diurnal", seconds=7200, rate=_wave(120, 0.25, 1.0)),
        LoadTrace(
            name="burst",
            seconds=4500,
            rate=_minutes(*((start + i, value) for start, top in _BURSTS for i, value in ((0, 0.6), (1, top), (6, top), (8, 0.6)))),
        ),
        LoadTrace(
            name="shift",
            seconds=5400,
            prompts=_minutes((20, 2800), (40, 1000), (60, 1000), (75, 2800)),
            outputs=_minutes((20, 120), (40, 450), (60, 450), (75, 120)),
        ),
        LoadTrace(name="loss", seconds=3600, losses=_losses((15, "prefill"), (30, "decode"), (45, "prefill"))),
        LoadTrace(
            name="mixed",
            seconds=7200,
            rate=_product(_wave(120, 0.3, 0.92), _FLANKS),
            prompts=_minutes((40, 2800), (60, 1000), (95, 1000), (110, 2800)),
            outputs=_minutes((40, 120), (60, 450), (95, 450), (110, 120)),
            losses=_losses((35, "prefill"), (70, "decode"), (100, "decode")),
        ),
    )
}
