"""Where the load is going: level and trend of what is counted (Holt's linear method, damped, with gaps), so that workers are asked for a
cold start ahead.

    level' = expected + a (x - expected)        expected = level + trend dt,       a = 1 - exp(-dt / LEVEL_S)
    trend' = trend + b ((level' - level) / dt - trend)                             b = 1 - exp(-dt / TREND_S)
    ahead(h) = level + trend DAMPING_S (1 - exp(-h / DAMPING_S))                   a trend does not go on for ever

A change that chance does not explain is believed at once: a rate counted over a window has a standard deviation of sqrt(rate / window) if
requests come by themselves; beyond three of these it is another load, not noise. And more load is believed sooner than less: a rate counts
for what was measured less one deviation at least. (Holt 1957; Gardner and McKenzie 1985 for the damping; weights by time constant let an
interval be missed.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostep.autoscaler.model import Traffic

LEVEL_S = 45.0
TREND_S = 60.0
DAMPING_S = 60.0
_SIGMAS = 3.0
# What is extrapolated is at most so many times what is there.
_MOST_GROWTH = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Holt:
    """Level and its trend a second. `least`: what the last measurement says at least."""

    level: float
    trend: float = 0.0
    least: float = 0.0

    def observe(self, value: float, noise: float, dt_s: float) -> Holt:
        """After `value` was measured, which by chance alone deviates by `noise` as a rule."""
        if dt_s <= 0.0:
            return self
        expected = max(0.0, self.level + self.trend * dt_s)
        leap = abs(value - expected) > _SIGMAS * noise
        level = value if leap else expected - math.expm1(-dt_s / LEVEL_S) * (value - expected)
        trend = self.trend - math.expm1(-dt_s / TREND_S) * ((level - self.level) / dt_s - self.trend)
        if leap and value < expected:
            trend = 0.0  # it fell; nothing says that it goes on falling
        return Holt(level=max(0.0, level), trend=trend, least=max(0.0, value - noise))

    @property
    def now(self) -> float:
        return max(self.level, self.least)

    def ahead(self, seconds: float) -> float:
        """The most that is expected between now and then."""
        more = -math.expm1(-seconds / DAMPING_S) * DAMPING_S * self.trend
        return min(self.now + max(0.0, more), _MOST_GROWTH * self.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Rates a second: requests, tokens of their prompts, those of them that must be computed, tokens of the answers that ended. And tokens
    that decode workers give now (`decoded`): they tell of longer answers before these end, while the mean of those that ended tells of the
    short ones."""

    requests: Holt
    prompt: Holt
    uncached: Holt
    output: Holt
    decoded: Holt
    prompt_scv: float = 0.5
    promised: float = 0.0  # share of requests that name a time to their first token


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """Describes what decode workers do at an instant: how many sequences they decode, and the tokens a second that they give by their
    curves."""

    num_seqs: int = 0
    tokens_per_s: float = 0.0


def observe(before: Forecast | None, traffic: Traffic, decoding: DecodeLoad, dt_s: float, window_s: float) -> Forecast:
    """Returns the forecast after one more window of traffic."""
    rate = max(0.0, traffic.requests_per_s)
    uncached = max(0.0, traffic.prompt_tokens - traffic.cached_tokens)
    values = (rate, rate * traffic.prompt_tokens, rate * uncached, rate * traffic.output_tokens)
    if before is None:
        requests, prompt, computed, output = (Holt(level=value) for value in values)
        decoded = Holt(level=decoding.tokens_per_s)
        return Forecast(
            requests=requests,
            prompt=prompt,
            uncached=computed,
            output=output,
            decoded=decoded,
            prompt_scv=traffic.prompt_scv,
            promised=traffic.promised,
        )
    series = (before.requests, before.prompt, before.uncached, before.output)
    # Of what was measured or expected, whichever is more: an empty window is noise too, and one request after silence is no flood.
    expected = max(rate, before.requests.level, 1.0 / window_s)
    share = 1.0 / math.sqrt(expected * window_s)
    spread = math.sqrt(1.0 + traffic.prompt_scv)
    after = []
    for holt, value, factor in zip(series, values, (1.0, spread, spread, spread), strict=True):
        after.append(holt.observe(value, max(value, holt.level) * share * factor, dt_s))
    noise = max(decoding.tokens_per_s, before.decoded.level) / math.sqrt(max(1.0, decoding.num_seqs))
    weight = -math.expm1(-max(0.0, dt_s) / LEVEL_S) if rate else 0.0
    return Forecast(
        requests=after[0],
        prompt=after[1],
        uncached=after[2],
        output=after[3],
        decoded=before.decoded.observe(decoding.tokens_per_s, noise, dt_s),
        prompt_scv=before.prompt_scv + weight * (traffic.prompt_scv - before.prompt_scv),
        # That fewer are refused is believed at once.
        promised=min(traffic.promised, before.promised + weight * (traffic.promised - before.promised)) if rate else before.promised,
    )
