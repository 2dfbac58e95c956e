"""Batching rules on an engine whose every step takes 10 ms of a clock that is turned by hand: what they cost can be worked out."""

from __future__ import annotations

import heapq
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.cli import main
from twostep.engine.batch import Batch, Sampled
from twostep.engine.fake import FakeRunner
from twostep.errors import SetupError
from twostep.lab.bench.batching import (
    Arrival,
    Batching,
    BatchingLoad,
    BatchingResult,
    RequestTimes,
    Rule,
    arrivals_of,
    num_to_start,
    run_load,
)

STEP_S = 0.01
BLOCK = 4


class ClockedRunner(FakeRunner):
    """Its steps take 10 ms of its own clock, whatever is in them."""

    now = 0.0

    def run(self, batch: Batch) -> Sampled:
        self.now += STEP_S
        return super().run(batch)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def measure(load: BatchingLoad, rule: Rule) -> BatchingResult:
    runner = ClockedRunner(num_blocks=400, block_size=BLOCK, max_model_len=200)
    result = run_load(runner, load, rule, 512, clock=lambda: runner.now, sleep=runner.sleep)
    lengths = [arrival.request.sampling.max_tokens for arrival in arrivals_of(load, runner.vocab_size)]
    assert [len(times.tokens_s) for times in result.times] == lengths, "everybody is answered in full"
    return result


def lengths_of(load: BatchingLoad) -> list[int]:
    return [arrival.request.sampling.max_tokens for arrival in arrivals_of(load, 1000)]


AT_ONCE = BatchingLoad(num_requests=24, rate=math.inf, prompt_tokens=6, output_tokens=10, seed=3)


@pytest.mark.parametrize("batching", [Batching.STATIC, Batching.DYNAMIC])
def test_a_batch_takes_as_long_as_its_longest_answer(batching: Batching) -> None:
    result = measure(AT_ONCE, Rule(batching=batching, batch=4))
    lengths = lengths_of(AT_ONCE)
    longest = [max(lengths[i : i + 4]) for i in range(0, 24, 4)]
    assert result.seconds == pytest.approx(STEP_S * sum(longest))
    begins = [STEP_S * sum(longest[: i // 4]) for i in range(24)]
    assert [times.ttft_s for times in result.times] == pytest.approx([begin + STEP_S for begin in begins])
    assert [times.latency_s for times in result.times] == pytest.approx(
        [begin + STEP_S * length for begin, length in zip(begins, lengths, strict=True)]
    )
    assert result.tokens_per_s == pytest.approx(sum(lengths) / result.seconds)


def test_continuous_batching_gives_each_seat_to_the_next_at_once() -> None:
    result = measure(AT_ONCE, Rule(batching=Batching.CONTINUOUS, batch=4))
    lengths = lengths_of(AT_ONCE)
    seats = [0] * 4
    ends = []
    for length in lengths:
        ends.append(heapq.heappop(seats) + length)
        heapq.heappush(seats, ends[-1])
    assert [times.latency_s for times in result.times] == pytest.approx([STEP_S * end for end in ends])
    assert result.seconds == pytest.approx(STEP_S * max(ends))
    static = measure(AT_ONCE, Rule(batching=Batching.STATIC, batch=4))
    assert result.tokens_per_s > 1.2 * static.tokens_per_s, "with answers of unlike lengths"


def test_answers_of_one_length_gain_nothing_when_all_are_there() -> None:
    load = BatchingLoad(num_requests=12, rate=math.inf, prompt_tokens=6, output_tokens=10, even=True)
    seconds = {batching: measure(load, Rule(batching=batching, batch=4)).seconds for batching in Batching}
    assert list(seconds.values()) == pytest.approx([3 * 10 * STEP_S] * 3)


def test_who_waits_for_company() -> None:
    """Two requests, far apart."""
    load = BatchingLoad(num_requests=2, rate=0.1, prompt_tokens=6, output_tokens=3, even=True, seed=1)
    apart = arrivals_of(load, 1000)[1].at_s
    assert apart > 1
    ttft = {
        batching: [times.ttft_s for times in measure(load, Rule(batching=batching, batch=2, timeout_s=0.5)).times] for batching in Batching
    }
    assert ttft[Batching.CONTINUOUS] == pytest.approx([STEP_S, STEP_S])
    assert ttft[Batching.DYNAMIC] == pytest.approx([0.5 + STEP_S, STEP_S], abs=1e-4), "for the time-out; the last one for nobody"
    assert ttft[Batching.STATIC] == pytest.approx([apart + STEP_S, STEP_S])


def test_times_of_a_request_by_hand() -> None:
    times = RequestTimes(2.0, [2.5, 2.6, 3.1, 3.2])
    assert times.ttft_s == 0.5
    assert times.latency_s == pytest.approx(1.2)
    assert times.longest_gap_s == pytest.approx(0.5)
    assert RequestTimes(0.0, [1.0]).longest_gap_s == 0.0


def test_arrivals_have_the_rate_and_lengths_they_should() -> None:
    load = BatchingLoad(num_requests=4000, rate=50.0, prompt_tokens=1, output_tokens=8)
    arrivals: list[Arrival] = arrivals_of(load, 1000)
    assert arrivals[0].at_s == 0.0
    assert arrivals[-1].at_s == pytest.approx(4000 / 50, rel=0.1)
    lengths = [arrival.request.sampling.max_tokens for arrival in arrivals]
    assert set(lengths) == set(range(1, 16))
    assert sum(lengths) / len(lengths) == pytest.approx(8, rel=0.05)


@given(
    st.sampled_from(list(Batching)), st.integers(1, 8), st.floats(0, 2), st.lists(st.floats(0, 10), max_size=12),
    st.floats(0, 5), st.integers(0, 8), st.booleans(),
)  # fmt: skip
def test_rules(batching: Batching, batch: int, timeout: float, since: list[float], later: float, active: int, more: bool) -> None:
    since.sort()
    now = (since[-1] if since else 0.0) + later
    count = num_to_start(Rule(batching=batching, batch=batch, timeout_s=timeout), since, now, num_active=active, more_come=more)
    assert 0 <= count <= len(since)
    assert not count or count + active <= batch
    if batching is not Batching.CONTINUOUS and active:
        assert count == 0, "nobody joins a batch that runs"
    if not active and since and (not more or len(since) >= batch):
        assert count == min(batch, len(since)), "nobody waits for company that does not come, or is there"
    if batching is Batching.STATIC and more and len(since) < batch:
        assert count == 0


@pytest.mark.parametrize(
    ("load", "rule"),
    [
        (BatchingLoad(num_requests=1, rate=1, prompt_tokens=100, output_tokens=60), Rule(batching=Batching.STATIC, batch=1)),
        (BatchingLoad(num_requests=1, rate=1, prompt_tokens=100, output_tokens=50), Rule(batching=Batching.STATIC, batch=9)),
        (BatchingLoad(num_requests=1, rate=0, prompt_tokens=9, output_tokens=5), Rule(batching=Batching.STATIC, batch=1)),
    ],
)
def test_what_cannot_be_run_is_refused(load: BatchingLoad, rule: Rule) -> None:
    with pytest.raises(SetupError):
        measure(load, rule)


@pytest.mark.system
def test_the_command_compares_them(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "engine", "--device", "cpu", "--model", str(tiny_llama_dir)]
    words = [
        "--batching",
        "static",
        "continuous",
        "--num-requests",
        "6",
        "--batch-size",
        "2",
        "--input-tokens",
        "10",
        "--output-tokens",
        "4",
    ]
    with pytest.raises(SystemExit) as ended:
        main([*command, *words, "--json"])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    results: list[dict[str, Any]] = json.loads(said.out)["results"]
    assert [result["batching"] for result in results] == ["static", "continuous"]
    for result in results:
        assert result["requests"] == 6
        assert result["tokens_per_s"] > 0
        assert 0 < result["ttft_p50_s"] <= result["latency_p99_s"] <= result["seconds"]
