"""What a decode worker says of hand-overs to it."""

from __future__ import annotations

import pytest

from decode_worker.hand_over_meter import HandOverMeter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def told(meter: HandOverMeter) -> dict[str, tuple[float, float]]:
    return {mean.transport: (mean.seconds, mean.num_bytes) for mean in meter.means}


def test_the_first_hand_over_of_a_transport_which_connects_does_not_count(clock: Clock) -> None:
    meter = HandOverMeter(clock)
    meter.observe("ray", 5.0, 100)
    assert told(meter) == {}
    meter.observe("ray", 0.02, 300)
    meter.observe("local", 3.0, 100)
    assert told(meter) == {"ray": (0.02, 300.0)}


def test_the_mean_is_of_the_last_ten_or_so(clock: Clock) -> None:
    meter = HandOverMeter(clock)
    for seconds in (9.0, 0.1, 0.3):
        meter.observe("ray", seconds, 1000)
    assert told(meter)["ray"][0] == pytest.approx(0.2)
    for _ in range(60):
        meter.observe("ray", 0.5, 1000)
    assert told(meter)["ray"][0] == pytest.approx(0.5, rel=0.01)


def test_what_was_slow_once_is_forgotten_when_nobody_tries_it(clock: Clock) -> None:
    meter = HandOverMeter(clock)
    meter.observe("ray", 1.0, 100)
    meter.observe("ray", 4.0, 100)
    clock.now = 29.0
    assert told(meter) == {"ray": (4.0, 100.0)}
    clock.now = 31.0
    assert told(meter) == {}
    # The next one says how it is today, and what was before has no part in it.
    meter.observe("ray", 0.01, 200)
    assert told(meter)["ray"] == pytest.approx((0.01, 200.0))
