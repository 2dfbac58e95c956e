"""The simulated HPA against cases worked out by hand: https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/"""

from __future__ import annotations

import math

import pytest
from hpa_formula import desired
from hypothesis import given
from hypothesis import strategies as st

from twostep.lab.simulation.hpa import Hpa, average_value, pods_metric


@pytest.mark.parametrize(
    ("current", "values", "target", "wanted"),
    [
        (
            1,
            [200.0],
            100.0,
            2,
        ),  # "if the current metric value is 200m, and the desired value is 100m, the number of replicas will be doubled"
        (2, [50.0, 50.0], 100.0, 1),  # "if the current value is instead 50m, you will halve the number of replicas"
        (10, [108.0] * 10, 100.0, 10),  # within the tolerance of 0.1
        (10, [91.0] * 10, 100.0, 10),
        (10, [112.0] * 10, 100.0, 12),
        (3, [90.0, 60.0, 60.0], 100.0, 3),  # 0.7 * 3 = 2.1, rounded up
        (4, [40.0] * 4, 100.0, 2),
        (5, [], 100.0, 5),  # no metric: nothing is done
    ],
)
def test_ceil_of_the_ratio(current: int, values: list[float], target: float, wanted: int) -> None:
    assert pods_metric(current, values, 0, target) == wanted


def test_pods_without_a_metric_dampen() -> None:
    # Up: they count as idle. 2 * 300 / (4 * 100) = 1.5 of four.
    assert pods_metric(4, [300.0, 300.0], 2, 100.0) == 6
    # With them it would be no scale-up any more: nothing changes.
    assert pods_metric(4, [150.0, 150.0], 2, 100.0) == 4
    # Down: they count as on target. (2 * 20 + 2 * 100) / 400 = 0.6 of four.
    assert pods_metric(4, [20.0, 20.0], 2, 100.0) == 3


@given(total=st.floats(0, 60), current=st.integers(1, 50))
def test_average_value_is_the_formula_in_thousandths(total: float, current: int) -> None:
    milli = int(total * 1000)
    assert average_value(current, milli / 1000) in (
        desired(milli / 1000, current),
        # The two divide in another order: on the edge of the tolerance, and of a whole number, one bit decides.
        current if abs(abs(1 - milli / 1000 / current) - 0.1) < 1e-9 else math.ceil(milli / 1000),
    )


def test_scale_down_waits_for_five_minutes_of_less() -> None:
    hpa = Hpa(least=1, most=20)
    assert hpa.follow(0, 10, 10) == 10
    assert [hpa.follow(15.0 * i, 10, 4) for i in range(1, 21)] == [10] * 20  # the recommendation of 10 is not older than 300 s yet
    assert hpa.follow(315, 10, 5) == 5
    assert hpa.follow(330, 5, 6) == 6  # up at once


def test_scale_up_doubles_or_adds_four_in_15_s() -> None:
    hpa = Hpa(least=1, most=100)
    assert hpa.follow(0, 2, 50) == 6  # four pods are more than 100 %
    assert hpa.follow(5, 6, 50) == 6  # the period's four are there
    assert hpa.follow(15, 6, 50) == 12
    assert hpa.follow(30, 12, 50) == 24
    assert hpa.follow(45, 24, 500) == 48
    assert hpa.follow(60, 48, 500) == 96
    assert hpa.follow(75, 96, 500) == 100
