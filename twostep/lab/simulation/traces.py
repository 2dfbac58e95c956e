"""Traces: how many requests come and how long they are, over the time; and when workers are lost.

A trace is a curve of the rate and of the mean lengths, piecewise linear between points; `requests` draws from it. The same trace and seed
give the same requests to every scaler.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from twostep.autoscaler.model import Role
from twostep.errors import InvalidRequest
from twostep.lab.simulator.cluster import SimulatedRequest

# Lengths are log-normal with this sigma (a 90th percentile of 1.9 times the median), and at most so many times their mean.
_SIGMA = 0.5
_LONGEST = 3.0
# The rate wanders about its curve: standard deviation, and seconds in which it forgets.
_WANDER = 0.05
_WANDER_S = 120.0


@dataclass(frozen=True, slots=True)
class TraceCurve:
    """Linear between (seconds, value) points, level before the first and after the last."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points or any(b[0] <= a[0] for a, b in pairwise(self.points)):
            raise InvalidRequest(f"a curve is points of growing time; got {self.points}")

    def at(self, second: float) -> float:
        index = bisect_right(self.points, (second, math.inf))
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (t0, v0), (t1, v1) = self.points[index - 1 : index + 1]
        return v0 + (v1 - v0) * (second - t0) / (t1 - t0)

    def scaled(self, factor: float) -> TraceCurve:
        return TraceCurve(tuple((t, v * factor) for t, v in self.points))

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
    """`rate` in requests/s; `prompts` and `outputs` are means in tokens; `cached` is the share of a prompt that is found in caches."""

    name: str
    seconds: float
    rate: TraceCurve
    prompts: TraceCurve
    outputs: TraceCurve
    cached: float = 0.0
    losses: tuple[WorkerLoss, ...] = ()

    def scaled(self, peak: float) -> LoadTrace:
        """The same shape with another peak rate."""
        return replace(self, rate=self.rate.scaled(peak / self.rate.highest))

    def shortened(self, factor: float) -> LoadTrace:
        """The same in less time: everything changes so much faster. Losses that would come in the last minute are left out."""

        def faster(curve: TraceCurve) -> TraceCurve:
            return TraceCurve(tuple((t * factor, v) for t, v in curve.points))

        seconds = self.seconds * factor
        return replace(
            self,
            seconds=seconds,
            rate=faster(self.rate),
            prompts=faster(self.prompts),
            outputs=faster(self.outputs),
            losses=tuple(WorkerLoss(loss.at_s * factor, loss.role) for loss in self.losses if loss.at_s * factor < seconds - 60),
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
            num_prompt = _length(rng, prompt)
            found.append(
                SimulatedRequest(
                    arrival_s=second + 1 - left,
                    num_prompt=num_prompt,
                    num_output=_length(rng, output),
                    num_cached=min(num_prompt - 1, int(trace.cached * num_prompt)),
                )
            )
        hazard -= rate * left
    return found


def _length(rng: random.Random, mean: float) -> int:
    """Log-normal of this mean."""
    value = math.inf
    while value > _LONGEST * mean:
        value = rng.lognormvariate(math.log(mean) - _SIGMA * _SIGMA / 2, _SIGMA)
    return max(2, round(value))


_MINUTE = 60.0
_LEVEL_PROMPTS, _LEVEL_OUTPUTS = TraceCurve(((0.0, 2000.0),)), TraceCurve(((0.0, 250.0),))


def _wave(seconds: float, low: float, high: float, *, steps: int = 48) -> tuple[tuple[float, float], ...]:
    """One wave, from its lowest point over the highest back."""
    return tuple((seconds * i / steps, low + (high - low) * (1 - math.cos(2 * math.pi * i / steps)) / 2) for i in range(steps + 1))


def _diurnal() -> LoadTrace:
    """A day in two hours: a quarter of the peak at night."""
    seconds = 120 * _MINUTE
    return LoadTrace(
        name="diurnal", seconds=seconds, rate=TraceCurve(_wave(seconds, 0.25, 1.0)), prompts=_LEVEL_PROMPTS, outputs=_LEVEL_OUTPUTS
    )


def _burst() -> LoadTrace:
    """Level but for three bursts of half as much again, each up within a minute, for five."""
    points = [(0.0, 0.6)]
    for start in (15, 35, 55):
        points += [
            (start * _MINUTE, 0.6),
            ((start + 1) * _MINUTE, 0.9 if start < 55 else 1.0),
            ((start + 6) * _MINUTE, 0.9 if start < 55 else 1.0),
            ((start + 8) * _MINUTE, 0.6),
        ]
    return LoadTrace(name="burst", seconds=75 * _MINUTE, rate=TraceCurve(tuple(points)), prompts=_LEVEL_PROMPTS, outputs=_LEVEL_OUTPUTS)


def _shift() -> LoadTrace:
    """As many requests all the time; long prompts with short answers turn into short prompts with long answers, within 20 minutes, and
    later back."""
    times = (0.0, 20 * _MINUTE, 40 * _MINUTE, 60 * _MINUTE, 75 * _MINUTE, 90 * _MINUTE)
    return LoadTrace(
        name="shift",
        seconds=times[-1],
        rate=TraceCurve(((0.0, 1.0),)),
        prompts=TraceCurve(tuple(zip(times, (2800.0, 2800.0, 1000.0, 1000.0, 2800.0, 2800.0), strict=True))),
        outputs=TraceCurve(tuple(zip(times, (120.0, 120.0, 450.0, 450.0, 120.0, 120.0), strict=True))),
    )


def _loss() -> LoadTrace:
    """A level load, and three workers are lost, one after the other."""
    losses = (WorkerLoss(15 * _MINUTE, "prefill"), WorkerLoss(30 * _MINUTE, "decode"), WorkerLoss(45 * _MINUTE, "prefill"))
    return LoadTrace(
        name="loss",
        seconds=60 * _MINUTE,
        rate=TraceCurve(((0.0, 1.0),)),
        prompts=_LEVEL_PROMPTS,
        outputs=_LEVEL_OUTPUTS,
        losses=losses,
    )


def _mixed() -> LoadTrace:
    """All of it in two hours: one wave, two bursts on its flanks, long prompts that turn into long answers and back, and three losses."""
    seconds = 120 * _MINUTE
    wave = TraceCurve(_wave(seconds, 0.3, 0.92))
    bursts = TraceCurve(
        tuple(
            (minute * _MINUTE, value)
            for minute, value in ((24, 1.0), (25, 1.4), (29, 1.4), (31, 1.0), (84, 1.0), (85, 1.4), (89, 1.4), (91, 1.0))
        )
    )
    times = sorted({t for curve in (wave, bursts) for t, _ in curve.points})
    turns = tuple(minute * _MINUTE for minute in (40, 60, 95, 110))
    return LoadTrace(
        name="mixed",
        seconds=seconds,
        rate=TraceCurve(tuple((t, wave.at(t) * bursts.at(t)) for t in times)),
        prompts=TraceCurve(tuple(zip(turns, (2800.0, 1000.0, 1000.0, 2800.0), strict=True))),
        outputs=TraceCurve(tuple(zip(turns, (120.0, 450.0, 450.0, 120.0), strict=True))),
        losses=(WorkerLoss(35 * _MINUTE, "prefill"), WorkerLoss(70 * _MINUTE, "decode"), WorkerLoss(100 * _MINUTE, "decode")),
    )


_TRACES: dict[str, Callable[[], LoadTrace]] = {"diurnal": _diurnal, "burst": _burst, "shift": _shift, "loss": _loss, "mixed": _mixed}


def trace_names() -> list[str]:
    return list(_TRACES)


def trace_of(name: str, *, peak: float) -> LoadTrace:
    """One of `trace_names()` at this peak rate. Raises InvalidRequest."""
    if name not in _TRACES:
        raise InvalidRequest(f"there is no trace {name!r}; there are {', '.join(_TRACES)}")
    if not peak > 0:
        raise InvalidRequest(f"a peak of {peak:g} requests/s; give one above 0")
    return _TRACES[name]().scaled(peak)
