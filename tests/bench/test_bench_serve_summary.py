"""A run's records to its figures: windows, throughput, bins, tables and JSON."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.lab.bench.serve.metrics import Distribution, LatencyTargets
from twostep.lab.bench.serve.record import REFUSED, RequestRecord
from twostep.lab.bench.serve.report import Point, as_json, sweep_table, table, warnings_of
from twostep.lab.bench.serve.runner import RunResult
from twostep.lab.bench.serve.summary import Window, Windows, summarize, throughput


def answered(at: float, *, ttft: float = 0.25, gap: float = 0.125, tokens: int = 5, prompt: int = 100, index: int = 0) -> RequestRecord:
    """Sent on time; `tokens` tokens one by one; the end comes with the last."""
    times = [at + ttft + i * gap for i in range(tokens)]
    return RequestRecord(
        index=index,
        scheduled_s=at,
        sent_s=at,
        ended_s=times[-1],
        prompt_tokens=prompt,
        max_tokens=tokens,
        times_s=array("d", times),
        num_tokens=array("I", [1] * tokens),
        phases={"queue_s": 0.125, "prefill_s": 0.0625 * (index % 3)},
    )


def failed(at: float, kind: str) -> RequestRecord:
    return RequestRecord(
        index=0, scheduled_s=at, sent_s=at, ended_s=at + 0.01, prompt_tokens=7, max_tokens=5, error=kind, message=f"{kind} at {at}"
    )


def result_of(records: list[RequestRecord]) -> RunResult:
    return RunResult(
        records=records, wall_s=60.0, cpu_s=6.0, stopped=False, interrupted=False, exhausted=False, loop_lag_s=Distribution.of([0.001])
    )


def test_a_minute_of_a_hundred_requests_thirty_of_which_are_good() -> None:
    # One every 0.6 s; every tenth has its three good ones.
    records = [answered(i * 0.6, ttft=0.25 if i % 10 < 3 else 0.75) for i in range(100)]
    for windows in (Windows.of_duration(0.0, 60.0), Windows.of_requests(records, open_loop=True)):
        summary = summarize(records, windows, targets=LatencyTargets(ttft_ms=500))
        assert summary.goodput is not None
        assert summary.goodput.per_minute == pytest.approx(30)
        assert summary.goodput.attainment == 0.3
        assert summary.offered_rate == pytest.approx(100 / 60)


def test_warm_up_counts_for_throughput_alone() -> None:
    # Windows from 10 to 20 s; one request a second all the time, each of 5 tokens within its second.
    records = [answered(float(i)) for i in range(25)]
    for r in records:
        r.measured = 10 <= r.scheduled_s < 20
    summary = summarize(records, Windows.of_duration(10.0, 10.0), targets=LatencyTargets(ttft_ms=1000))
    assert summary.num_requests == 10
    assert summary.throughput.requests_per_s == 1.0
    assert summary.throughput.requests_per_minute == 60.0
    assert summary.throughput.output_tokens_per_s == 5.0
    assert summary.throughput.input_tokens_per_s == 100.0
    assert summary.throughput.mean_concurrency == pytest.approx(0.75)
    assert summary.goodput is not None
    assert summary.goodput.per_s == 1.0
    assert summary.e2e_s.p50 == 0.75
    assert summary.user_tokens_per_s.p50 == 8.0
    assert summary.phases_s["queue_s"].p50 == 0.125


def test_an_answer_that_crosses_the_windows_end_counts_by_its_tokens() -> None:
    # Tokens at 0.5, 1.0, 1.5, 2.0, 2.5; the window ends at 2.
    work = throughput([answered(0.25, ttft=0.25, gap=0.5)], Window(0.0, 2.0))
    assert work.output_tokens_per_s == 1.5
    assert work.requests_per_s == 0.0
    assert work.mean_concurrency == pytest.approx(1.75 / 2)


def test_where_tokens_come_together_a_tokens_time_is_no_gap() -> None:
    """Nine tokens in three messages: one at 1 s, four at 1.5 and four at 2."""
    drafted = answered(0.0, ttft=1.0, gap=0.5, tokens=3)
    drafted.num_tokens = array("I", [1, 4, 4])
    summary = summarize([drafted], Windows.of_requests([drafted], open_loop=False))
    assert (summary.tpot_s.p50, summary.itl_s.p50, summary.longest_gap_s.p50) == (0.125, 0.5, 0.5)
    assert summary.user_tokens_per_s.p50 == 8.0
    assert summary.throughput.output_tokens_per_s == pytest.approx(4.5)
    assert (summary.output_tokens.p50, summary.tokens_per_message.mean, summary.tokens_per_message.max) == (9, 3.0, 4)
    told = point_of([drafted], Windows.of_requests([drafted], open_loop=False), LatencyTargets(gap_ms=600), 1.0)
    assert "3.00 tokens each (most 4)" in table(told, LatencyTargets())


def test_errors_and_refusals_are_counted_by_kind_and_against_goodput() -> None:
    records = [answered(0.0), failed(1.0, REFUSED), failed(2.0, REFUSED), failed(3.0, "unavailable")]
    summary = summarize(records, Windows.of_duration(0.0, 4.0), targets=LatencyTargets(ttft_ms=500))
    assert summary.errors == {REFUSED: 2, "unavailable": 1}
    assert (summary.num_requests, summary.num_completed, summary.num_refused) == (4, 1, 2)
    assert summary.error_messages[REFUSED] == "refused at 1.0", "the first is told"
    assert summary.goodput is not None
    assert summary.goodput.attainment == 0.25
    assert summary.goodput.missed == {"answer": 3}


def test_users_in_a_closed_loop_have_one_window_from_first_to_last() -> None:
    windows = Windows.of_requests([answered(1.0), answered(3.0)], open_loop=False)
    assert windows.arrivals == windows.busy
    assert windows.busy.start_s == 1.0
    assert windows.busy.length_s == pytest.approx(2.75)
    # All at once: no rate of arrivals to speak of.
    assert Windows.of_requests([answered(0.0), answered(0.0)], open_loop=True).arrivals.length_s == pytest.approx(0.75)
    assert Windows.of_requests([], open_loop=True).busy.length_s == 0.0


def test_turns_of_conversations_are_not_all_counted_in_the_time_in_which_the_first_ones_came() -> None:
    """Two conversations come within two seconds and have ten turns each, one every ten seconds: that is no ten requests a second."""
    records = [answered(start + 10.0 * turn) for turn in range(10) for start in (0.0, 1.0)]
    for i, record in enumerate(records):
        record.turn = i // 2
    windows = Windows.of_requests(records, open_loop=True)
    summary = summarize(records, windows, targets=LatencyTargets(ttft_ms=1000))
    assert windows.arrivals == windows.busy
    assert summary.offered_rate == pytest.approx(20 / 91.75)
    assert summary.goodput is not None
    assert summary.goodput.per_s == pytest.approx(20 / 91.75)


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0.001, 5), st.integers(1, 8)), min_size=1, max_size=25),
    st.floats(0, 20),
    st.floats(1, 40),
)
def test_throughput_counts_what_lies_in_the_window(items: list[tuple[float, float, int]], start: float, length: float) -> None:
    records = [answered(at, ttft=ttft, tokens=tokens) for at, ttft, tokens in items]
    window = Window(start, start + length)
    work = throughput(records, window)
    inside = sum(t in window for r in records for t in r.times_s)
    assert work.output_tokens_per_s * length == pytest.approx(inside, abs=1e-6)
    assert work.requests_per_s * length == pytest.approx(sum(r.ended_s in window for r in records), abs=1e-6)
    assert 0 <= work.mean_concurrency <= len(records)


def point_of(records: list[RequestRecord], windows: Windows, targets: LatencyTargets, rate: float) -> Point:
    summary = summarize(records, windows, targets=targets, num_gpus=2)
    warnings = warnings_of(result_of(records), summary, max_slip_s=0.01, measured_s=60.0)
    return Point(label="some load", rate=rate, result=result_of(records), summary=summary, warnings=warnings)


def test_tables_and_json_say_the_same() -> None:
    records = [answered(i * 0.5, ttft=0.125, gap=0.0625, index=i) for i in range(120)] + [failed(1.0, REFUSED)]
    kept, missed = LatencyTargets(ttft_ms=500, gap_ms=200), LatencyTargets(ttft_ms=1)
    points = [point_of(records, Windows.of_duration(0.0, 60.0), targets, rate) for targets, rate in ((kept, 2.0), (missed, 4.0))]
    text = table(points[0], kept)
    for said in ("120 of 121 (99.2%)", f"{kept}", "answer 1", "refused at 1.0", "10% of a core"):
        assert said in text
    assert "warning" not in text
    lines = sweep_table(points, points[0], 0.95).splitlines()
    assert lines[1].split()[:3] == ["2", "*", "99.2%"]
    document = json.loads(json.dumps(as_json(points, points[0], {"rate": math.inf}), allow_nan=False))
    assert document["settings"]["rate"] is None, "strict JSON has no infinity"
    first, second = (point["goodput"] for point in document["points"])
    assert (first["per_minute"], first["per_s_per_gpu"], second["attainment"]) == (120, 1.0, 0)
    assert document["knee"]["point"] == 0
    assert document["points"][0]["ttft_s"]["p99"] == 0.125


RECORDS = st.one_of(
    st.builds(answered, st.floats(0, 50), tokens=st.integers(1, 3), prompt=st.integers(0, 9)),
    st.builds(failed, st.floats(0, 50), st.sampled_from([REFUSED, "timeout"])),
)


@given(st.lists(RECORDS, max_size=4), st.booleans(), st.booleans())
def test_no_table_says_nan(records: list[RequestRecord], by_time: bool, open_loop: bool) -> None:
    windows = Windows.of_duration(0.0, 60.0) if by_time else Windows.of_requests(records, open_loop=open_loop)
    targets = LatencyTargets(ttft_ms=500)
    point = point_of(records, windows, targets, 1.0)
    assert "nan" not in table(point, targets)
    assert "nan" not in sweep_table([point], point, 0.95)
    assert "met all targets" not in sweep_table([replace(point, summary=replace(point.summary, goodput=None))], None, 0.95)


def test_a_generator_that_lags_says_so() -> None:
    late = [answered(1.0), answered(2.0)]
    for r in late:
        r.sent_s += 0.05
    summary = summarize(late, Windows.of_duration(0.0, 30.0), targets=LatencyTargets(ttft_ms=1))
    slow = RunResult(
        records=late, wall_s=30.0, cpu_s=29.0, stopped=False, interrupted=False, exhausted=False, loop_lag_s=Distribution.of([0.2])
    )
    said = warnings_of(slow, summary, max_slip_s=0.01, measured_s=30.0)
    assert len(said) == 3
    assert "50.0 ms late" in said[0]
    assert "200.0 ms late" in said[1]
    assert "97% of a core" in said[1]
    assert "at least 60 s" in said[2]
