"""Level and trend of the load."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_fleet import traffic

from twostep.autoscaler.forecast import DAMPING_S, DecodeLoad, Forecast, Holt, observe

WINDOW_S = 30.0


def follow(rates: list[float], dt_s: float = 15.0, before: Forecast | None = None) -> Forecast:
    forecast = before
    for rate in rates:
        forecast = observe(forecast, traffic(rate), DecodeLoad(), dt_s, WINDOW_S)
    assert forecast is not None
    return forecast


def test_a_ramp_is_seen_ahead_and_not_for_ever() -> None:
    """0.02 requests/s more each second."""
    forecast = follow([20.0 + 0.3 * i for i in range(60)])
    now = forecast.requests.now
    assert now == pytest.approx(20.0 + 0.3 * 59, rel=0.02)
    assert forecast.requests.ahead(30.0) == pytest.approx(now + 0.02 * DAMPING_S * (1 - math.exp(-30 / DAMPING_S)), rel=0.02)
    assert forecast.requests.ahead(1e6) <= now + 0.02 * DAMPING_S * 1.1


def test_a_leap_is_believed_at_once_and_a_fall_too() -> None:
    forecast = follow([20.0] * 20)
    assert forecast.requests.ahead(100.0) == forecast.requests.now == pytest.approx(20.0)
    assert forecast.prompt.ahead(100.0) == pytest.approx(20.0 * 2600)
    up = follow([40.0], before=forecast)
    assert up.requests.now == 40.0
    down = follow([5.0], before=forecast)
    assert down.requests.level == 5.0
    assert down.requests.ahead(100.0) == 5.0
    assert down.requests.trend == 0.0, "nothing says that it goes on falling"
    steady = Holt(level=10.0)
    assert steady.observe(14.0, 1.0, 15.0).level == 14.0, "four deviations are no noise"
    assert steady.observe(12.0, 1.0, 15.0).level < 12.0


def test_noise_of_counting_moves_little() -> None:
    rng = random.Random(1)
    levels, forecast = [], follow([10.0])
    for _ in range(200):
        forecast = follow([rng.gauss(10.0, math.sqrt(10.0 / WINDOW_S))], before=forecast)
        levels.append(forecast.requests.ahead(105.0))
    assert sum(levels) / len(levels) == pytest.approx(10.0, rel=0.04)
    assert max(levels) < 12.0


def test_a_missed_interval_counts_by_its_time() -> None:
    """Twice the time has the weight of two steps on the way to the same value."""
    value, noise = 11.0, 5.0
    twice = Holt(level=10.0).observe(value, noise, 15.0)
    once = Holt(level=10.0).observe(value, noise, 30.0)
    assert once.level == pytest.approx(10.0 - math.expm1(-30 / 45) * 1.0)
    assert twice.level < once.level
    assert Holt(level=10.0).observe(value, noise, 0.0) == Holt(level=10.0)
    assert Holt(level=10.0).observe(value, noise, -5.0) == Holt(level=10.0)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e5), st.floats(0, 120)), min_size=1, max_size=30))
def test_nothing_is_negative_nor_more_than_half_as_much_again(seen: list[tuple[float, float, float]]) -> None:
    forecast = None
    for rate, tokens, dt_s in seen:
        forecast = observe(
            forecast, traffic(rate, prompt=tokens, output=tokens), DecodeLoad(num_seqs=3, tokens_per_s=tokens), dt_s, WINDOW_S
        )
        for holt in (forecast.requests, forecast.prompt, forecast.uncached, forecast.output, forecast.decoded):
            assert 0.0 <= holt.now <= holt.ahead(60.0) + 1e-9
            assert holt.ahead(60.0) <= 1.5 * holt.now + 1e-9
            assert holt.ahead(60.0) <= holt.ahead(120.0) + 1e-9
