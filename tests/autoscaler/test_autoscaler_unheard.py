"""A router that is cut off from Redis serves on: what is asked of it is missing in the load, and nobody is taken away for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from policy_fleet import Fleet, config, traffic
from service_harness import SECRET, Clock, Load, RedisServer, Writer, eventually, running, worker
from service_harness import config as service_config

from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import Decision, Observation
from twostep.autoscaler.policy import decide
from twostep.cluster.demand import WINDOW_S, DemandTotals, demand_key, signed_totals, window_of
from twostep.cluster.records import WorkerLoad
from twostep.cluster.signed import DEMAND, Signer
from twostep.settings.autoscaler import PoolSettings

RATE = 40.0
SILENT_S = 120.0  # for which the windows of a router that is gone are there


class CutOff(Fleet):
    """Of `RATE` requests a second that are served, routers tell of `told`."""

    def observe_cut(self, told: float, *, silent: int, served: float = RATE) -> Observation:
        seen = self.observe(traffic(served))
        load = traffic(told, silent_routers=silent)
        tokens = served * (load.prompt_tokens + load.output_tokens)
        views = tuple(replace(view, tokens_per_s=tokens / len(seen.workers)) for view in seen.workers)
        return replace(seen, traffic=load, workers=views)

    def step_cut(self, told: float, *, silent: int = 0, served: float = RATE) -> Decision:
        observation = self.observe_cut(told, silent=silent, served=served)
        result = decide(self.config, Memory.from_json(self.memory.to_json()), observation)
        self.memory = result.memory
        self.observations.append(observation)
        self.decisions.append(result.decision)
        self.follow(result.decision)
        self.now_s += self.config.interval_s
        return result.decision

    def for_s(self, seconds: float, told: float, *, silent: int = 0, served: float = RATE) -> list[Decision]:
        return [self.step_cut(told, silent=silent, served=served) for _ in range(round(seconds / self.config.interval_s))]


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
    """Of five routers one: what the others tell, with hysteresis, is more than all of it."""
    fleet, _ = settled(switching=True)
    fleet.for_s(SILENT_S, 0.8 * RATE, silent=1)
    fleet.for_s(600.0, 0.8 * RATE)
    assert fleet.memory.unheard_s is None


async def test_of_two_routers_one_is_cut_off(
    redis_server: RedisServer, writer: Writer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Through Redis: its windows end, nobody goes; it says that it leaves, and they go as ever."""
    clock, load = Clock(), Load(requests=1)
    busy = WorkerLoad(tokens_per_s=5000.0)
    fleet = [*(worker(f"p{number}", "prefill", load=busy) for number in range(4)), worker("d", "decode")]
    await writer.workers(*fleet)
    settings = service_config(
        redis_server.url,
        tmp_path,
        interval=60.0,
        leader_lease=3600.0,
        cool_down=60.0,
        switch_roles=False,
        prefill=PoolSettings(max_workers=4),
        decode=PoolSettings(max_workers=1),
    )
    await writer.load(clock.now_s, load, routers=2)
    async with running(settings, clock) as autoscaler:

        async def after_a_minute(number: int) -> int:
            clock.now_s += 60.0
            await writer.load(clock.now_s, load)
            autoscaler.controller.wake()
            await eventually(lambda: autoscaler.board.answer().number == number, "another decision")
            return autoscaler.board.answer().replicas["prefill"]

        await eventually(lambda: autoscaler.board.record is not None, "a decision")
        assert [await after_a_minute(number) for number in range(2, 8)] == [4] * 6
        assert "router-1 is silent" in caplog.text
        window = window_of(clock.now_s) - 1
        last = signed_totals(Signer(SECRET, DEMAND), window, "router-1", DemandTotals(left=1))
        await writer.redis.hset(demand_key(window), mapping={"router-1": last})
        await writer.workers(*(replace(record, load=WorkerLoad()) for record in fleet))
        assert min([await after_a_minute(number) for number in range(8, 14)]) < 4
    assert WINDOW_S * 24 == SILENT_S
