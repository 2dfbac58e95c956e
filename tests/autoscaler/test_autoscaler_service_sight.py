"""Who sees half of it, or nothing, must not take that for all there is: nobody is scaled in for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from service_harness import SECRET, Clock, Load, RedisServer, Writer, config, eventually, running, worker

from twostep.autoscaler.collect import ObservationCollector
from twostep.autoscaler.external_scaler import DecisionBoard
from twostep.autoscaler.fleet import Fleet
from twostep.autoscaler.model import Role, Switch
from twostep.autoscaler.switches import Switcher
from twostep.cluster.records import WorkerRecord
from twostep.cluster.scaling import ScalingRecord
from twostep.prefix import secret_check

COLD_S: dict[Role, float] = {"prefill": 60.0, "decode": 60.0}
ALL = (*(worker(f"p{number}", "prefill") for number in range(4)), *(worker(f"d{number}", "decode") for number in range(4)))


class Filling(ObservationCollector):
    """After each look at workers some more of them have registered."""

    def __init__(self, writer: Writer, clock: Clock, waves: list[Sequence[WorkerRecord]]) -> None:
        super().__init__(writer.redis, Fleet(secret_check(SECRET), COLD_S), SECRET, span_s=30.0, clock=clock, look_again_s=0.001)
        self._writer, self.waves = writer, waves

    async def _look_at(self, known: Sequence[str]) -> dict[str, WorkerRecord]:
        found = await super()._look_at(known)
        if self.waves:
            await self._writer.workers(*self.waves.pop(0))
        return found


async def test_without_a_decision_to_go_on_from_it_waits_for_those_who_register(redis_server: RedisServer, writer: Writer) -> None:
    """Redis has come back empty, and the leader is a new one."""
    clock = Clock()
    await writer.load(clock.now_s, Load(requests=20))
    collector = Filling(writer, clock, [ALL[:1], ALL[:5], ALL])
    look = await collector.look()
    assert sorted(record.worker_id for record in look.records) == sorted(record.worker_id for record in ALL)
    assert collector.observation(look, None).pods == {"prefill": 4, "decode": 4}


async def test_workers_that_are_all_another_deployments_are_not_none(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    clock = Clock()
    strangers = [replace(record, secret_check="another") for record in ALL]
    await writer.workers(*strangers)
    await writer.load(clock.now_s, Load(requests=20))
    settings = config(redis_server.url, tmp_path, interval=0.1, leader_lease=3600.0)
    async with running(settings, clock) as autoscaler:
        await eventually(lambda: autoscaler.metrics.skipped.labels("workers")._value.get() > 2, "looks without a decision")
        assert autoscaler.board.record is None
        await writer.workers(*strangers[:2], *ALL[2:])
        await eventually(lambda: autoscaler.board.record is not None, "a decision by those that count")


async def test_what_was_wanted_counts_where_redis_has_forgotten_it(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    """The same leader: workers that are back late are pods that are to come."""
    clock = Clock()
    await writer.workers(*ALL)
    await writer.load(clock.now_s, Load(requests=1))
    settings = config(redis_server.url, tmp_path, interval=60.0, leader_lease=3600.0)
    async with running(settings, clock) as autoscaler:
        await eventually(lambda: autoscaler.board.record is not None, "a decision")
        await writer.redis.flushall()
        await writer.workers(*ALL[3:6])
        clock.now_s += 60.0
        await writer.load(clock.now_s, Load(requests=1))
        await autoscaler.leadership.renew()
        autoscaler.controller.wake()
        await eventually(lambda: autoscaler.board.answer().at_s == clock.now_s, "another decision")
        assert autoscaler.board.answer().pods == {"prefill": 4, "decode": 4}
        assert autoscaler.board.answer().replicas == {"prefill": 4, "decode": 4}


def decision(token: int, at_s: float) -> ScalingRecord:
    counts = {"prefill": 2, "decode": 3}
    return ScalingRecord(token=token, number=1, leader="a", at_s=at_s, interval_s=1.0, replicas=counts, pods=counts, wanted=counts)


def test_a_leader_that_begins_with_small_tokens_again_is_believed_once_the_old_word_is_too_old() -> None:
    clock = Clock()
    board = DecisionBoard(stale_s=60.0, max_listeners=1, clock=clock)
    old, new = decision(7, 100.0), decision(1, 110.0)
    board.show(old, 0.0)
    board.show(new, 0.0)
    assert board.answer() == old, "it may be what a leader before has left"
    clock.now_s += 60.0
    board.show(new, 70.0)
    assert board.record == old, "no better"
    board.show(new, 5.0)
    assert board.answer() == new
    assert board.age_s == pytest.approx(5.0)
    board.show(new, 0.0)
    assert board.age_s == pytest.approx(5.0), "the same decision does not grow younger"


async def test_a_switch_that_is_not_wanted_any_more_is_not_asked_for() -> None:
    asked: list[str] = []
    switcher = Switcher(SECRET, drain_s=1.0, on_result=lambda record, to, outcome: asked.append(record.worker_id))
    there = [worker(f"p{number}", "prefill", address="127.0.0.1:9") for number in range(4)]
    switches = [Switch(worker_id=f"p{number}", to="decode") for number in range(3)]
    switcher.start(switches, there, {f"p{number}": "decode" for number in range(3)})
    switcher.start([], there, {"p0": "decode", "p2": "decode"})
    await eventually(lambda: not switcher.busy, "rest")
    assert asked == ["p0", "p2"]
    await switcher.close()
