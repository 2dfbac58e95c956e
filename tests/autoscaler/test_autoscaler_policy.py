"""The autoscaler's decisions, by example: what it does when load comes and goes, when workers are lost, when nothing comes at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from policy_fleet import Fleet, config, pool, traffic, worker, workers

from twostep.autoscaler.memory import Course, Memory, Wanted
from twostep.autoscaler.model import Observation, PolicyConfig, Switch, Traffic, WorkerView
from twostep.autoscaler.policy import Step, decide

RATE = 20.0  # needs 2 prefill workers and 1 decode worker, and as many when one is lost
BARE: dict[str, Any] = {"spare": 0, "hysteresis": 0.0}
ZERO: dict[str, Any] = {"prefill": pool(min_workers=0), "decode": pool(min_workers=0)}


def at(now_s: float, load: Traffic, views: Sequence[WorkerView], *pods: int) -> Observation:
    """`pods` of the prefill and of the decode Deployment."""
    return Observation(now_s=now_s, traffic=load, workers=tuple(views), pods=dict(zip(("prefill", "decode"), pods, strict=False)))


def first(settings: PolicyConfig, load: Traffic, views: Sequence[WorkerView], *pods: int, memory: Memory | None = None) -> Step:
    return decide(settings, memory or Memory(), at(100.0, load, views, *pods))


def replicas(fleet: Fleet) -> int:
    return sum(fleet.decisions[-1].replicas.values())


def test_a_load_is_met_and_a_spare_worker_kept_for_both_roles() -> None:
    decision = Fleet.of(config(), 2, 2).step(traffic(RATE))
    assert dict(decision.needed) == {"prefill": 2, "decode": 1}
    assert (decision.prefill, decision.decode, dict(decision.replicas)) == (2, 2, {"prefill": 2, "decode": 2})
    assert (decision.switches, decision.victims, decision.limit) == ((), (), "")
    assert decision.reason == "20 requests/s need 2 + 1; 4 with reserve"


def test_where_routers_refuse_what_would_be_late_the_reserve_is_what_was_missed_of_late() -> None:
    settings = config(hysteresis=0.35)
    kept = {}
    for promised, met in ((0.0, 1.0), (0.0, None), (1.0, None), (1.0, 1.0), (1.0, 0.98), (0.5, 1.0), (1.0, 0.955)):
        fleet = Fleet.of(settings, 8, 4, both_roles=True)
        fleet.run(traffic(120.0, promised=promised, ttft_met=met, tpot_met=met), 900.0)
        kept[promised, met] = replicas(fleet)
    bare = Fleet.of(replace(settings, **BARE), 8, 4, both_roles=True)
    bare.run(traffic(120.0, promised=1.0), 900.0)
    assert kept[0.0, 1.0] == kept[0.0, None], "where everybody waits, all of it is kept, however well it goes"
    assert kept[1.0, 0.98] <= replicas(bare), "none, while less than half is missed of what may be"
    assert kept[1.0, 1.0] <= kept[1.0, 0.98], "and what is left of it may be missed now"
    assert kept[1.0, 1.0] < kept[0.5, 1.0] <= kept[0.0, 1.0]
    assert kept[1.0, 1.0] < kept[1.0, 0.955] <= kept[1.0, None] <= kept[0.0, None]


def test_who_may_be_the_last_of_a_role_keeps_its_spare() -> None:
    decode = []
    for spare in (0, 1):
        fleet = Fleet.of(config(spare=spare, hysteresis=0.0, switching=False), 4, 2)
        decode.append(fleet.run(traffic(40.0, promised=1.0, ttft_met=1.0), 900.0)[-1].decode)
    assert decode == [1, 2]


@pytest.mark.parametrize("attainment", [0.01, 0.3, 0.99])
def test_any_attainment_is_one_to_size_by(attainment: float) -> None:
    fleet = Fleet.of(config(attainment=attainment), 4, 2, both_roles=True)
    for met in (1.0, 0.0, None):
        fleet.run(traffic(40.0, promised=1.0, ttft_met=met), 120.0)
        assert replicas(fleet) >= 2


def test_misses_are_forgotten_over_some_hours_and_not_before() -> None:
    fleet = Fleet.of(config(hysteresis=0.35), 4, 2, both_roles=True)
    calm, missing = (traffic(40.0, promised=1.0, ttft_met=met) for met in (1.0, 0.6))
    fleet.run(calm, 900.0)
    tight = replicas(fleet)
    fleet.run(missing, 600.0)
    assert replicas(fleet) > tight
    fleet.run(calm, 1200.0)
    assert replicas(fleet) > tight, "what corrected the curves is forgotten, what was missed is not"
    fleet.run(calm, 3 * 3600.0)
    assert replicas(fleet) == tight


def test_without_switching_each_role_has_its_spare() -> None:
    fleet = Fleet.of(config(switching=False, hysteresis=0.0), 3, 1)
    assert dict(fleet.step(traffic(RATE)).replicas) == {"prefill": 3, "decode": 2}
    fleet = Fleet.of(config(switching=False, **BARE), 3, 1)
    assert dict(fleet.run(traffic(RATE), 240.0)[-1].replicas) == {"prefill": 2, "decode": 1}


def test_more_is_asked_for_at_once_and_less_is_believed_after_a_whole_cool_down() -> None:
    fleet = Fleet.of(config(cool_down_s=180.0), 4, 2)
    fleet.run(traffic(40.0), 300.0)
    before, since = replicas(fleet), fleet.now_s
    while sum(fleet.step(traffic(3.0)).replicas.values()) == before:
        assert fleet.now_s - since < 300.0, "nothing was ever taken away"
    assert fleet.now_s - since > 180.0
    assert (replicas(fleet), len(fleet.decisions[-1].victims)) == (3, before - 3)
    decision = fleet.step(traffic(60.0))
    assert sum(decision.replicas.values()) >= 3 + 4
    assert not decision.victims


@pytest.mark.parametrize("switching", [True, False])
def test_workers_of_no_deployment_do_their_share_and_are_left_as_they_are(switching: bool) -> None:
    """Those of colocated pods: fewer are asked for while they serve, and none of them is to go or to switch."""
    settings, load = config(switching=switching, cool_down_s=60.0, **BARE), traffic(60.0)
    alone = dict(Fleet.of(settings, 9, 5).run(load, 300.0)[-1].replicas)
    beside = tuple(replace(view, owner=None, worker_id=f"beside-{view.worker_id}") for view in workers(2, 1))
    fleet = Fleet.of(settings, 9, 5)

    def run(views: Sequence[WorkerView]) -> dict[str, int]:
        for _ in range(30):
            seen = fleet.observe(load)
            decision = fleet.decide(replace(seen, workers=(*seen.workers, *views)))
            assert not {view.worker_id for view in views} & {*decision.victims, *(switch.worker_id for switch in decision.switches)}
        return dict(decision.replicas)

    fewer = run(beside)
    assert sum(alone.values()) - sum(fewer.values()) == 3
    assert switching or fewer == {"prefill": alone["prefill"] - 2, "decode": alone["decode"] - 1}
    assert run([replace(view, ready=False) for view in beside]) == alone


@pytest.mark.parametrize("switching", [True, False])
def test_nobody_seen_of_those_that_were_asked_for_is_no_reason_for_fewer(switching: bool) -> None:
    fleet = Fleet.of(config(cool_down_s=60.0, switching=switching), 6, 4)
    wanted = dict(fleet.run(traffic(60.0), 120.0)[-1].replicas)
    for _ in range(40):
        fleet.pods.clear()
        assert dict(fleet.step(traffic(0.1)).replicas) == wanted


def test_those_that_turn_out_to_be_there_are_not_ended_by_the_surge() -> None:
    """The first decision saw three of twenty."""
    step = first(config(surge=4), traffic(100.0), workers(1, 2))
    assert sum(step.decision.replicas.values()) < 12
    second = decide(config(surge=4), step.memory, at(115.0, traffic(100.0), workers(12, 8), 12, 8)).decision
    assert (dict(second.replicas), second.victims) == ({"prefill": 12, "decode": 8}, ())


def test_a_new_leader_without_memory_takes_nothing_away_for_a_cool_down() -> None:
    fleet = Fleet.of(config(cool_down_s=180.0), 6, 4)
    assert {sum(decision.replicas.values()) for decision in fleet.run(traffic(3.0), 180.0)} == {10}
    assert sum(fleet.run(traffic(3.0), 30.0)[-1].replicas.values()) < 10


def test_one_more_prefill_worker_is_a_switch_where_decode_has_one_to_spare() -> None:
    """The pod that is ordered instead belongs to the Deployment of the role that gave."""
    fleet = Fleet.of(config(), 2, 2)
    fleet.run(traffic(RATE), 60.0)
    decision = fleet.step(traffic(33.0))
    assert [switch.to for switch in decision.switches] == ["prefill"]
    assert decision.switches[0].worker_id.startswith("decode")
    assert decision.prefill >= 3
    # Workers by role and pods by Deployment are the same number, and the switched worker counts for its pod's Deployment.
    assert decision.prefill + decision.decode == sum(decision.replicas.values())
    assert decision.replicas["prefill"] == decision.prefill - 1
    assert not fleet.run(traffic(33.0), 120.0)[-1].switches
    assert fleet.serving("prefill") >= 3


def test_nobody_switches_to_spread_the_spare_nor_back_in_a_cool_down_without_need() -> None:
    assert not first(config(), traffic(1.0), workers(3, 1), 3, 1).decision.switches
    # Prefill can spare one of three for now, but not with what it keeps; a decode worker has come to it lately, or gone.
    load, settings = traffic(24.0, output=400.0), config(spare=0, hysteresis=0.35)
    for way, num in ((1, 0), (-1, 1)):
        memory = Memory(began_s=0.0, at_s=85.0, courses={"switch": Course(way=way, turned_s=90.0)})
        assert len(first(settings, load, workers(3, 1), 3, 1, memory=memory).decision.switches) == num


def test_a_bound_that_was_changed_holds_at_the_next_decision() -> None:
    """The bound counts a pool's pods, whatever their role: one of the three prefill workers is in a decode pod."""
    views = (*workers(2, 1), worker("away", "prefill", "decode"))
    memory = Memory(wanted=Wanted(prefill=3, decode=1, prefill_pods=2, decode_pods=2))
    for least, pods in ((1, 2), (3, 3)):
        decision = first(config(prefill=pool(min_workers=least), **BARE), traffic(RATE), views, 2, 2, memory=memory).decision
        assert decision.replicas["prefill"] == pods


def test_a_switch_under_way_is_not_asked_for_again_and_one_that_failed_is() -> None:
    settings, load, views = config(drain_s=30.0), traffic(33.0), workers(2, 2)
    step = first(settings, load, views, 2, 2)
    (switch,) = step.decision.switches
    # It drains: no capacity, but expected as a prefill worker.
    draining = [replace(w, draining=True, ready=False) if w.worker_id == switch.worker_id else w for w in views]
    pods = step.decision.replicas.values()
    second = decide(settings, step.memory, at(115.0, load, draining, *pods))
    assert (second.decision.switches, second.decision.replicas) == ((), step.decision.replicas)
    # A minute later it is a decode worker still, and ready: nobody switched it.
    late = decide(settings, second.memory, at(175.0, load, views, *pods))
    assert late.decision.switches == (Switch(worker_id=switch.worker_id, to="prefill"),)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_lost_worker_is_replaced_by_the_spare_within_two_intervals(role: Any) -> None:
    """Its Deployment makes another pod by itself: none is asked for twice."""
    fleet = Fleet.of(config(), 2, 2)
    before = fleet.run(traffic(RATE), 300.0)[-1]
    fleet.lose(role)
    decisions = fleet.run(traffic(RATE), 2 * fleet.config.interval_s)
    assert all(fleet.serving(name) >= num for name, num in before.needed.items())
    decisions += fleet.run(traffic(RATE), 300.0)
    assert {sum(decision.replicas.values()) for decision in decisions} == {4}
    assert fleet.serving("prefill") + fleet.serving("decode") == 4


def test_the_last_worker_of_a_role_is_replaced_even_without_a_spare() -> None:
    """One of two decode workers fills in for the only prefill worker, and goes back when its pod is there."""
    load = traffic(12.0, prompt=200.0, output=1500.0)
    fleet = Fleet.of(config(**BARE), 1, 2)
    assert dict(fleet.run(load, 300.0)[-1].replicas) == {"prefill": 1, "decode": 2}
    fleet.lose("prefill")
    decision = fleet.step(load)
    assert (decision.prefill, decision.decode, dict(decision.replicas)) == (1, 2, {"prefill": 1, "decode": 2})
    fleet.run(load, 600.0)
    assert (fleet.serving("prefill"), fleet.serving("decode")) == (1, 2)
    assert [switch.to for decision in fleet.decisions for switch in decision.switches] == ["prefill", "decode"]


def test_idle_goes_to_zero_and_a_waiting_request_wakes_one_of_each_at_once() -> None:
    fleet = Fleet.of(config(**ZERO, scale_to_zero_after_s=300.0, surge=1), 1, 1)
    fleet.run(traffic(1.0), 200.0)
    fleet.run(traffic(0.0), 285.0)
    assert replicas(fleet) >= 2
    fleet.run(traffic(0.0), 600.0)
    assert (replicas(fleet), fleet.decisions[-1].reason) == (0, "idle: scaled to the least")
    # As soon as it has slept: no cool-down holds up who waits.
    decision = fleet.step(traffic(0.0, queued_requests=1))
    assert (decision.prefill, decision.decode, dict(decision.replicas)) == (1, 1, {"prefill": 1, "decode": 1})
    always = Fleet.of(config(), 2, 2)
    always.run(traffic(0.0), 3600.0)
    assert replicas(always) == 3, "without scaling to zero one each, and the spare"


def test_what_is_woken_for_a_flood_is_sized_by_the_workers_of_before() -> None:
    fleet = Fleet.of(config(**ZERO, scale_to_zero_after_s=60.0, surge=8), 2, 1)
    fleet.run(traffic(10.0), 60.0)
    fleet.run(traffic(0.0), 900.0)
    assert replicas(fleet) == 0
    decision = fleet.step(traffic(RATE, queued_requests=400))
    assert decision.replicas["prefill"] >= 3  # what waits is to be worked off too
    assert decision.replicas["decode"] >= 1


def test_draining_workers_are_no_capacity_and_are_not_taken_away_twice() -> None:
    leaving = (*workers(3, 1), worker("old", "prefill", draining=True, ready=False))
    decision = first(config(**BARE), traffic(30.0), leaving, 3, 1).decision
    assert (dict(decision.replicas), decision.victims) == ({"prefill": 3, "decode": 1}, ())


def test_victims_are_those_that_lose_least() -> None:
    settings = config(**BARE, cool_down_s=0.0)
    views = (
        worker("busy", "prefill", num_running=9, started_s=50.0),
        worker("young", "prefill", num_running=2, started_s=90.0),
        worker("old", "prefill", num_running=2, started_s=10.0),
        worker("starting", "prefill", ready=False, started_s=95.0),
        worker("d", "decode"),
    )
    step = first(settings, traffic(5.0), views, 4, 1, memory=Memory(began_s=0.0, at_s=85.0))
    assert step.decision.victims == ("starting", "young", "old")
    # The same again while Kubernetes has not done it yet, though another has less to do now.
    now_idle = (replace(views[0], num_running=0), *views[1:])
    again = decide(settings, step.memory, at(115.0, traffic(5.0), now_idle, 4, 1))
    assert set(again.decision.victims) == {"starting", "young", "old"}


def test_a_worker_that_switched_goes_first_when_its_role_shrinks() -> None:
    """A prefill worker too many, one of them in a pod of the decode Deployment, where a pod is too many too: no switch is needed."""
    views = (*workers(2, 1), worker("away", "prefill", "decode"))
    settings = config(**BARE, cool_down_s=0.0, decode=pool(max_workers=2))
    decision = first(settings, traffic(20.0), views, 2, 2, memory=Memory(began_s=0.0, at_s=85.0)).decision
    assert (decision.victims, dict(decision.replicas), decision.switches) == (("away",), {"prefill": 2, "decode": 1}, ())


def test_a_missed_target_with_workers_enough_asks_for_more_and_is_forgotten() -> None:
    fleet = Fleet.of(config(**BARE), 3, 1)

    def needed(ttft_met: float, seconds: float) -> dict[str, int]:
        return dict(fleet.run(traffic(25.0, ttft_met=ttft_met, tpot_met=1.0), seconds)[-1].needed)

    assert needed(0.99, 120.0)["prefill"] == 2
    slow = needed(0.6, 600.0)
    assert (slow["prefill"] > 2, slow["decode"]) == (True, 1)
    assert "slower than their curves: prefill" in fleet.decisions[-1].reason
    assert needed(1.0, 3600.0)["prefill"] == 2
    # A prompt alone takes 60 ms: a target that nobody could keep asks for nobody; and nobody is slow where there are too few.
    for settings in (config(ttft_ms=40.0, spare=0), config(prefill=pool(max_workers=1))):
        fleet = Fleet.of(settings, min(3, settings.prefill.max_workers), 1)
        needed(0.0, 600.0)
        assert "slower" not in fleet.decisions[-1].reason


def test_what_waits_and_cannot_be_served_in_time_counts_as_load() -> None:
    calm, late = (Fleet.of(config(spare=0), 3, 1).step(traffic(RATE, queued_requests=num)) for num in (0, 3000))
    assert late.needed["prefill"] > calm.needed["prefill"]


def test_a_budget_holds_the_ratio_and_no_needed_worker_is_named_a_victim() -> None:
    fleet = Fleet.of(config(max_cost=5.0), 3, 2)
    assert {decision.victims for decision in fleet.run(traffic(90.0), 600.0)} == {()}
    assert fleet.decisions[-1].limit == "max_cost"
    assert (fleet.serving("prefill"), fleet.serving("decode")) == (4, 1)  # of five that were there, what is nearest to the ratio


def test_workers_without_curves_are_scaled_by_what_a_busy_one_does() -> None:
    views = (
        worker("p", "prefill", curve=None, num_waiting=5, tokens_per_s=40_000.0),
        worker("d", "decode", curve=None, max_num_seqs=32, num_running=30),
    )
    needed = first(config(**BARE), traffic(30.0), views, 1, 1).decision.needed
    assert needed["prefill"] == 3  # 30 * 2600 / (40000 * 0.85)
    assert needed["decode"] == 2  # 30 sequences, 27.2 of each worker


def test_a_prompt_heavy_load_that_turns_output_heavy_moves_workers_not_pods() -> None:
    fleet = Fleet.of(config(), 4, 2)
    fleet.run(traffic(40.0, prompt=2800.0, output=120.0), 300.0)
    for i in range(41):
        fleet.step(traffic(40.0, prompt=2800.0 - 45.0 * i, output=120.0 + 12.0 * i))
    fleet.run(traffic(40.0, prompt=1000.0, output=600.0), 120.0)
    assert any(decision.switches for decision in fleet.decisions)
    most = max(sum(decision.needed.values()) for decision in fleet.decisions)
    assert max(sum(decision.replicas.values()) for decision in fleet.decisions) <= most + 1
    assert fleet.serving("decode") >= fleet.decisions[-1].needed["decode"]


def test_workers_of_both_roles_need_fewer_pods_and_no_switch_when_a_role_has_nobody() -> None:
    load = traffic(90.0, prompt=1000.0, output=450.0, ttft_met=1.0, tpot_met=1.0)
    apart, both = (Fleet.of(config(), 4, 2, both_roles=both_roles) for both_roles in (False, True))
    for fleet in (apart, both):
        fleet.run(load, 900.0)
    assert sum(both.decisions[-1].replicas.values()) < sum(apart.decisions[-1].replicas.values())
    while both.serving("decode"):
        both.lose("decode")
    assert both.step(load).switches == ()
