"""Bounds, budget and surge: who gets what where not everything can be had."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_fleet import config, pool, traffic, workers

from twostep.autoscaler.composition import Composition, compose
from twostep.autoscaler.limits import Goal, fit
from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import ROLES, Observation, PolicyConfig, PoolConfig, Role
from twostep.errors import InvalidRequest


def there(settings: PolicyConfig, prefill: int, decode: int) -> Composition:
    observation = Observation(now_s=0.0, traffic=traffic(1.0), workers=workers(prefill, decode))
    return compose(settings, Memory(), observation)


def goal(prefill: int, decode: int, total: int | None = None, *, now: dict[Role, int] | None = None) -> Goal:
    need: dict[Role, int] = {"prefill": prefill, "decode": decode}
    total = prefill + decode if total is None else total
    return Goal(now=now or need, need=need, total=total, shared=True, asleep=False, ahead=need, kept=need)


def test_what_can_be_had_is_asked_for() -> None:
    settings = config()
    fitted = fit(settings, goal(3, 2, 6), there(settings, 2, 2), 4)
    assert (dict(fitted.need), fitted.total, fitted.limit) == ({"prefill": 3, "decode": 2}, 6, "")


def test_a_bound_on_one_side_holds_the_other_in_proportion() -> None:
    settings = config(prefill=pool(max_workers=4), surge=100)
    fitted = fit(settings, goal(8, 6), there(settings, 1, 1), 2)
    assert fitted.need == {"prefill": 4, "decode": 3}
    assert fitted.limit == "max_workers of prefill"


def test_a_bound_that_is_enough_for_now_holds_nobody_to_less_than_is_needed_now() -> None:
    settings = config(decode=pool(max_workers=4), surge=100)
    fitted = fit(settings, goal(3, 8, now={"prefill": 3, "decode": 4}), there(settings, 1, 1), 2)
    assert fitted.need == {"prefill": 3, "decode": 4}
    # Half of what now needs is all that can be had of decode: more prefill workers would wait for it.
    fitted = fit(settings, goal(4, 16, now={"prefill": 4, "decode": 8}), there(settings, 1, 1), 2)
    assert fitted.need == {"prefill": 2, "decode": 4}


def test_the_budget_takes_the_spare_first_and_then_both_sides() -> None:
    settings = config(max_cost=5.0, surge=100)
    fitted = fit(settings, goal(3, 2, 6), there(settings, 3, 2), 5)
    assert (dict(fitted.need), fitted.total, fitted.limit) == ({"prefill": 3, "decode": 2}, 5, "max_cost")
    fitted = fit(settings, goal(6, 3), there(settings, 3, 2), 5)
    assert (dict(fitted.need), fitted.total) == ({"prefill": 3, "decode": 2}, 5)


def test_a_bound_on_both_roles_is_named_as_that_and_the_one_that_bites_is_named() -> None:
    settings = config(max_workers=5, surge=100)
    fitted = fit(settings, goal(3, 2, 6), there(settings, 3, 2), 5)
    assert (dict(fitted.need), fitted.total, fitted.limit) == ({"prefill": 3, "decode": 2}, 5, "max_workers of both roles: 5")
    assert fit(settings, goal(3, 2, 5), there(settings, 3, 2), 5).limit == ""
    assert fit(config(max_workers=5, max_cost=4.0, surge=100), goal(3, 2, 6), there(settings, 2, 2), 4).limit == "max_cost"


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 10), st.integers(0, 12), st.integers(0, 12), st.integers(2, 24))
def test_a_bound_on_both_roles_is_a_budget_where_every_worker_costs_one(
    prefill: int, decode: int, extra: int, has_p: int, has_d: int, most: int
) -> None:
    by_count, by_cost = config(max_workers=most), config(max_cost=float(most))
    counted, paid = (
        fit(each, goal(prefill, decode, prefill + decode + extra), there(each, has_p, has_d), has_p + has_d) for each in (by_count, by_cost)
    )
    assert (counted.need, counted.total) == (paid.need, paid.total)
    assert counted.limit == paid.limit.replace("max_cost", f"max_workers of both roles: {most}")


def test_surge_raises_both_sides_towards_what_they_need() -> None:
    settings = config(surge=3)
    fitted = fit(settings, goal(8, 4), there(settings, 2, 1), 3)
    assert (dict(fitted.need), fitted.total, fitted.limit) == ({"prefill": 4, "decode": 2}, 6, "surge")
    # As many are taken away at once.
    fitted = fit(settings, goal(1, 1), there(settings, 6, 4), 10)
    assert (fitted.total, fitted.limit) == (7, "surge")


@pytest.mark.parametrize("settings", [config(max_cost=3.0), config(max_workers=3), config(surge=1)])
@pytest.mark.parametrize("now", [{"prefill": 1, "decode": 2}, {"prefill": 2, "decode": 1}])
def test_what_is_needed_now_comes_before_what_is_needed_later(settings: PolicyConfig, now: dict[Role, int]) -> None:
    """Not a worker more for a role that may need it in a cold start, while the other one lacks it now."""
    fitted = fit(settings, goal(4, 4, now=now), there(settings, 1, 1), 2)
    assert (fitted.need, fitted.total) == (now, 3)


def test_waking_up_is_not_slowed_down() -> None:
    settings = config(surge=1)
    assert fit(settings, goal(1, 1), there(settings, 0, 0), 0).total == 2


def test_a_budget_that_the_least_workers_exceed_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="does not pay for the least workers, which cost 2"):
        config(max_cost=1.5)
    with pytest.raises(InvalidRequest, match="leaves no room for the least, which are 2"):
        config(max_workers=1)
    with pytest.raises(InvalidRequest, match="0 <= min <= max"):
        PoolConfig(min_workers=3, max_workers=2)
    for name, value in (("ttft_ms", 0.0), ("attainment", 1.0), ("surge", 0), ("spare", -1), ("max_utilization", 1.2), ("drain_s", -1.0)):
        with pytest.raises(InvalidRequest, match=name):
            replace(config(), **{name: value})


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 10),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 8),
    st.integers(0, 30),
)
def test_a_fit_is_within_all_limits(prefill: int, decode: int, extra: int, has_p: int, has_d: int, surge: int, more: int) -> None:
    settings = config(prefill=pool(max_workers=12, price_per_gpu_hour=2.0), decode=pool(max_workers=9), surge=surge, max_cost=3.0 + more)
    asked_for = has_p + has_d
    fitted = fit(settings, goal(prefill, decode, prefill + decode + extra), there(settings, has_p, has_d), asked_for)
    least = {role: fitted.need[role] for role in ROLES}
    assert settings.affordable(least)
    for role in ROLES:
        assert 1 <= fitted.need[role] <= settings.pool(role).max_workers
    assert sum(least.values()) <= fitted.total <= 21
    assert fitted.total <= max(asked_for + surge, 2)
