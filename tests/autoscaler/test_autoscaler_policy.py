"""The autoscaler's decisions, by example: what it does when load comes and goes, when workers are lost, when nothing comes at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from policy_fleet import Fleet, config, pool, traffic, worker, workers

from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import Observation, Switch
from twostep.autoscaler.policy import decide

RATE = 20.0  # needs 2 prefill workers and 1 decode worker, and as many when one is lost


def test_a_load_is_met_and_a_spare_worker_kept_for_both_roles() -> None:
    settings = config()
    fleet = Fleet.of(settings, 2, 2)
    decision = fleet.step(traffic(RATE))
    assert dict(decision.needed) == {"prefill": 2, "decode": 1}
    assert (decision.prefill, decision.decode) == (2, 2)
    assert dict(decision.replicas) == {"prefill": 2, "decode": 2}
    assert (decision.switches, decision.victims, decision.limit) == ((), (), "")
    assert decision.reason == "20 requests/s need 2 + 1; 4 with reserve"


def test_without_switching_each_role_has_its_spare() -> None:
    fleet = Fleet.of(config(switching=False, hysteresis=0.0), 3, 1)
    assert dict(fleet.step(traffic(20.0)).replicas) == {"prefill": 3, "decode": 2}  # needs 2 + 1
    fleet = Fleet.of(config(switching=False, hysteresis=0.0, spare=0), 3, 1)
    fleet.run(traffic(20.0), 240.0)
    assert dict(fleet.decisions[-1].replicas) == {"prefill": 2, "decode": 1}


def test_more_load_is_answered_at_once() -> None:
    fleet = Fleet.of(config(), 2, 2)
    fleet.run(traffic(RATE), 120.0)
    decision = fleet.step(traffic(60.0))
    assert sum(decision.replicas.values()) >= 5 + 2
    assert not decision.victims


def test_less_is_believed_after_a_whole_cool_down() -> None:
    settings = config(cool_down_s=180.0)
    fleet = Fleet.of(settings, 4, 2)
    fleet.run(traffic(40.0), 300.0)
    before, since = sum(fleet.decisions[-1].replicas.values()), fleet.now_s
    while sum(fleet.step(traffic(3.0)).replicas.values()) == before:
        assert fleet.now_s - since < 300.0, "nothing was ever taken away"
    assert fleet.now_s - since > settings.cool_down_s
    assert sum(fleet.decisions[-1].replicas.values()) == 3
    assert len(fleet.decisions[-1].victims) == before - 3


@pytest.mark.parametrize("switching", [True, False])
def test_nobody_seen_of_those_that_were_asked_for_is_no_reason_for_fewer(switching: bool) -> None:
    fleet = Fleet.of(config(cool_down_s=60.0, switching=switching), 6, 4)
    fleet.run(traffic(60.0), 120.0)
    wanted = dict(fleet.decisions[-1].replicas)
    for _ in range(40):
        fleet.pods.clear()
        assert dict(fleet.step(traffic(0.1)).replicas) == wanted


def test_those_that_turn_out_to_be_there_are_not_ended_by_the_surge() -> None:
    """The first decision saw three of twenty."""
    settings = config(surge=4)
    first = decide(settings, Memory(), Observation(now_s=0.0, traffic=traffic(100.0), workers=workers(1, 2)))
    assert sum(first.decision.replicas.values()) < 12
    observation = Observation(now_s=15.0, traffic=traffic(100.0), workers=workers(12, 8), pods={"prefill": 12, "decode": 8})
    second = decide(settings, first.memory, observation).decision
    assert dict(second.replicas) == {"prefill": 12, "decode": 8}
    assert not second.victims


def test_a_new_leader_without_memory_takes_nothing_away_for_a_cool_down() -> None:
    fleet = Fleet.of(config(cool_down_s=180.0), 6, 4)
    for decision in fleet.run(traffic(3.0), 180.0):
        assert sum(decision.replicas.values()) == 10
    assert sum(fleet.run(traffic(3.0), 30.0)[-1].replicas.values()) < 10


def test_one_more_prefill_worker_is_a_switch_where_decode_has_one_to_spare() -> None:
    """The pod that is ordered instead belongs to the Deployment of the role that gave."""
    fleet = Fleet.of(config(), 2, 2)
    fleet.run(traffic(RATE), 60.0)
    decision = fleet.step(traffic(33.0))
    assert [switch.to for switch in decision.switches] == ["prefill"]
    switched = decision.switches[0].worker_id
    assert switched.startswith("decode")
    assert decision.prefill >= 3
    # Workers by role and pods by Deployment are the same number, and the switched worker counts for its pod's Deployment.
    assert decision.prefill + decision.decode == sum(decision.replicas.values())
    assert decision.replicas["prefill"] == decision.prefill - 1
    later = fleet.run(traffic(33.0), 120.0)[-1]
    assert not later.switches
    assert fleet.serving("prefill") >= 3


def test_a_switch_under_way_is_not_asked_for_again_and_one_that_failed_is() -> None:
    settings = config(drain_s=30.0)
    views = workers(2, 2)
    pods = {"prefill": 2, "decode": 2}
    first = decide(settings, Memory(), Observation(now_s=0.0, traffic=traffic(33.0), workers=views, pods=pods))
    assert len(first.decision.switches) == 1
    name = first.decision.switches[0].worker_id
    # It drains: no capacity, but expected as a prefill worker.
    draining = tuple(replace(w, draining=True, ready=False) if w.worker_id == name else w for w in views)
    second = decide(settings, first.memory, Observation(now_s=15.0, traffic=traffic(33.0), workers=draining, pods=first.decision.replicas))
    assert second.decision.switches == ()
    assert second.decision.replicas == first.decision.replicas
    # A minute later it is a decode worker still, and ready: nobody switched it.
    late = decide(settings, second.memory, Observation(now_s=75.0, traffic=traffic(33.0), workers=views, pods=second.decision.replicas))
    assert late.decision.switches == (Switch(worker_id=name, to="prefill"),)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_lost_worker_is_replaced_by_the_spare_within_two_intervals(role: str) -> None:
    """Its Deployment makes another pod by itself: none is asked for twice."""
    settings = config()
    fleet = Fleet.of(settings, 2, 2)
    before = fleet.run(traffic(RATE), 300.0)[-1]
    need = dict(before.needed)
    fleet.lose("prefill" if role == "prefill" else "decode")
    decisions = fleet.run(traffic(RATE), 2 * settings.interval_s)
    assert all(fleet.serving(name) >= need[name] for name in ("prefill", "decode"))
    assert all(sum(decision.replicas.values()) == sum(before.replicas.values()) for decision in decisions)
    fleet.run(traffic(RATE), 300.0)
    assert sum(fleet.decisions[-1].replicas.values()) == sum(before.replicas.values())
    assert fleet.serving("prefill") + fleet.serving("decode") == 4


def test_the_last_worker_of_a_role_is_replaced_even_without_a_spare() -> None:
    """One of two decode workers fills in for the only prefill worker, and goes back when its pod is there."""
    settings = config(spare=0, hysteresis=0.0)
    load = traffic(12.0, prompt=200.0, output=1500.0)
    fleet = Fleet.of(settings, 1, 2)
    before = fleet.run(load, 300.0)[-1]
    assert dict(before.replicas) == {"prefill": 1, "decode": 2}
    fleet.lose("prefill")
    decision = fleet.step(load)
    assert [switch.to for switch in decision.switches] == ["prefill"]
    assert (decision.prefill, decision.decode, dict(decision.replicas)) == (1, 2, {"prefill": 1, "decode": 2})
    fleet.run(load, 600.0)
    assert (fleet.serving("prefill"), fleet.serving("decode")) == (1, 2)
    assert [switch.to for decision in fleet.decisions for switch in decision.switches] == ["prefill", "decode"]


def test_idle_goes_to_zero_and_a_waiting_request_wakes_one_of_each_at_once() -> None:
    settings = config(prefill=pool(min_workers=0), decode=pool(min_workers=0), scale_to_zero_after_s=300.0, surge=1)
    fleet = Fleet.of(settings, 1, 1)
    fleet.run(traffic(1.0), 200.0)
    fleet.run(traffic(0.0), 285.0)
    assert sum(fleet.decisions[-1].replicas.values()) >= 2
    fleet.run(traffic(0.0), 600.0)
    assert dict(fleet.decisions[-1].replicas) == {"prefill": 0, "decode": 0}
    assert fleet.decisions[-1].reason == "idle: scaled to the least"
    decision = fleet.step(traffic(0.0, queued_requests=1))
    assert dict(decision.replicas) == {"prefill": 1, "decode": 1}
    # As soon as it has slept: no cool-down holds up who waits.
    assert (decision.prefill, decision.decode) == (1, 1)


def test_what_is_woken_for_a_flood_is_sized_by_the_workers_of_before() -> None:
    settings = config(prefill=pool(min_workers=0), decode=pool(min_workers=0), scale_to_zero_after_s=60.0, surge=8)
    fleet = Fleet.of(settings, 2, 1)
    fleet.run(traffic(10.0), 60.0)
    fleet.run(traffic(0.0), 900.0)
    assert sum(fleet.decisions[-1].replicas.values()) == 0
    decision = fleet.step(traffic(RATE, queued_requests=400))
    assert decision.replicas["prefill"] >= 3  # what waits is to be worked off too
    assert decision.replicas["decode"] >= 1


def test_without_scale_to_zero_the_least_stay() -> None:
    fleet = Fleet.of(config(), 2, 2)
    fleet.run(traffic(0.0), 3600.0)
    assert sum(fleet.decisions[-1].replicas.values()) == 3  # one each, and the spare


def test_draining_workers_are_no_capacity_and_are_not_taken_away_twice() -> None:
    settings = config(spare=0, hysteresis=0.0)
    views = workers(3, 1)
    leaving = (*views, worker("old", "prefill", draining=True, ready=False))
    step = decide(settings, Memory(), Observation(now_s=0.0, traffic=traffic(30.0), workers=leaving, pods={"prefill": 3, "decode": 1}))
    assert dict(step.decision.replicas) == {"prefill": 3, "decode": 1}
    assert step.decision.victims == ()


def test_victims_are_those_that_lose_least() -> None:
    settings = config(spare=0, hysteresis=0.0, cool_down_s=0.0)
    views = (
        worker("busy", "prefill", num_running=9, started_s=50.0),
        worker("young", "prefill", num_running=2, started_s=90.0),
        worker("old", "prefill", num_running=2, started_s=10.0),
        worker("starting", "prefill", ready=False, started_s=95.0),
        worker("d", "decode"),
    )
    seen = Observation(now_s=100.0, traffic=traffic(5.0), workers=views, pods={"prefill": 4, "decode": 1})
    step = decide(settings, Memory(began_s=0.0, at_s=85.0), seen)
    assert step.decision.victims == ("starting", "young", "old")
    # The same again while Kubernetes has not done it yet, though another has less to do now.
    now_idle = tuple(replace(w, num_running=0) if w.worker_id == "busy" else w for w in views)
    again = decide(settings, step.memory, replace(seen, now_s=115.0, workers=now_idle))
    assert set(again.decision.victims) == {"starting", "young", "old"}


def test_a_worker_that_switched_goes_first_when_its_role_shrinks() -> None:
    """A prefill worker too many, one of them in a pod of the decode Deployment, where a pod is too many too: no switch is needed."""
    settings = config(spare=0, hysteresis=0.0, cool_down_s=0.0, decode=pool(max_workers=2))
    views = (*workers(2, 1), worker("away", "prefill", "decode"))
    seen = Observation(now_s=100.0, traffic=traffic(20.0), workers=views, pods={"prefill": 2, "decode": 2})
    decision = decide(settings, Memory(began_s=0.0, at_s=85.0), seen).decision
    assert decision.victims == ("away",)
    assert dict(decision.replicas) == {"prefill": 2, "decode": 1}
    assert decision.switches == ()


def test_a_missed_target_with_workers_enough_asks_for_more_and_is_forgotten() -> None:
    settings = config(spare=0, hysteresis=0.0)
    fleet = Fleet.of(settings, 3, 1)
    fleet.run(traffic(25.0, ttft_met=0.99, tpot_met=1.0), 120.0)
    assert fleet.decisions[-1].needed["prefill"] == 2
    fleet.run(traffic(25.0, ttft_met=0.6, tpot_met=1.0), 600.0)
    assert fleet.decisions[-1].needed["prefill"] > 2
    assert fleet.decisions[-1].needed["decode"] == 1
    assert "slower than their curves: prefill" in fleet.decisions[-1].reason
    fleet.run(traffic(25.0, ttft_met=1.0, tpot_met=1.0), 3600.0)
    assert fleet.decisions[-1].needed["prefill"] == 2


def test_a_target_that_nobody_could_keep_asks_for_nobody() -> None:
    settings = config(ttft_ms=40.0, spare=0)  # a prompt alone takes 60 ms
    fleet = Fleet.of(settings, 3, 1)
    fleet.run(traffic(RATE, ttft_met=0.0, tpot_met=1.0), 600.0)
    assert "slower" not in fleet.decisions[-1].reason


def test_what_waits_and_cannot_be_served_in_time_counts_as_load() -> None:
    settings = config(spare=0)
    calm = Fleet.of(settings, 3, 1).step(traffic(RATE))
    late = Fleet.of(settings, 3, 1).step(traffic(RATE, queued_requests=3000))
    assert late.needed["prefill"] > calm.needed["prefill"]


def test_a_budget_holds_the_ratio_and_no_needed_worker_is_named_a_victim() -> None:
    settings = config(max_cost=5.0)
    fleet = Fleet.of(settings, 3, 2)
    for decision in fleet.run(traffic(90.0), 600.0):
        assert settings.affordable(decision.replicas)
        assert decision.victims == ()
    assert fleet.decisions[-1].limit == "max_cost"
    assert (fleet.serving("prefill"), fleet.serving("decode")) == (4, 1)  # of five that were there, what is nearest to the ratio


def test_workers_without_curves_are_scaled_by_what_a_busy_one_does() -> None:
    settings = config(spare=0, hysteresis=0.0)
    views = (
        worker("p", "prefill", curve=None, num_waiting=5, tokens_per_s=40_000.0),
        worker("d", "decode", curve=None, max_num_seqs=32, num_running=30),
    )
    pods = {"prefill": 1, "decode": 1}
    decision = decide(settings, Memory(), Observation(now_s=0.0, traffic=traffic(30.0), workers=views, pods=pods)).decision
    assert decision.needed["prefill"] == 3  # 30 * 2600 / (40000 * 0.85)
    assert decision.needed["decode"] == 2  # 30 sequences, 27.2 of each worker


def test_a_prompt_heavy_load_that_turns_output_heavy_moves_workers_not_pods() -> None:
    settings = config()
    fleet = Fleet.of(settings, 4, 2)
    fleet.run(traffic(40.0, prompt=2800.0, output=120.0), 300.0)
    for i in range(41):
        fleet.step(traffic(40.0, prompt=2800.0 - 45.0 * i, output=120.0 + 12.0 * i))
    load = traffic(40.0, prompt=1000.0, output=600.0)
    fleet.run(load, 120.0)
    assert sum(len(decision.switches) for decision in fleet.decisions) >= 1
    most = max(sum(decision.needed.values()) for decision in fleet.decisions)
    assert max(sum(decision.replicas.values()) for decision in fleet.decisions) <= most + 1
    assert fleet.serving("decode") >= fleet.decisions[-1].needed["decode"]
