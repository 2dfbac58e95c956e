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
from twostep.lab.bench.serve import lengths, runner
from twostep.lab.bench.serve.arrivals import Arrivals
from twostep.lab.bench.serve.load import ServeLoad, TraceTimes, Users
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.serve.runner import Extent, LoadRunner, RunProgress
from twostep.lab.bench.serve.sweep import Doom
from twostep.lab.bench.serve.target import Clock, RequestFailed, TargetModel
from twostep.lab.bench.serve.workloads import BenchSession, MultiTurn, PromptContent, RandomPrompts, RequestTrace, TraceRequest

SERVED = TargetModel(model="fake", max_model_len=4096, alphabet=range(1000))
WORKLOAD = RandomPrompts(prompt=lengths.Fixed(12), output=lengths.Fixed(3))


class FakeTarget:
    """Answers as the test says; keeps what was asked, and how many were under way at once."""

    def __init__(self, *, gate: asyncio.Event | None = None, fails: Sequence[int] = ()) -> None:
        self.gate, self.fails = gate, fails
        self.prompts: list[list[int]] = []
        self.under_way = self.most_under_way = 0

    def prepare(self, prompt: array[int], output_tokens: int, run: str) -> Any:
        return list(prompt), output_tokens

    async def ask(self, prepared: Any, record: RequestRecord, clock: Clock, *, keep: bool) -> array[int]:
        prompt, count = prepared
        number = len(self.prompts)
        self.prompts.append(prompt)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        record.sent_s = clock()
        try:
            await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
            if number in self.fails:
                raise RequestFailed("unavailable", "gone", 2.0)
            for _ in range(count):
                record.times_s.append(clock())
                record.num_tokens.append(1)
        finally:
            self.under_way -= 1
            record.ended_s = clock()
        return array("I", [number + 5000] * count) if keep else array("I")


def running(target: FakeTarget, num_requests: int, **more: Any) -> LoadRunner:
    return LoadRunner(target=target, extent=Extent(num_requests=num_requests), run="r", **more)  # type: ignore[arg-type]


def load_of(workload: Any = WORKLOAD, arrivals: Any = None, **extent: float) -> ServeLoad:
    return ServeLoad(workload=workload, arrivals=arrivals or Arrivals(rate=1000), extent=Extent(**extent), seed="0")  # type: ignore[arg-type]


def sessions(count: int) -> Iterator[BenchSession]:
    return islice(WORKLOAD.sessions(PromptContent("a", range(1000)), random.Random(0)), count)


async def test_open_loop_sends_everything_though_nothing_is_answered() -> None:
    target, progress = FakeTarget(gate=asyncio.Event()), RunProgress()
    load = running(target, 50, progress=progress)
    task = asyncio.create_task(load.open_loop(zip((i * 0.001 for i in range(50)), sessions(50), strict=True)))
    while progress.num_sent < 50 or not progress.none_to_come:
        assert not task.done()
        await asyncio.sleep(0)
    # All are on their way, and not one has been answered.
    assert (progress.in_flight, progress.num_ended, target.most_under_way) == (50, 0, 50)
    target.gate.set()
    result = await task
    assert len(result.records) == 50
    assert all(r.completed and r.output_tokens == 3 for r in result.records)
    assert all(r.slip_s >= -1e-6 for r in result.records), "none left before its time"
    assert result.cpu_share > 0


async def test_closed_loop_has_so_many_under_way_and_no_more() -> None:
    target = FakeTarget()
    result = await running(target, 40).closed_loop(sessions(100), 4)
    assert target.most_under_way == 4
    assert 40 <= len(result.records) <= 43, "those under way when the last was counted run to their end"
    assert [r.index for r in result.records] == list(range(len(result.records)))
    ended = await running(FakeTarget(), 40).closed_loop(sessions(7), 3)
    assert (len(ended.records), ended.exhausted) == (7, True)


async def test_a_conversation_says_everything_again_and_waits_for_the_answer() -> None:
    workload = MultiTurn(turns=lengths.Fixed(4), message=lengths.Fixed(5), output=lengths.Fixed(2), system_tokens=3)
    target = FakeTarget()
    result, windows = await load_of(workload, Users(1), num_requests=1).put_on(target, SERVED, "r", RunProgress())  # type: ignore[arg-type]
    assert result.records[-1].ended_s in windows.busy
    assert [(r.session, r.turn, r.prompt_tokens) for r in result.records] == [(0, 0, 8), (0, 1, 15), (0, 2, 22), (0, 3, 29)]
    for i, (before, after) in enumerate(zip(target.prompts, target.prompts[1:], strict=False)):
        assert after[: len(before)] == before
        assert after[len(before) : len(before) + 2] == [5000 + i] * 2, "the answer is part of what was said"
    assert all(a.ended_s <= b.sent_s for a, b in zip(result.records, result.records[1:], strict=False))


async def test_a_failure_is_recorded_and_ends_its_conversation_alone() -> None:
    workload = MultiTurn(turns=lengths.Fixed(3), message=lengths.Fixed(5), output=lengths.Fixed(2))
    result, _ = await load_of(workload, num_requests=3).put_on(FakeTarget(fails=[1]), SERVED, "r", RunProgress())  # type: ignore[arg-type]
    failed = [r for r in result.records if r.error]
    assert [(r.error, r.message, r.retry_after_s, r.completed) for r in failed] == [("unavailable", "gone", 2.0, False)]
    by_session = sorted(sum(r.session == i for r in result.records) for i in range(3))
    assert by_session[0] < 3
    assert by_session[1:] == [3, 3]


async def test_more_than_the_bound_in_flight_is_an_error_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_IN_FLIGHT", 4)
    gate, progress = asyncio.Event(), RunProgress()
    task = asyncio.create_task(running(FakeTarget(gate=gate), 10, progress=progress).open_loop((0.0, s) for s in sessions(10)))
    while progress.num_failed < 6:
        assert not task.done()
        await asyncio.sleep(0)
    gate.set()
    result = await task
    assert [sum(r.error == "not sent" for r in result.records), sum(r.completed for r in result.records)] == [6, 4]


async def test_a_run_that_can_no_longer_pass_is_stopped() -> None:
    # 5 of 100 may miss; every second one does, and the twelfth is not even sent then, though the last would come after 1000 s.
    doom = Doom(LatencyTargets(ttft_ms=60_000), 0.95, 100)
    times = [i * 0.001 for i in range(30)] + [1000.0] * 70
    result = await running(FakeTarget(fails=range(0, 100, 2)), 100, stop=doom).open_loop(zip(times, sessions(100), strict=True))
    assert result.stopped
    assert doom.missed >= 6
    assert 11 <= len(result.records) <= 30
    # One that can pass is not.
    doom = Doom(LatencyTargets(ttft_ms=60_000), 0.95, 20)
    assert not (await running(FakeTarget(fails=[3]), 20, stop=doom).open_loop((0.0, s) for s in sessions(20))).stopped


async def test_an_interrupted_run_tells_what_was_answered_until_then() -> None:
    class AnswersThree(FakeTarget):
        async def ask(self, prepared: Any, record: RequestRecord, clock: Clock, *, keep: bool) -> array[int]:
            self.gate = None if len(self.prompts) < 3 else asyncio.Event()
            return await super().ask(prepared, record, clock, keep=keep)

    progress = RunProgress()
    run = asyncio.create_task(running(AnswersThree(), 100, progress=progress).closed_loop(sessions(100), 4))
    while progress.num_sent < 7:
        assert not run.done()
        await asyncio.sleep(0)
    run.cancel()
    result = await run
    assert (result.interrupted, result.stopped) == (True, True)
    assert [r.error for r in result.records] == [""] * 3 + ["stopped"] * 4


async def test_what_is_under_way_when_a_run_is_stopped_was_not_answered() -> None:
    class FirstFails(FakeTarget):
        async def ask(self, *args: Any, **more: Any) -> array[int]:
            self.gate = None if not self.prompts else asyncio.Event()
            return await super().ask(*args, **more)

    result = await running(FirstFails(fails=[0]), 10, stop=lambda record: bool(record.error)).open_loop((0.0, s) for s in sessions(10))
    assert result.stopped
    assert [r.error for r in result.records if not r.completed] == ["unavailable"] + ["stopped"] * (len(result.records) - 1)


@pytest.mark.parametrize(("missed", "doomed"), [(0, False), (5, False), (6, True)])
def test_doom_is_exact(missed: int, doomed: bool) -> None:
    doom = Doom(LatencyTargets(ttft_ms=1000), 0.95, 100)
    bad = RequestRecord(index=0, scheduled_s=0, sent_s=0, ended_s=1, prompt_tokens=1, max_tokens=1, error="unavailable")
    assert not any(doom(replace(bad, measured=False)) for _ in range(50))
    said = [doom(bad) for _ in range(missed)]
    assert (said[-1] if said else False) is doomed


def test_how_many_will_be_measured_is_known_before() -> None:
    load = load_of(arrivals=Arrivals(rate=7), duration_s=30.0, warmup_s=5.0)
    assert load.num_measured() == sum(5 <= t < 35 for t in Arrivals(rate=7).within("0", 40.0))
    assert replace(load, extent=Extent(num_requests=9)).num_measured() == 9
    assert replace(load, arrivals=Users(3)).num_measured() is None


@pytest.mark.system  # real time
async def test_warm_up_is_not_measured_and_the_run_ends_on_time() -> None:
    load = load_of(arrivals=Arrivals(rate=100), duration_s=0.2, warmup_s=0.1)
    result, windows = await load.put_on(FakeTarget(), SERVED, "r", RunProgress())  # type: ignore[arg-type]
    for r in result.records:
        assert r.measured == (0.1 <= r.scheduled_s < 0.3)
    assert len(result.records) == 40
    assert windows.arrivals.length_s == pytest.approx(0.2)


async def test_a_trace_comes_at_its_own_times_faster_if_asked() -> None:
    requests = tuple(TraceRequest(arrival_s=i * 1.0, input_tokens=5, output_tokens=1) for i in range(5))
    load = load_of(RequestTrace(requests=requests), TraceTimes(1000.0), num_requests=100)
    result, _ = await load.put_on(FakeTarget(), SERVED, "r", RunProgress())  # type: ignore[arg-type]
    assert [r.scheduled_s for r in result.records] == pytest.approx([0.0, 0.001, 0.002, 0.003, 0.004])


def test_loads_at_other_rates() -> None:
    load = load_of(arrivals=Arrivals(rate=4), num_requests=3)
    assert load.at_rate(8).arrivals == Arrivals(rate=8)
    for arrivals in (Users(3), TraceTimes()):
        with pytest.raises(InvalidRequest):
            replace(load, arrivals=arrivals).at_rate(4)
    # Other runs say other things of the same lengths.
    first, second = (list(islice(load.sessions(SERVED, run), 5)) for run in ("0", "1"))
    assert first != second
    assert list(islice(load.sessions(SERVED, "0"), 5)) == first


def test_nothing_is_sent_after_the_end() -> None:
    timed, counted = Extent(duration_s=2.0, warmup_s=1.0), Extent(num_requests=3, warmup_s=1.0)
    assert [timed.over(at, 99) for at in (3.9, 4.0)] == [False, True], "load goes on after the window, as long as the warm-up"
    assert [counted.over(1e9, n) for n in (2, 3)] == [False, True]
    assert [timed.measures(at) for at in (0.9, 1.0, 2.9, 3.0)] == [False, True, True, False]


@pytest.mark.parametrize("bad", [{}, {"duration_s": 1.0, "num_requests": 1}, {"duration_s": -1.0}])
def test_an_extent_that_cannot_be_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Extent(**bad)
