"""Tests of the memory of decisions: the first one waits for workers that come up, a memory goes through Redis and back, and nobody is taken
away for load that is missing because a router is cut off from Redis and serves on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from policy_fleet import Fleet, config, pool, traffic, workers

from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import Decision, Observation
from twostep.autoscaler.policy import decide, why_wait
from twostep.errors import InvalidRequest

NOW = 10_000.0


def waits(prefill: int, decode: int, *, rate: float = 1.0, age_s: float = 1e4, looked_s: float = 0.0, ready: bool = True) -> str:
    """With a cold start of 60 s for prefill and 90 s for decode workers."""
    policy = config(prefill=pool(cold_start_s=60.0), decode=pool(cold_start_s=90.0))
    there = tuple(replace(view, ready=ready) for view in workers(prefill, decode))
    seen = Observation(now_s=NOW, traffic=traffic(rate), workers=there, pods={"prefill": prefill, "decode": decode})
    decision = decide(policy, Memory(), seen).decision
    return why_wait(policy, seen, decision, oldest_s=NOW - age_s if there else None, since_s=NOW - looked_s)


def test_whoever_decides_first_knows_workers_of_both_roles() -> None:
    assert waits(0, 0).startswith("no prefill and no decode worker serves yet")
    assert waits(2, 0).startswith("no decode worker serves yet")
    assert waits(2, 2, ready=False).startswith("no prefill and no decode worker serves yet")
    assert waits(2, 2) == ""


def test_those_that_began_with_the_first_are_waited_for_unless_the_load_needs_more() -> None:
    assert "less than a cold start ago" in waits(2, 2, age_s=89.0)
    assert waits(2, 2, age_s=90.0) == ""
    assert waits(2, 2, age_s=1.0, rate=300.0) == ""
    assert waits(0, 2, age_s=1.0, rate=300.0), "what one of them can do is not known"


@pytest.mark.parametrize(("prefill", "decode"), [(0, 0), (2, 0), (2, 2)])
def test_nobody_is_waited_for_beyond_what_pods_take_to_come(prefill: int, decode: int) -> None:
    assert waits(prefill, decode, age_s=10.0, looked_s=209.0)
    assert waits(prefill, decode, age_s=10.0, looked_s=210.0) == ""


# ---- the memory ---------------------------------------------------------------------------------------------------------


def busy() -> Fleet:
    fleet = Fleet.of(config(), 2, 2)
    fleet.run(traffic(20.0, ttft_met=0.5, tpot_met=1.0), 60.0)
    fleet.step(traffic(33.0))
    return fleet


def test_a_full_memory_goes_through_json() -> None:
    memory = busy().memory
    assert memory.forecast is not None
    assert memory.wanted is not None
    assert len(memory.needs) == 1, "those that a later one outdoes are forgotten"
    assert memory.switching
    for each in (memory, Memory()):
        assert Memory.from_json(each.to_json()) == each
    assert Memory.from_json(memory.to_json().encode()) == memory


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"form":0}', '"x"', '{"form":1,"began_s":NaN}', "[" * 5000, b"\xff\xfe".decode("latin1")],
)
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="begin without one"):
        Memory.from_json(text)


def test_a_memory_with_a_damaged_part_is_refused() -> None:
    whole = json.loads(busy().memory.to_json())
    for name in whole:
        for damage in ("x", 7, [7], {"x": {"y": 1}}, 10**400):
            text = json.dumps({**whole, name: damage})
            try:
                Memory.from_json(text)
            except InvalidRequest:
                continue
            assert damage != 10**400
            assert name in ("at_s", "began_s", "busy_s", "missed", "unheard_s", "victims", "courses"), f"{name} = {damage!r} was taken"


# ---- routers that are not heard -----------------------------------------------------------------------------------------

RATE = 40.0
SILENT_S = 120.0  # for which the windows of a router that is gone are there


class CutOff(Fleet):
    """A fleet whose routers tell of `told` requests a second while `served` are served."""

    def for_s(self, seconds: float, told: float, *, silent: int = 0, served: float = RATE, **more: Any) -> list[Decision]:
        decisions = []
        for _ in range(round(seconds / self.config.interval_s)):
            seen, load = self.observe(traffic(served)), traffic(told, silent_routers=silent, **more)
            tokens = served * (load.prompt_tokens + load.output_tokens)
            views = tuple(replace(view, tokens_per_s=tokens / len(seen.workers)) for view in seen.workers)
            decisions.append(self.decide(replace(seen, traffic=load, workers=views)))
        return decisions


@pytest.mark.parametrize("share", [0.75, 0.85])
def test_who_keeps_no_room_waits_for_a_router_that_tells_of_little_less(share: float) -> None:
    """Requests name targets and none is late: there is no reserve that would carry the others."""
    fleet = CutOff.of(config(hysteresis=0.35), 3, 2, both_roles=True)
    fleet.for_s(900.0, 2 * RATE, served=2 * RATE, promised=1.0, ttft_met=1.0)
    before = dict(fleet.decisions[-1].replicas)
    fleet.for_s(SILENT_S, share * 2 * RATE, silent=1, served=2 * RATE, promised=1.0, ttft_met=1.0)
    for decision in fleet.for_s(1200.0, share * 2 * RATE, served=2 * RATE, promised=1.0, ttft_met=1.0):
        assert dict(decision.replicas) == before


def settled(*, switching: bool) -> tuple[CutOff, dict[str, int]]:
    fleet = CutOff.of(config(switching=switching, hysteresis=0.35), 2, 2)
    fleet.for_s(900.0, RATE)
    return fleet, dict(fleet.decisions[-1].replicas)


@pytest.mark.parametrize("switching", [True, False])
def test_nobody_is_taken_away_while_a_router_that_is_silent_may_serve_on(switching: bool) -> None:
    fleet, before = settled(switching=switching)
    silent, later = fleet.for_s(SILENT_S, RATE / 2, silent=1), fleet.for_s(3600.0, RATE / 2)
    for decision in [*silent, *later]:
        assert dict(decision.replicas) == before
        assert (decision.switches, decision.victims) == ((), ())
    assert "1 of the routers silent" in silent[-1].reason
    assert "workers do more than routers told of" in fleet.decisions[-1].reason
    # It is heard of again, with all that is asked; or it has died, and its clients have gone.
    fleet.for_s(600.0, RATE)
    assert dict(fleet.decisions[-1].replicas) == before
    assert fleet.memory.unheard_s is None


@pytest.mark.parametrize("switching", [True, False])
def test_a_router_that_died_holds_nobody_for_longer_than_its_windows_and_a_cool_down(switching: bool) -> None:
    fleet, before = settled(switching=switching)
    other, _ = settled(switching=switching)
    fleet.for_s(SILENT_S, RATE / 4, silent=1, served=RATE / 4)
    assert dict(fleet.decisions[-1].replicas) == before
    fleet.for_s(fleet.config.cool_down_s + 2 * fleet.config.interval_s, RATE / 4, served=RATE / 4)
    assert sum(fleet.decisions[-1].replicas.values()) < sum(before.values())
    # In the end as one that said so.
    fleet.for_s(1200.0, RATE / 4, served=RATE / 4)
    other.for_s(1800.0, RATE / 4, served=RATE / 4)
    assert fleet.decisions[-1].replicas == other.decisions[-1].replicas
    assert fleet.memory.unheard_s is None


def test_more_is_asked_for_all_the_same_and_work_alone_is_no_sign() -> None:
    fleet, before = settled(switching=True)
    fleet.for_s(60.0, 2.5 * RATE, silent=1, served=2.5 * RATE)
    assert sum(fleet.decisions[-1].replicas.values()) > sum(before.values())
    other, before = settled(switching=True)
    other.for_s(900.0, RATE / 4)
    assert sum(other.decisions[-1].replicas.values()) < sum(before.values()), "no router had fallen silent"


def test_what_one_role_needs_more_is_not_taken_from_what_the_other_one_keeps() -> None:
    fleet = Fleet.of(config(hysteresis=0.35), 2, 2)
    fleet.run(traffic(80.0, output=16.0), 900.0)
    before = fleet.decisions[-1]
    for _ in range(8):
        decision = fleet.step(traffic(20.0, output=800.0, silent_routers=1))
        assert decision.prefill >= before.prefill
        assert decision.decode >= decision.needed["decode"]
        assert decision.decode > before.decode


def test_what_is_covered_by_the_room_that_is_kept_is_no_reason_to_wait() -> None:
    """One of five routers is silent: the load of the others, with hysteresis, covers all of it."""
    fleet, _ = settled(switching=True)
    fleet.for_s(SILENT_S, 0.8 * RATE, silent=1)
    fleet.for_s(600.0, 0.8 * RATE)
    assert fleet.memory.unheard_s is None
