"""What KEDA is told, put through the HorizontalPodAutoscaler's formula: whatever is wanted comes about, or as near as it lets pass."""

from __future__ import annotations

import math

import pytest
from hpa_formula import desired
from hypothesis import given
from hypothesis import strategies as st

from router.autoscaler.hpa import Asked, ask, metric, replicas_asked

UP_TO = 200


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("tolerance", [0.1, 0.05, 0.0])
def test_every_change_comes_about_or_costs_no_more_than_the_tolerance(tolerance: float, one_sided: bool) -> None:
    for pods in range(1, UP_TO + 1):
        for wish in range(1, UP_TO + 1):
            asked = ask(wish, pods, None, tolerance)
            come = desired(metric(asked.pods, pods, tolerance), pods, tolerance=tolerance, one_sided=one_sided)
            assert come >= wish, f"{pods} -> {wish}: never fewer than wanted"
            if come == wish:
                continue
            assert tolerance > 0, f"{pods} -> {wish}: without a tolerance it is exact"
            if wish > pods:
                assert come == asked.pods <= math.floor(pods * (1 + tolerance) + 1e-6) + 1, f"{pods} -> {wish}: the least that is acted on"
            else:
                assert come == pods, f"{pods} -> {wish}: left as it is"
                assert wish - 1 >= pods * (1 - tolerance) - 0.01, f"{pods} -> {wish}: a number above {wish - 1} would have been outside"


def test_the_tolerance_swallows_one_more_of_eleven_and_what_is_told_instead_passes() -> None:
    assert desired(12.0, 11) == 11, "what this is all about"
    assert desired(10.0, 11) == 11
    assert ask(12, 11, None, 0.1) == Asked(13, 12)
    assert desired(metric(13, 11, 0.1), 11) == 13
    assert desired(metric(10, 11, 0.1), 11) == 10
    assert ask(12, 11, None, 0.0) == Asked(12, 12)


def test_what_was_asked_for_beyond_the_wish_stays_until_the_wish_falls() -> None:
    asked = ask(12, 11, None, 0.1)
    assert ask(12, 13, asked, 0.1) == asked, "not taken back at once"
    assert ask(13, 13, asked, 0.1) == asked, "there already"
    assert ask(11, 13, asked, 0.1) == Asked(11, 11)
    assert ask(14, 13, asked, 0.1) == Asked(15, 14)
    # Whoever scales came only to 12 of 13, and 13 are wanted now.
    assert ask(13, 12, asked, 0.1) == Asked(14, 12)


def test_nothing_is_asked_for_twice_where_nothing_is_beyond_the_wish() -> None:
    assert ask(5, 8, Asked(8, 8), 0.1) == Asked(5, 5)
    assert ask(5, 0, None, 0.1) == Asked(5, 5), "from nothing: KEDA's own step"
    assert ask(0, 8, None, 0.1) == Asked(0, 0)
    assert metric(0, 8, 0.1) == 0.0


def test_each_role_has_its_own() -> None:
    asked = replicas_asked({"prefill": 12, "decode": 3}, {"prefill": 11, "decode": 4}, {"decode": Asked(4, 4)}, 0.1)
    assert asked == {"prefill": Asked(13, 12), "decode": Asked(3, 3)}


@given(
    wishes=st.lists(st.integers(1, UP_TO), min_size=1, max_size=12),
    pods=st.integers(1, UP_TO),
    tolerance=st.sampled_from([0.0, 0.05, 0.1]),
    one_sided=st.booleans(),
)
def test_a_run_of_wishes_is_followed_and_comes_to_rest(wishes: list[int], pods: int, tolerance: float, one_sided: bool) -> None:
    asked: Asked | None = None
    for wish in wishes:
        seen = []
        for _ in range(4):
            asked = ask(wish, pods, asked, tolerance)
            pods = desired(metric(asked.pods, pods, tolerance), pods, tolerance=tolerance, one_sided=one_sided)
            seen.append(pods)
        assert pods >= wish
        assert pods <= max(wish * (1 + tolerance) + 2, wish / (1 - tolerance) + 1), f"{wish} wanted and {pods} there"
        assert seen[-1] == seen[-2] == seen[-3], "nothing swings while the wish is the same"
