"""The load generator: open loop is open, closed loop is closed, conversations remember, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve import lengths
from twostep.lab.bench.serve.arrivals import Arrivals
from twostep.lab.bench.serve.content import PromptContent
from twostep.lab.bench.serve.load import ServeLoad, TraceTimes, Users
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.serve.runner import Extent, LoadRunner, RunProgress
from twostep.lab.bench.serve.sweep import Doom
from twostep.lab.bench.serve.target import Clock, Exchange, ReceivedAnswer, RequestFailed, TargetModel
from twostep.lab.bench.serve.traces import RequestTrace, TraceRequest
from twostep.lab.bench.serve.workloads import (
    BenchSession,
    MultiTurn,
    Quoting,
    RandomPrompts,
    ReplayedSessions,
    SessionTurn,
    Text,
    num_quoted,
)

SERVED = TargetModel(model="fake", max_model_len=4096, alphabet=range(1000))


class FakeTarget:
    """Answers as the test says; keeps what was asked, and how many were under way at once."""

    def __init__(self, *, gate: asyncio.Event | None = None, fails: Sequence[int] = (), wait_s: float = 0.0) -> None:
        self.gate, self.fails, self.wait_s = gate, fails, wait_s
        self.prompts: list[list[int]] = []
        self.runs: set[str] = set()
        self.under_way = self.most_under_way = 0

    async def open(self) -> TargetModel:
        return SERVED

    async def close(self) -> None: ...

    async def tokenize(self, text: str) -> array[int]:
        return array("I", text.encode())

    def prepare(self, history: Sequence[Exchange], turn: SessionTurn, run: str) -> Any:
        self.runs.add(run)
        ids = [i for e in history for i in (*e.turn.prompt, *e.answer.token_ids)]  # type: ignore[misc]
        return [*ids, *turn.prompt], turn.output_tokens  # type: ignore[misc]

    def num_prompt_tokens(self, history: Sequence[Exchange], turn: SessionTurn) -> int:
        return sum(e.turn.num_tokens + len(e.answer.token_ids) for e in history) + turn.num_tokens

    async def ask(self, prepared: Any, record: RequestRecord, clock: Clock, *, keep: bool) -> ReceivedAnswer | None:
        prompt, count = prepared
        number = len(self.prompts)
        self.prompts.append(prompt)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        record.sent_s = clock()
        try:
            await asyncio.sleep(self.wait_s)
            if self.gate is not None:
                await self.gate.wait()
            if number in self.fails:
                raise RequestFailed("unavailable", "gone", 2.0)
            for _ in range(count):
                record.times_s.append(clock())
                record.num_tokens.append(1)
        finally:
            self.under_way -= 1
            record.ended_s = clock()
        return ReceivedAnswer(token_ids=array("I", [number + 5000] * count), text="") if keep else None


def one_turn_sessions(count: int) -> Iterator[BenchSession]:
    workload = RandomPrompts(prompt=lengths.Fixed(12), output=lengths.Fixed(3))
    return islice(workload.sessions(PromptContent("a", range(1000)), random.Random(0)), count)


async def test_open_loop_sends_everything_though_nothing_is_answered() -> None:
    gate = asyncio.Event()
    target = FakeTarget(gate=gate)
    progress = RunProgress()
    runner = LoadRunner(target=target, extent=Extent(num_requests=50), run="r", progress=progress)
    task = asyncio.create_task(runner.open_loop(zip((i * 0.001 for i in range(50)), one_turn_sessions(50), strict=True)))
    while progress.num_sent < 50 or not progress.none_to_come:
        assert not task.done()
        await asyncio.sleep(0)
    # All are on their way, and not one has been answered.
    assert (progress.in_flight, progress.num_ended, target.most_under_way) == (50, 0, 50)
    gate.set()
    result = await task
    assert len(result.records) == 50
    assert all(r.completed and r.output_tokens == 3 for r in result.records)
    assert all(r.slip_s >= -1e-6 for r in result.records), "none left before its time"
    assert result.wall_s > 0
    assert result.cpu_s > 0


async def test_closed_loop_has_so_many_under_way_and_no_more() -> None:
    target = FakeTarget(wait_s=0.001)
    result = await LoadRunner(target=target, extent=Extent(num_requests=40), run="r").closed_loop(one_turn_sessions(100), 4)
    assert target.most_under_way == 4
    assert 40 <= len(result.records) <= 43, "those under way when the last was counted run to their end"
    assert [r.index for r in result.records] == list(range(len(result.records)))


async def test_closed_loop_ends_with_its_workload() -> None:
    result = await LoadRunner(target=FakeTarget(), extent=Extent(num_requests=40), run="r").closed_loop(one_turn_sessions(7), 3)
    assert len(result.records) == 7


async def test_a_conversation_says_everything_again_and_waits_for_the_answer() -> None:
    workload = MultiTurn(turns=lengths.Fixed(4), message=lengths.Fixed(5), output=lengths.Fixed(2), system_tokens=3)
    target = FakeTarget()
    load = ServeLoad(workload=workload, arrivals=Users(1), extent=Extent(num_requests=1), seed="0")
    result, _ = await load.put_on(target, SERVED, "r", RunProgress())
    assert [(r.session, r.turn, r.prompt_tokens) for r in result.records] == [(0, 0, 8), (0, 1, 15), (0, 2, 22), (0, 3, 29)]
    for i, (before, after) in enumerate(zip(target.prompts, target.prompts[1:], strict=False)):
        assert after[: len(before)] == before
        assert after[len(before) : len(before) + 2] == [5000 + i] * 2, "the answer is part of what was said"
    assert all(a.ended_s <= b.sent_s for a, b in zip(result.records, result.records[1:], strict=False))


async def test_a_failure_is_recorded_and_ends_its_conversation_alone() -> None:
    workload = MultiTurn(turns=lengths.Fixed(3), message=lengths.Fixed(5), output=lengths.Fixed(2))
    load = ServeLoad(workload=workload, arrivals=Arrivals(kind="constant", rate=200), extent=Extent(num_requests=3), seed="0")
    result, _ = await load.put_on(FakeTarget(fails=[1]), SERVED, "r", RunProgress())
    failed = [r for r in result.records if r.error]
    assert [(r.error, r.message, r.retry_after_s, r.completed) for r in failed] == [("unavailable", "gone", 2.0, False)]
    by_session = [sum(r.session == i for r in result.records) for i in range(3)]
    assert sorted(by_session)[1:] == [3, 3]
    assert min(by_session) < 3


async def test_more_than_the_bound_in_flight_is_an_error_of_the_generator() -> None:
    gate = asyncio.Event()
    progress = RunProgress()
    runner = LoadRunner(target=FakeTarget(gate=gate), extent=Extent(num_requests=10, max_in_flight=4), run="r", progress=progress)
    task = asyncio.create_task(runner.open_loop((0.0, s) for s in one_turn_sessions(10)))
    while progress.num_failed < 6:
        assert not task.done()
        await asyncio.sleep(0)
    gate.set()
    result = await task
    assert sum(r.error == "not sent" for r in result.records) == 6
    assert sum(r.completed for r in result.records) == 4


async def test_a_run_that_can_no_longer_pass_is_stopped() -> None:
    # Of 100, 5 may miss; every second one does, and the twelfth is not even sent then, though the last would come after 1000 s.
    doom = Doom(LatencyTargets(ttft_ms=60_000), 0.95, 100)
    target = FakeTarget(fails=range(0, 100, 2))
    runner = LoadRunner(target=target, extent=Extent(num_requests=100), run="r", stop=doom)
    times = [i * 0.001 for i in range(30)] + [1000.0] * 70
    result = await runner.open_loop(zip(times, one_turn_sessions(100), strict=True))
    assert result.stopped
    assert doom.missed >= 6
    assert 11 <= len(result.records) <= 30
    # One that can pass is not.
    runner = LoadRunner(
        target=FakeTarget(fails=[3]), extent=Extent(num_requests=20), run="r", stop=Doom(LatencyTargets(ttft_ms=60_000), 0.95, 20)
    )
    assert not (await runner.open_loop((0.0, s) for s in one_turn_sessions(20))).stopped


async def test_what_is_under_way_when_a_run_is_stopped_was_not_answered() -> None:
    target = FakeTarget(fails=[0, 1], wait_s=0.01)
    runner = LoadRunner(target=target, extent=Extent(num_requests=10), run="r", stop=Doom(LatencyTargets(ttft_ms=60_000), 0.9, 10))
    slow = zip([0.0, 0.0, *[0.005] * 8], one_turn_sessions(10), strict=True)
    result = await runner.open_loop(slow)
    assert result.stopped
    assert {r.error for r in result.records} <= {"unavailable", "stopped", ""}
    assert sum(r.error == "unavailable" for r in result.records) == 2
    assert all(not r.completed or r.output_tokens for r in result.records)


@pytest.mark.parametrize(("missed", "doomed"), [(0, False), (5, False), (6, True)])
def test_doom_is_exact(missed: int, doomed: bool) -> None:
    doom = Doom(LatencyTargets(ttft_ms=1000), 0.95, 100)
    bad = RequestRecord(index=0, scheduled_s=0, sent_s=0, ended_s=1, prompt_tokens=1, max_tokens=1, error="unavailable")
    warm = RequestRecord(index=0, scheduled_s=0, sent_s=0, ended_s=1, prompt_tokens=1, max_tokens=1, error="unavailable", measured=False)
    assert [doom(warm) for _ in range(50)] == [False] * 50
    said = [doom(bad) for _ in range(missed)]
    assert (said[-1] if said else False) is doomed


def test_how_many_will_be_measured_is_known_before() -> None:
    load = ServeLoad(
        workload=RandomPrompts(prompt=lengths.Fixed(5), output=lengths.Fixed(1)),
        arrivals=Arrivals(kind="poisson", rate=7),
        extent=Extent(duration_s=30.0, warmup_s=5.0, cooldown_s=5.0),
        seed="0",
    )
    assert load.num_measured() == sum(5 <= t < 35 for t in Arrivals(kind="poisson", rate=7).within("0", 40.0))
    assert replace(load, extent=Extent(num_requests=9)).num_measured() == 9
    assert replace(load, arrivals=Users(3)).num_measured() is None


async def test_texts_that_never_fit_are_said() -> None:
    long = ReplayedSessions(
        items=[BenchSession(turns=(SessionTurn(prompt=Text("x", array("I", range(500))), output_tokens=5),))], repeat=True
    )
    load = ServeLoad(workload=long, arrivals=Users(1), extent=Extent(num_requests=9), seed="0", max_model_len=100)
    with pytest.raises(InvalidRequest):
        next(load.sessions(SERVED, "0"))
    for arrivals in (Users(2), Arrivals(kind="constant", rate=9)):
        with pytest.raises(InvalidRequest):
            await replace(load, arrivals=arrivals).put_on(FakeTarget(), SERVED, "0", RunProgress())


@pytest.mark.system  # real time
async def test_warm_up_is_not_measured_and_the_run_ends_on_time() -> None:
    load = ServeLoad(
        workload=RandomPrompts(prompt=lengths.Fixed(5), output=lengths.Fixed(1)),
        arrivals=Arrivals(kind="constant", rate=100),
        extent=Extent(duration_s=0.2, warmup_s=0.1, cooldown_s=0.05),
        seed="0",
    )
    result, windows = await load.put_on(FakeTarget(), SERVED, "r", RunProgress())
    for r in result.records:
        assert r.measured == (0.1 <= r.scheduled_s < 0.3)
    assert 33 <= len(result.records) <= 35
    assert sum(r.measured for r in result.records) == pytest.approx(20, abs=1)
    assert windows.arrivals.length_s == pytest.approx(0.2)


@pytest.mark.system  # real time
async def test_a_trace_comes_at_its_own_times_faster_if_asked() -> None:
    requests = tuple(TraceRequest(arrival_s=i * 1.0, input_tokens=5, output_tokens=1) for i in range(5))
    load = ServeLoad(workload=RequestTrace(requests=requests), arrivals=TraceTimes(100.0), extent=Extent(num_requests=100), seed="0")
    assert load.rate == 100.0
    result, _ = await load.put_on(FakeTarget(), SERVED, "r", RunProgress())
    assert [r.scheduled_s for r in result.records] == pytest.approx([0.0, 0.01, 0.02, 0.03, 0.04])
    assert load.at_rate(50.0).arrivals == TraceTimes(50.0)


def test_loads_at_other_rates() -> None:
    load = ServeLoad(
        workload=RandomPrompts(prompt=lengths.Fixed(5), output=lengths.Fixed(1)),
        arrivals=Arrivals(kind="gamma", rate=4, burstiness=0.5),
        extent=Extent(num_requests=3),
        seed="0",
    )
    assert load.at_rate(8).arrivals == Arrivals(kind="gamma", rate=8, burstiness=0.5)
    assert load.label == "4 requests/s (gamma, burstiness 0.5)"
    closed = ServeLoad(workload=load.workload, arrivals=Users(3), extent=load.extent, seed="0")
    with pytest.raises(InvalidRequest):
        closed.at_rate(4)
    # Other runs say other things of the same lengths.
    first, second = (list(islice(load.sessions(SERVED, run), 5)) for run in ("0", "1"))
    assert first != second
    assert list(islice(load.sessions(SERVED, "0"), 5)) == first


@pytest.mark.parametrize("bad", [{}, {"duration_s": 1.0, "num_requests": 1}, {"duration_s": -1.0}, {"num_requests": 1, "max_in_flight": 0}])
def test_an_extent_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Extent(**bad)


def test_quoted_tokens_are_counted_up_to_the_first_other_one() -> None:
    session = next(Quoting(prompt=lengths.Fixed(9), output=lengths.Fixed(4)).sessions(PromptContent("a", range(1000)), random.Random(0)))
    turn = session.turns[0]
    prompt = list(turn.prompt)  # type: ignore[arg-type]
    assert turn.passage_tokens == 6
    # Nine tokens of a passage of six: it goes on with the fourth, the fifth, the sixth, the first.
    expected = [prompt[3], prompt[4], prompt[5], prompt[0]]
    assert num_quoted(turn, expected) == 4
    assert num_quoted(turn, [*expected[:2], 7777, expected[3]]) == 2
    assert num_quoted(turn, []) == 0
