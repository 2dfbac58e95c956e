"""One leader at a time, by a lease in Redis: who takes over goes on from its memory, who was stopped does nothing, and an answer that is
too old is none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
import redis
from service_harness import SIGNER, Clock, Load, RedisServer, Writer, client, config, eventually, keda, running, worker

from twostep.autoscaler.config import AutoscalerConfig
from twostep.autoscaler.leadership import Leadership
from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import Observation, PolicyConfig
from twostep.autoscaler.policy import Step, decide
from twostep.autoscaler.server import Autoscaler
from twostep.cluster.records import WorkerRecord
from twostep.cluster.scaling import DECISION_KEY, LEASE_KEY, TOKEN_KEY, ScalingRecord


class Stopwatch:
    """A clock that does not go back, and goes on when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def record(lease: Leadership, leader: str = "a", number: int = 1) -> ScalingRecord:
    counts = {"prefill": 2, "decode": 3}
    return ScalingRecord(
        token=lease.token, number=number, leader=leader, at_s=1.0, interval_s=1.0, replicas=counts, pods=counts, wanted=counts
    )


async def test_one_holds_the_lease_until_it_ends_and_tokens_grow(redis_server: RedisServer, writer: Writer) -> None:
    mine, yours = Stopwatch(), Stopwatch()
    a = Leadership(writer.redis, "a", SIGNER, ttl_s=3600.0, clock=mine)
    b = Leadership(writer.redis, "b", SIGNER, ttl_s=3600.0, clock=yours)
    assert await a.renew()
    assert not await b.renew()
    assert (a.held, a.token, b.held, b.token) == (True, 1, False, 0)
    mine.now_s += 3000.0
    assert await a.renew(), "renewed"
    mine.now_s += 3000.0
    assert a.held, "from the last renewal on"
    mine.now_s += 300.0
    assert not a.held, "it ends here a tenth earlier than there"
    await writer.redis.delete(LEASE_KEY)
    assert await b.renew()
    assert b.token == 2
    assert not await a.renew(), "b's now"
    assert (a.held, a.token) == (False, 0)
    await b.release()
    assert await a.renew(), "b has given it back"
    assert a.token == 3


async def test_a_leader_that_was_stopped_writes_nothing_over_its_successor(redis_server: RedisServer, writer: Writer) -> None:
    mine, yours = Stopwatch(), Stopwatch()
    a, b = (
        Leadership(writer.redis, "a", SIGNER, ttl_s=3600.0, clock=mine),
        Leadership(writer.redis, "b", SIGNER, ttl_s=3600.0, clock=yours),
    )
    assert await a.renew()
    late = record(a)
    assert await a.commit(late)
    await writer.redis.delete(LEASE_KEY)  # as after its end: a's own clock has stood still
    assert await b.renew()
    assert await b.commit(record(b, "b"))
    assert a.held, "it does not know yet"
    assert not await a.commit(late), "and Redis refuses it"
    assert not a.held
    text = await writer.redis.get(DECISION_KEY)
    assert ScalingRecord.from_redis(text, SIGNER).leader == "b"


async def test_two_that_have_it_by_turns_never_hold_it_at_once(redis_server: RedisServer, writer: Writer) -> None:
    """With a real clock and a short lease, each held up now and then for longer than the lease lasts."""
    holders = [Leadership(writer.redis, name, SIGNER, ttl_s=0.2) for name in ("a", "b", "c")]
    terms: list[tuple[int, str]] = []

    async def take_turns(number: int, lease: Leadership) -> None:
        for turn in range(12):
            await lease.renew()
            if lease.held:
                assert not any(other.held for other in holders if other is not lease), "another one holds it too"
                terms.append((lease.token, str(number)))
                await lease.commit(record(lease, str(number), turn))
            await asyncio.sleep(0.3 if turn % 4 == number else 0.03)

    await asyncio.gather(*(take_turns(number, lease) for number, lease in enumerate(holders)))
    by_token = dict(terms)
    assert all(by_token[token] == holder for token, holder in terms), "a token belongs to one of them"
    assert len(by_token) > 1, "it changed hands"


async def test_redis_that_has_lost_everything_gives_out_larger_tokens_all_the_same(redis_server: RedisServer, writer: Writer) -> None:
    a, b = Leadership(writer.redis, "a", SIGNER, ttl_s=3600.0), Leadership(writer.redis, "b", SIGNER, ttl_s=3600.0)
    for _ in range(5):
        await a.renew()
        await a.release()
    await a.renew()
    assert a.token == 6
    b.saw(6)
    await writer.redis.flushall()
    assert await b.renew()
    assert b.token == 7
    await writer.redis.set(TOKEN_KEY, "nonsense")
    await b.release()
    assert await b.renew(), "what is damaged is begun again from what was seen"
    assert b.token == 8


async def test_without_redis_the_lease_ends_by_itself(redis_server: RedisServer) -> None:
    async with client(redis_server.url) as connection:
        watch = Stopwatch()
        lease = Leadership(connection, "a", SIGNER, ttl_s=10.0, clock=watch)
        assert await lease.renew()
        redis_server.kill()
        assert await lease.renew(), "held still"
        assert not lease.reachable
        assert not await lease.commit(record(lease)), "but nothing can be decided"
        watch.now_s += 9.5
        assert not await lease.renew()


def settings_of(redis_server: RedisServer, tmp_path: Path, name: str, **options: float) -> AutoscalerConfig:
    return config(redis_server.url, tmp_path, **({"autoscaler_id": name, "interval": 0.1, "leader_lease": 0.5} | options))


def led_by(autoscaler: Autoscaler, name: str) -> bool:
    return autoscaler.board.record is not None and autoscaler.board.record.leader == name and autoscaler.board.fresh


async def vanish(autoscaler: Autoscaler) -> None:
    """As if its process were gone: nothing is handed back."""
    await autoscaler._stop_tasks()


async def test_any_replica_answers_and_another_goes_on_from_the_memory(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    clock = Clock()
    await writer.workers(worker("p", "prefill"), worker("d", "decode"))
    await writer.load(clock.now_s, Load(requests=30, prompt_tokens=1500))
    long = {"interval": 30.0, "leader_lease": 3600.0, "stale_after": 1000}
    async with (
        running(settings_of(redis_server, tmp_path, "one", **long), clock) as one,
        running(settings_of(redis_server, tmp_path, "two", **long), clock) as two,
        keda(one.port) as of_one,
        keda(two.port) as of_two,
    ):
        await eventually(lambda: led_by(one, "one"), "the first leader")
        clock.now_s += 30.0
        await writer.load(clock.now_s, Load(requests=30, prompt_tokens=1500))
        one.controller.wake()
        await eventually(lambda: one.board.answer().number == 2, "its second decision")
        two.controller.wake()
        await eventually(lambda: two.board.record == one.board.record, "the other replica's look")
        assert await of_two.value("prefill") == await of_one.value("prefill") > 1
        before = one.board.answer()
        await vanish(one)
        clock.now_s += 30.0
        await writer.load(clock.now_s, Load(requests=30, prompt_tokens=1500))
        await writer.redis.delete(LEASE_KEY)  # as at its end
        assert await two.leadership.renew()
        two.controller.wake()
        await eventually(lambda: led_by(two, "two"), "a decision of the other one")
        after, seen = two.board.answer(), two.controller.observation
        assert after.token > before.token
        assert seen is not None
        assert isinstance(before.memory, str)
        step = decide(two.config.policy(), Memory.from_json(before.memory), seen)
        assert after.replicas == step.decision.replicas
        assert after.memory == step.memory.to_json(), "it goes on where the other one was"
        # The one that was gone comes back, and follows.
        assert not await one.leadership.renew()
        await one.controller.step()
        assert one.board.answer() == after


async def test_a_leader_that_is_told_to_stop_hands_over_at_once(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    clock = Clock()
    await writer.workers(worker("p", "prefill"), worker("d", "decode"))
    await writer.load(clock.now_s, Load(requests=1))
    async with running(settings_of(redis_server, tmp_path, "two", leader_lease=2.0), clock) as two:
        await eventually(lambda: two.leadership.held, "the lease")
        await two.leadership.release()
        async with running(settings_of(redis_server, tmp_path, "one", leader_lease=3600.0), clock) as one:
            # Whichever of them takes it; the first to stop leaves it to the other one.
            await eventually(lambda: one.leadership.held or two.leadership.held, "a leader")
        await eventually(lambda: two.leadership.held, "the one that is left")


async def test_redis_away_and_back(
    redis_server: RedisServer, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The last decision is answered until it is too old; then the answer is UNAVAILABLE, until Redis is back. How old it is, and how long
    the lease lasts, goes by a clock of the test."""
    clock, watch = Clock(), Stopwatch()
    await writer.workers(worker("p", "prefill"), worker("d", "decode"))
    await writer.load(clock.now_s, Load(requests=1))
    one = Autoscaler(settings_of(redis_server, tmp_path, "one", stale_after=30), clock=clock, look_again_s=0.05)
    monkeypatch.setattr(one.board, "_clock", watch)
    monkeypatch.setattr(one.leadership, "_clock", watch)
    await one.start()
    try:
        async with keda(one.port) as asked:
            await eventually(lambda: one.board.fresh, "a decision")
            assert ScalingRecord.from_redis(await writer.redis.get(DECISION_KEY), SIGNER).stale_s == pytest.approx(3.0), "routers are told"
            value = await asked.value("decode")
            redis_server.kill()
            await eventually(lambda: not one.leadership.reachable, "a renewal in vain")
            watch.now_s += 2.9
            assert await asked.value("decode") == value, "not too old yet"
            watch.now_s += 0.2
            assert await asked.refusal("decode") is grpc.StatusCode.UNAVAILABLE
            assert not one.leadership.held
            assert one._alive(), "a restart would not help"
            redis_server.start()
            async with client(redis_server.url) as connection:
                await connection.flushall()
                again = Writer(connection)
                await again.workers(worker("p", "prefill"), worker("d", "decode"))
                await again.load(clock.now_s, Load(requests=1))
                await eventually(lambda: one.board.fresh, "another decision")
            assert await asked.value("decode") == value
            assert one.board.answer().token > 1, "a new lease"
    finally:
        await one.drain(0.0)


async def test_what_nobody_knows_is_not_taken_for_nothing_to_do(redis_server: RedisServer, writer: Writer, tmp_path: Path) -> None:
    clock = Clock()
    await writer.workers(*(worker(f"p{number}", "prefill") for number in range(4)), worker("d", "decode"))
    async with (
        running(settings_of(redis_server, tmp_path, "one", stale_after=10, leader_lease=3600.0), clock) as one,
        keda(one.port) as asked,
    ):
        await eventually(lambda: one.metrics.skipped.labels("demand")._value.get() > 2, "intervals without a decision")
        assert await asked.refusal() is grpc.StatusCode.UNAVAILABLE
        await writer.load(clock.now_s, Load(requests=1))
        await eventually(lambda: one.board.fresh, "a decision")
        await writer.forget_load()
        await eventually(lambda: not one.board.fresh, "its end")
        assert one.leadership.held


async def test_workers_that_were_there_a_moment_ago_are_looked_for_again(
    redis_server: RedisServer, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis came back empty, and their next heartbeats fill it: just before the second look."""
    clock = Clock()
    both = (worker("p", "prefill"), worker("d", "decode"))
    beats: list[tuple[WorkerRecord, ...]] = []
    await writer.workers(*both)
    await writer.load(clock.now_s, Load(requests=1))
    async with running(settings_of(redis_server, tmp_path, "one", interval=60.0, leader_lease=3600.0), clock, look_again_s=0.001) as one:
        await eventually(lambda: one.board.record is not None, "a decision")
        look_at = one.controller._collector._look_at

        async def after_a_beat(names: Sequence[str]) -> dict[str, WorkerRecord]:
            if names and beats:
                await writer.workers(*beats.pop())
            return await look_at(names)

        monkeypatch.setattr(one.controller._collector, "_look_at", after_a_beat)
        await writer.workers()
        beats.append(both)
        clock.now_s += 60.0
        await writer.load(clock.now_s, Load(requests=1))
        one.controller.wake()
        await eventually(lambda: one.board.answer().number == 2, "another decision")
        assert not beats, "it has looked twice"
        seen = one.controller.observation
        assert seen is not None
        assert [view.worker_id for view in seen.workers] == ["d", "p"]
        await writer.workers(both[1])
        clock.now_s += 60.0
        await writer.load(clock.now_s, Load(requests=1))
        one.controller.wake()
        await eventually(lambda: one.board.answer().number == 3, "one that is gone for good")
        seen = one.controller.observation
        assert seen is not None
        assert [view.worker_id for view in seen.workers] == ["d"]


async def test_a_leader_that_loses_its_lease_while_it_decides_does_nothing(
    redis_server: RedisServer, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = Clock(), list[object]()
    await writer.workers(worker("p", "prefill"), worker("d", "decode"))
    await writer.load(clock.now_s, Load(requests=1))
    settings = settings_of(redis_server, tmp_path, "one", interval=30.0, leader_lease=3600.0)

    def taken_away(policy: PolicyConfig, memory: Memory, observation: Observation) -> Step:
        with redis.Redis.from_url(redis_server.url) as connection:
            connection.set(LEASE_KEY, "99:two")
        return decide(policy, memory, observation)

    one = Autoscaler(settings, clock=clock, look_again_s=0.05)
    monkeypatch.setattr(one.controller, "_policy", taken_away)
    monkeypatch.setattr(one._switcher, "start", lambda *arguments: asked.append(arguments))
    await one.start()
    try:
        await eventually(lambda: one.metrics.skipped.labels("lease")._value.get() == 1, "a decision that does not stand")
        assert not one.leadership.held
        assert one.board.record is None
        assert asked == []
        assert await writer.redis.get(DECISION_KEY) is None
    finally:
        await one.drain(0.0)


async def test_a_memory_that_the_policy_fails_with_is_left_behind(
    redis_server: RedisServer, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    await writer.workers(worker("p", "prefill"), worker("d", "decode"))
    await writer.load(clock.now_s, Load(requests=1))

    def fails_with_a_memory(policy: PolicyConfig, memory: Memory, observation: Observation) -> Step:
        if memory != Memory():
            raise ZeroDivisionError
        return decide(policy, memory, observation)

    settings = settings_of(redis_server, tmp_path, "one", interval=30.0, leader_lease=3600.0)
    one = Autoscaler(settings, clock=clock, look_again_s=0.05)
    monkeypatch.setattr(one.controller, "_policy", fails_with_a_memory)
    await one.start()
    try:
        await eventually(lambda: one.board.record is not None, "a decision")
        clock.now_s += 30.0
        await writer.load(clock.now_s, Load(requests=1))
        one.controller.wake()
        await eventually(lambda: one.board.answer().number == 2, "another one")
        assert "the policy fails with the memory" in caplog.text
        assert one._alive()
    finally:
        await one.drain(0.0)
