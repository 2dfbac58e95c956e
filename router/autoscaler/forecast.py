"""Where the load is going: level and trend of a rate (Holt's linear method, with gaps), so that workers are asked for a cold start ahead.

    level' = expected + a (x - expected)         expected = level + trend dt,  a = 1 - exp(-dt / LEVEL_S)
    trend' = trend + b ((level' - level) / dt - trend)                         b = 1 - exp(-dt / TREND_S)

A change that chance does not explain is believed at once: a rate counted over a window has a standard deviation of sqrt(rate / window) if
requests come by themselves, and beyond three of these it is another load, not noise. (Holt 1957; the weights by time constant let an
interval be missed.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.autoscaler.model import Traffic

LEVEL_S = 45.0
TREND_S = 180.0
_SIGMAS = 3.0
# What is extrapolated is at most so many times what is there: a trend ends.
_MOST_GROWTH = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holt:
    """Level (per second) and its trend (per second, per second)."""

    level: float
    trend: float = 0.0

    def observe(self, value: float, noise: float, dt_s: float) -> Holt:
        """After `value` was measured, which by chance alone deviates by `noise` as a rule."""
        if dt_s <= 0.0:
            return self
        expected = max(0.0, self.level + self.trend * dt_s)
        if abs(value - expected) > _SIGMAS * noise:
            # Another load. Its trend is not that of the leap.
            return Holt(level=value, trend=0.0 if (value < expected) == (self.trend > 0.0) else self.trend)
        level = expected - math.expm1(-dt_s / LEVEL_S) * (value - expected)
        trend = self.trend - math.expm1(-dt_s / TREND_S) * ((level - self.level) / dt_s - self.trend)
        return Holt(level=max(0.0, level), trend=trend)

    def ahead(self, seconds: float) -> float:
        """The most that is expected between now and then."""
        return min(max(self.level, self.level + self.trend * seconds), _MOST_GROWTH * self.level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Rates a second: requests, tokens of their prompts, those of them that must be computed, tokens of their answers."""

    requests: Holt
    prompt: Holt
    uncached: Holt
    output: Holt
    prompt_scv: float = 0.5


def observe(before: Forecast | None, traffic: Traffic, dt_s: float, window_s: float) -> Forecast:
    """What is known after one more window of traffic."""
    rate = max(0.0, traffic.requests_per_s)
    uncached = max(0.0, traffic.prompt_tokens - traffic.cached_tokens)
    values = (rate, rate * traffic.prompt_tokens, rate * uncached, rate * traffic.output_tokens)
    if before is None:
        requests, prompt, computed, output = (Holt(level=value) for value in values)
        return Forecast(requests=requests, prompt=prompt, uncached=computed, output=output, prompt_scv=traffic.prompt_scv)
    series = (before.requests, before.prompt, before.uncached, before.output)
    # Of the mean of what was measured and what was expected: an empty window is noise too, and one request after silence is not a flood.
    expected = max(rate, before.requests.level, 1.0 / window_s)
    shares = 1.0 / math.sqrt(expected * window_s)
    spread = math.sqrt(1.0 + traffic.prompt_scv)
    after = []
    for holt, value, factor in zip(series, values, (1.0, spread, spread, spread), strict=True):
        after.append(holt.observe(value, max(value, holt.level) * shares * factor, dt_s))
    weight = -math.expm1(-max(0.0, dt_s) / LEVEL_S) if rate else 0.0
    scv = before.prompt_scv + weight * (traffic.prompt_scv - before.prompt_scv)
    return Forecast(requests=after[0], prompt=after[1], uncached=after[2], output=after[3], prompt_scv=scv)
