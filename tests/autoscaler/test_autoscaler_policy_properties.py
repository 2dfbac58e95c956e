"""Properties of every decision: random loads, losses and bounds, followed as Kubernetes follows them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from policy_fleet import Fleet, config, pool, traffic

from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import ROLES, PolicyConfig, Role
from twostep.autoscaler.policy import decide

configs = st.builds(
    lambda least, most, surge, spare, switching, budget, price, cool_down_s, cold_start_s: config(
        prefill=pool(min_workers=least, max_workers=most, price_per_gpu_hour=price, cold_start_s=cold_start_s),
        decode=pool(min_workers=1, max_workers=most + 2, cold_start_s=cold_start_s),
        surge=surge,
        spare=spare,
        switching=switching,
        max_cost=None if budget is None else price * least + 1.0 + budget,
        cool_down_s=cool_down_s,
    ),
    least=st.integers(1, 2),
    most=st.integers(2, 10),
    surge=st.integers(1, 5),
    spare=st.integers(0, 2),
    switching=st.booleans(),
    budget=st.none() | st.floats(0.0, 12.0),
    price=st.sampled_from([0.5, 1.0, 3.0]),
    cool_down_s=st.sampled_from([0.0, 60.0, 180.0]),
    cold_start_s=st.sampled_from([20.0, 90.0]),
)
# Requests a second, prompt and output tokens, share within the targets, a worker lost before it.
loads = st.tuples(
    st.sampled_from([0.0, 0.5, 5.0, 18.0, 40.0, 80.0, 200.0]),
    st.sampled_from([100.0, 1000.0, 3000.0]),
    st.sampled_from([1.0, 60.0, 600.0]),
    st.sampled_from([None, 0.5, 1.0]),
    st.sampled_from([None, None, None, "prefill", "decode"]),
)
Loads = list[tuple[float, float, float, float | None, Role | None]]


def follow(settings_: PolicyConfig, seen: Loads, each: int = 3, *, both_roles: bool = False) -> Fleet:
    fleet = Fleet.of(settings_, settings_.prefill.least, settings_.decode.least, both_roles=both_roles)
    for rate, prompt, output, met, lost in seen:
        if lost is not None:
            fleet.lose(lost)
        for _ in range(each):
            fleet.step(traffic(rate, prompt=prompt, output=output, ttft_met=met, tpot_met=met))
    return fleet


def most_turns(series: list[tuple[float, int]], within_s: float) -> int:
    """The most changes of direction that lie less than `within_s` apart."""
    turns, way = [], 0
    for (_, before), (at, after) in pairwise(series):
        if after != before:
            if way and (after > before) != (way > 0):
                turns.append(at)
            way = 1 if after > before else -1
    return max((sum(at <= other < at + within_s for other in turns) for at in turns), default=0)


@settings(max_examples=30)
@given(configs, st.lists(loads, min_size=1, max_size=12), st.integers(2, 3), st.booleans())
def test_every_decision_is_within_its_limits(policy: PolicyConfig, seen: Loads, each: int, both_roles: bool) -> None:
    fleet = follow(policy, seen, each, both_roles=both_roles)
    pods = sum(fleet.observations[0].pods.values())
    for observation, decision in zip(fleet.observations, fleet.decisions, strict=True):
        there = {w.worker_id: w for w in observation.workers}
        for role in ROLES:
            bounds = policy.pool(role)
            assert bounds.min_workers <= decision.replicas[role] <= bounds.max_workers
            assert decision.wanted(role) <= bounds.max_workers
            lost = max(0, observation.pods[role] - decision.replicas[role])
            assert sum(there[name].owner == role for name in decision.victims) <= lost
        assert decision.prefill + decision.decode == decision.replicas["prefill"] + decision.replicas["decode"]
        assert policy.affordable(decision.replicas)
        # A budget comes first: pods of the dearer role may have to be paid for by several of the other one.
        assert abs(sum(decision.replicas.values()) - pods) <= max(policy.surge, 2) or decision.limit == "max_cost"
        pods = sum(decision.replicas.values())
        # Switches and victims are workers that are there, and nobody is both.
        switched = {switch.worker_id for switch in decision.switches}
        assert not switched & set(decision.victims)
        assert len(switched) == len(decision.switches) <= (policy.surge if policy.switching else 0)
        assert all(there[s.worker_id].role != s.to and there[s.worker_id].ready for s in decision.switches)
        # No victim is the last ready worker of its role, unless bounds and budget come first.
        if sum(decision.replicas.values()) >= sum(observation.pods.values()) or decision.limit in ("", "cool_down", "surge"):
            for role in ROLES:
                ready = sum(w.role == role and w.ready and not w.draining for w in observation.workers)
                num_lost = sum(there[name].role == role and there[name].ready for name in decision.victims)
                assert not num_lost or ready - num_lost >= 1
    # Pods turn round once in a cool-down at most.
    times = [observation.now_s for observation in fleet.observations]
    for role in ROLES:
        series = [(now_s, decision.replicas[role]) for now_s, decision in zip(times, fleet.decisions, strict=True)]
        assert most_turns(series, policy.cool_down_s) <= 1


@settings(max_examples=10)
@given(
    st.sampled_from([0.5, 5.0, 18.0, 40.0, 80.0]),
    st.sampled_from([200.0, 2600.0]),
    st.sampled_from([20.0, 300.0]),
    st.booleans(),
    st.booleans(),
)
def test_a_level_load_is_answered_once_and_then_left_alone(
    rate: float, prompt: float, output: float, switching: bool, both_roles: bool
) -> None:
    policy = config(switching=switching, decode=pool(max_workers=60), prefill=pool(max_workers=60))
    fleet = Fleet.of(policy, 1, 1, both_roles=both_roles)
    load = traffic(rate, prompt=prompt, output=output, ttft_met=1.0, tpot_met=1.0)
    fleet.run(load, 600.0)
    settled = fleet.decisions[-1]
    for decision in fleet.run(load, 400.0):
        assert dict(decision.replicas) == dict(settled.replicas)
        assert (decision.switches, decision.victims) == ((), ())
    # Enough, and not much more.
    for role in () if both_roles else ROLES:
        assert fleet.serving(role) >= settled.needed[role]
    assert sum(map(fleet.serving, ROLES)) >= sum(settled.needed.values())
    assert sum(settled.replicas.values()) <= 1.4 * sum(settled.needed.values()) + 3


@settings(max_examples=20)
@given(st.floats(0.1, 400.0), st.floats(1.0, 4.0), st.sampled_from([200.0, 2600.0]), st.sampled_from([20.0, 300.0]), st.booleans())
def test_more_load_never_asks_for_fewer(rate: float, factor: float, prompt: float, output: float, both_roles: bool) -> None:
    policy = config(surge=1000, prefill=pool(max_workers=1000), decode=pool(max_workers=1000))
    fleet = Fleet.of(policy, 2, 2, both_roles=both_roles)
    little, much = (
        decide(policy, Memory(), fleet.observe(traffic(r, prompt=prompt, output=output))).decision for r in (rate, rate * factor)
    )
    assert both_roles or all(little.needed[role] <= much.needed[role] for role in ROLES)
    assert sum(little.replicas.values()) <= sum(much.replicas.values())


@settings(max_examples=10)
@given(configs, st.lists(loads, min_size=1, max_size=8))
def test_the_same_again_gives_the_same_and_a_memory_goes_through_json(policy: PolicyConfig, seen: Loads) -> None:
    fleet = follow(policy, seen)
    memory = Memory()
    for observation, decision in zip(fleet.observations, fleet.decisions, strict=True):
        step = decide(policy, memory, observation)
        assert step.decision == decision
        assert decide(policy, memory, observation) == step
        memory = Memory.from_json(step.memory.to_json())
        assert memory == step.memory
    assert memory == fleet.memory
