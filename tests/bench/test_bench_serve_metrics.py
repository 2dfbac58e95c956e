"""Recorded times to figures: each definition of docs/benchmarking.md, exactly."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.metrics import Distribution, Latency, LatencyTargets, gaps_s, goodput, latency_of, percentile
from twostep.lab.bench.serve.record import REFUSED, RequestRecord

MILLISECONDS = st.floats(0.01, 5000)


def record(times: list[float], *, sent: float = 0.0, ended: float | None = None, tokens: list[int] | None = None) -> RequestRecord:
    return RequestRecord(
        index=0,
        scheduled_s=sent,
        sent_s=sent,
        prompt_tokens=10,
        max_tokens=8,
        times_s=array("d", times),
        num_tokens=array("I", tokens or [1] * len(times)),
        ended_s=times[-1] if ended is None else ended,
    )


def test_one_answer_by_hand() -> None:
    # Sent at 10 s; tokens at 10.5, 10.625, 11.125, 11.25; the end at 11.375. All of these are exact in binary.
    latency = latency_of(record([10.5, 10.625, 11.125, 11.25], sent=10.0, ended=11.375))
    assert latency == Latency(ttft_s=0.5, tpot_s=0.25, longest_gap_s=0.5, e2e_s=1.375)
    assert gaps_s([10.5, 10.625, 11.125, 11.25]) == [0.125, 0.5, 0.125]


def test_tokens_that_come_together_are_one_message_and_several_tokens() -> None:
    # Seven tokens in three messages: 1 s from first to last over six tokens, gaps of 0.25 and 0.75.
    latency = latency_of(record([1.0, 1.25, 2.0], tokens=[1, 4, 2]))
    assert latency is not None
    assert latency.tpot_s == pytest.approx(1 / 6)
    assert latency.longest_gap_s == 0.75


def test_one_token_has_no_tpot_and_no_gap_and_misses_neither() -> None:
    latency = latency_of(record([0.25]))
    assert latency == Latency(ttft_s=0.25, tpot_s=None, longest_gap_s=None, e2e_s=0.25)
    assert LatencyTargets(ttft_ms=250, tpot_ms=0.001, gap_ms=0.001).missed(latency) == ()


def test_what_failed_has_no_latency_and_misses_everything() -> None:
    failed = record([0.25, 0.5])
    failed.error = REFUSED
    assert latency_of(failed) is None
    assert LatencyTargets(ttft_ms=1e9).missed(None) == ("answer",)
    # Answered, but with nothing.
    assert latency_of(RequestRecord(index=0, scheduled_s=0, sent_s=0, ended_s=1, prompt_tokens=1, max_tokens=1)) is None


def test_a_hundred_requests_a_minute_of_which_thirty_meet_the_targets_are_a_goodput_of_thirty_a_minute() -> None:
    targets = LatencyTargets(ttft_ms=500, tpot_ms=10, gap_ms=25)
    good = Latency(ttft_s=0.5, tpot_s=0.01, longest_gap_s=0.025, e2e_s=1.0)
    slow = [
        Latency(ttft_s=0.501, tpot_s=0.01, longest_gap_s=0.02, e2e_s=1.0),
        Latency(ttft_s=0.5, tpot_s=0.011, longest_gap_s=0.02, e2e_s=1.0),
        Latency(ttft_s=0.5, tpot_s=0.01, longest_gap_s=0.026, e2e_s=1.0),
        None,
    ]
    found = goodput([good] * 30 + slow * 17 + slow[:2], targets, window_s=60.0, num_gpus=4)
    assert found.num_requests == 100
    assert found.per_minute == 30
    assert found.per_s == 0.5
    assert found.per_s_per_gpu == 0.125
    assert found.attainment == 0.3
    assert found.missed == {"ttft": 18, "tpot": 18, "gap": 17, "answer": 17}


def test_targets_are_read_as_vllms_users_write_them() -> None:
    assert LatencyTargets.parse(["ttft:500", "tpot:10", "gap:25"]) == LatencyTargets(ttft_ms=500, tpot_ms=10, gap_ms=25)
    assert LatencyTargets.parse(["ttft=500,e2el:2000.5"]) == LatencyTargets(ttft_ms=500, e2e_ms=2000.5)
    assert not LatencyTargets.parse([])
    assert str(LatencyTargets.parse(["gap:25", "ttft:500"])) == "TTFT ≤ 500 ms, gap ≤ 25 ms"


@pytest.mark.parametrize(
    "words", [["ttft"], ["ttft:"], ["ttft:-1"], ["ttft:0"], ["ttft:nan"], ["speed:3"], ["ttft:1", "ttft:2"], ["ttft:inf"]]
)
def test_what_is_no_target_is_said(words: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        LatencyTargets.parse(words)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.percentile(values, share * 100))
    assert percentile(sorted(values), share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_a_distribution_is_in_order_and_is_numpys(values: list[float]) -> None:
    d = Distribution.of(values)
    assert d.min <= d.p50 <= d.p90 <= d.p95 <= d.p99 <= d.max
    assert (d.count, d.min, d.max) == (len(values), min(values), max(values))
    assert d.mean == pytest.approx(np.mean(values))
    assert [d.p50, d.p99] == pytest.approx(list(np.percentile(values, [50, 99])))


def test_nothing_has_no_percentiles() -> None:
    assert math.isnan(percentile([], 0.5))
    empty = Distribution.of([])
    assert empty.count == 0
    assert all(math.isnan(v) for v in (empty.mean, empty.min, empty.p50, empty.p90, empty.p95, empty.p99, empty.max))


LATENCIES = st.lists(
    st.none()
    | st.builds(
        Latency,
        ttft_s=st.floats(0, 5),
        tpot_s=st.none() | st.floats(0, 5),
        longest_gap_s=st.none() | st.floats(0, 5),
        e2e_s=st.floats(0, 9),
    ),
    max_size=30,
)
LIMITS = st.fixed_dictionaries({name: st.none() | MILLISECONDS for name in ("ttft_ms", "tpot_ms", "gap_ms", "e2e_ms")})


@given(LATENCIES, LIMITS, LIMITS)
def test_looser_targets_never_lower_goodput(
    latencies: list[Latency | None], a: dict[str, float | None], b: dict[str, float | None]
) -> None:
    # The looser of two limits in each name; none is the loosest.
    loose = {name: None if a[name] is None or b[name] is None else max(a[name] or 0, b[name] or 0) for name in a}
    tight = goodput(latencies, LatencyTargets(**a), 60)
    assert tight.num_met <= goodput(latencies, LatencyTargets(**loose), 60).num_met
    assert tight.num_met <= sum(latency is not None for latency in latencies)


@given(st.lists(st.floats(0.001, 2), min_size=1, max_size=40), st.floats(0.001, 3), st.floats(0, 1))
def test_tpot_lies_between_the_gaps(gaps: list[float], first: float, tail: float) -> None:
    times = [first + math.fsum(gaps[:i]) for i in range(len(gaps) + 1)]
    latency = latency_of(record(times, ended=times[-1] + tail))
    assert latency is not None
    assert latency.tpot_s is not None
    assert latency.longest_gap_s is not None
    assert min(gaps) - 1e-9 <= latency.tpot_s <= latency.longest_gap_s + 1e-9
    assert latency.longest_gap_s == pytest.approx(max(gaps), abs=1e-9)
    assert latency.ttft_s + latency.tpot_s * len(gaps) + tail == pytest.approx(latency.e2e_s)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 9)), min_size=1, max_size=20), st.floats(0, 100))
def test_a_saved_request_is_judged_the_same(gaps: list[tuple[float, int]], sent: float) -> None:
    times = [sent + math.fsum(gap for gap, _ in gaps[: i + 1]) for i in range(len(gaps))]
    before = record(times, sent=sent, tokens=[n for _, n in gaps])
    after = RequestRecord.from_json(before.as_json())
    assert after.output_tokens == before.output_tokens
    assert list(after.num_tokens) == list(before.num_tokens)
    for was, now in zip(before.times_s, after.times_s, strict=True):
        assert now == pytest.approx(was, abs=2e-6)
