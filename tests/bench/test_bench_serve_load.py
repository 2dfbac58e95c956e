"""Arrivals, lengths, workloads and the search for the knee: pure, seeded, as described."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve import lengths
from twostep.lab.bench.serve.arrivals import Arrivals
from twostep.lab.bench.serve.sweep import Search, Tried, knee
from twostep.lab.bench.serve.workloads import (
    BenchSession,
    MultiTurn,
    PromptContent,
    RandomPrompts,
    SessionTurn,
    SharedPrefixPrompts,
    TraceRequest,
    Workload,
    read_trace,
)

ALPHABET = range(256, 4096)
CONTENT = PromptContent("a", ALPHABET)


def some(workload: Workload, count: int, seed: str = "a") -> list[BenchSession]:
    return list(islice(workload.sessions(PromptContent(seed, ALPHABET), random.Random("lengths")), count))


def gaps_of(arrivals: Arrivals, count: int, seed: str = "s") -> list[float]:
    times = [0.0, *islice(arrivals.times(seed), count)]
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_mean_and_the_variation_of_their_process(burstiness: float, variation: float) -> None:
    gaps = gaps_of(Arrivals(rate=5, burstiness=burstiness), 20_000)
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.5, 1.0])
def test_a_rate_scales_one_pattern(burstiness: float) -> None:
    slow, fast = (gaps_of(Arrivals(rate=rate, burstiness=burstiness), 50) for rate in (2, 8))
    assert [4 * gap for gap in fast] == pytest.approx(slow)
    assert slow != gaps_of(Arrivals(rate=2, burstiness=burstiness), 50, seed="other")


@given(st.floats(0.1, 50), st.floats(1, 60), st.integers(0, 5))
def test_as_many_come_within_a_time_as_its_rate_says(rate: float, length: float, seed: int) -> None:
    times = Arrivals(rate=rate, burstiness=0.5).within(str(seed), length)
    assert len(times) == pytest.approx(rate * length, abs=0.5001)
    assert times == sorted(times)
    assert all(0 <= t <= length for t in times)
    assert all(t < length for t in Arrivals(rate=rate).until(str(seed), length))


def test_given_their_number_poisson_arrivals_are_spread_evenly() -> None:
    # Order statistics of a uniform distribution: the k-th of n lies at k/(n+1) on average.
    runs = [Arrivals(rate=1).within(str(seed), 9.0) for seed in range(4000)]
    assert {len(run) for run in runs} == {9}
    for k in range(9):
        assert statistics.fmean(run[k] for run in runs) == pytest.approx(9.0 * (k + 1) / 10, abs=0.12)


def test_all_at_once() -> None:
    assert list(islice(Arrivals(rate=math.inf).times("s"), 3)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0, -1, math.nan])
def test_what_is_no_rate_is_said(rate: float) -> None:
    with pytest.raises(InvalidRequest):
        Arrivals(rate=rate)


def drawn(distribution: lengths.Lengths, count: int = 4000) -> list[int]:
    rng = random.Random(1)
    return [distribution.draw(rng) for _ in range(count)]


def test_normal_lengths_have_their_mean_and_spread_and_are_cut() -> None:
    values = drawn(lengths.Normal(2600, 0.3))
    assert statistics.fmean(values) == pytest.approx(2600, rel=0.02)
    assert statistics.pstdev(values) == pytest.approx(780, rel=0.05)
    assert min(values) >= 260
    assert max(values) <= 4940
    assert set(drawn(lengths.Normal(7, 0), 10)) == {7}
    assert min(drawn(lengths.Normal(2, 1))) >= 1


@pytest.mark.parametrize("shape", [lengths.SHAREGPT_PROMPT, lengths.SHAREGPT_OUTPUT, lengths.DOCUMENT_PROMPT, lengths.DOCUMENT_OUTPUT])
def test_published_lengths_have_their_published_quantiles(shape: lengths.LogNormal) -> None:
    values = sorted(drawn(shape))
    # Cutting off moves them a little.
    assert values[len(values) // 2] == pytest.approx(shape.median, rel=0.06)
    assert values[len(values) * 9 // 10] == pytest.approx(shape.p90, rel=0.08)
    assert shape.low <= values[0]
    assert values[-1] <= shape.high


@pytest.mark.parametrize(
    "make", [lambda: lengths.Fixed(0), lambda: lengths.Normal(5, 2), lambda: lengths.Uniform(5, 4), lambda: lengths.LogNormal(5, 4, 1, 9)]
)
def test_lengths_that_cannot_be_are_refused(make: object) -> None:
    with pytest.raises(InvalidRequest):
        make()  # type: ignore[operator]


WORKLOADS: dict[str, Workload] = {
    "fixed": RandomPrompts(prompt=lengths.Fixed(40), output=lengths.Fixed(8)),
    "prefix": SharedPrefixPrompts(prefix_tokens=64, num_prefixes=3, suffix=lengths.Fixed(16), output=lengths.Fixed(8)),
    "turns": MultiTurn(turns=lengths.Uniform(1, 6), message=lengths.Fixed(16), output=lengths.Fixed(8), system_tokens=32, think_s=2.0),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_repeats_a_workload_and_another_says_other_things_of_the_same_lengths(name: str) -> None:
    first, again, other = (some(WORKLOADS[name], 20, seed) for seed in ("a", "a", "b"))
    assert first == again
    for ours, theirs in zip(first, other, strict=True):
        assert [(len(t.prompt), t.output_tokens, t.think_s) for t in ours.turns] == [
            (len(t.prompt), t.output_tokens, t.think_s) for t in theirs.turns
        ]
        assert ours.turns[0].prompt != theirs.turns[0].prompt
    assert {i for s in first for t in s.turns for i in t.prompt} <= set(ALPHABET)


def test_random_prompts_begin_differently_however_many_there_are() -> None:
    prompts = [tuple(s.turns[0].prompt) for s in some(WORKLOADS["fixed"], 3000)]
    assert len({prompt[:4] for prompt in prompts}) == 3000
    assert all(len(prompt) == 40 for prompt in prompts)


def test_shared_prefixes_are_shared_alike() -> None:
    prompts = [tuple(s.turns[0].prompt) for s in some(WORKLOADS["prefix"], 600)]
    counts = Counter(p[:64] for p in prompts)
    assert [count / 600 for count in counts.values()] == pytest.approx([1 / 3] * 3, abs=0.06)
    assert len({p[64:] for p in prompts}) == 600
    assert all(len(p) == 80 for p in prompts)


def test_conversations_take_turns_and_think_in_between() -> None:
    sessions = some(WORKLOADS["turns"], 400)
    assert {len(s.turns) for s in sessions} == {1, 2, 3, 4, 5, 6}
    assert all(s.turns[0].think_s == 0 for s in sessions)
    assert statistics.fmean(t.think_s for s in sessions for t in s.turns[1:]) == pytest.approx(2.0, rel=0.1)
    assert len({tuple(s.turns[0].prompt)[:32] for s in sessions}) == 1, "one system prompt for all"
    assert all(len(t.prompt) == 16 for s in sessions for t in s.turns[1:])


def test_a_conversation_has_180_turns_at_most_and_ends_before_its_context() -> None:
    [long] = some(MultiTurn(turns=lengths.Fixed(500), message=lengths.Fixed(10), output=lengths.Fixed(10)), 1)
    assert len(long.turns) == 180
    assert len(long.fitted(205).turns) == 10


# The first lines of the public trace, in its own spelling.
MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 1030, "output_length": 0, "hash_ids": [0, 1, 28]}

{"timestamp": 3052, "input_length": 2287, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]}
"""


def test_a_mooncake_trace_is_read_and_equal_hash_ids_are_equal_text(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(MOONCAKE)
    trace = read_trace(path)
    assert trace.requests[1] == TraceRequest(arrival_s=3.052, input_tokens=1030, output_tokens=1, hash_ids=(0, 1, 28))
    sessions = some(trace, 9)
    assert [(s.arrival_s, s.turns[0].output_tokens) for s in sessions] == [(0.0, 500), (3.052, 1), (3.052, 316)]
    first, second, third = (list(s.turns[0].prompt) for s in sessions)
    assert [len(p) for p in (first, second, third)] == [1100, 1030, 2287]
    assert first[:1024] == second[:1024]
    assert first[1024] != second[1024]
    assert first[:512] == third[:512]
    assert first[512:516] != third[512:516]


@given(st.integers(1, 3000), st.lists(st.integers(0, 9), max_size=6))
def test_a_prompt_has_its_length_however_many_ids_there_are(tokens: int, hash_ids: list[int]) -> None:
    request = TraceRequest(arrival_s=0, input_tokens=tokens, output_tokens=1, hash_ids=tuple(hash_ids))
    assert len(request.prompt(CONTENT)) == tokens


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "mooncake"),
        ('{"timestamp": 0}', "line 1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{broken', "line 2"),
        ("[]", "1"),
    ],
)
def test_what_is_no_trace_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        read_trace(tmp_path / "trace")
    with pytest.raises(InvalidRequest):
        read_trace(tmp_path / "missing")


@given(st.integers(2, 400), st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=6))
def test_fitted_sessions_fit(max_len: int, turns: list[tuple[int, int]]) -> None:
    session = BenchSession(turns=tuple(SessionTurn(prompt=CONTENT.draw(prompt), output_tokens=output) for prompt, output in turns))
    cut = session.fitted(max_len)
    assert 1 <= len(cut.turns) <= len(turns)
    total = 0
    for turn in cut.turns:
        assert len(turn.prompt) >= 1
        assert turn.output_tokens >= 1
        total += len(turn.prompt) + turn.output_tokens
        assert total <= max_len
    if sum(p + o for p, o in turns) <= max_len and all(o <= max_len // 2 for _, o in turns):
        assert cut == session
    assert session.fitted(0) == session


def swept(search: Search, limit: float) -> list[Tried]:
    """Against a server that keeps its targets up to `limit`."""
    tried: list[Tried] = []
    while (rate := search.next_rate(tried)) is not None:
        tried.append(Tried(rate, rate <= limit))
    return tried


@given(st.floats(0.1, 1000), st.floats(0.1, 1000))
def test_a_sweep_finds_the_knee_to_its_resolution(first: float, limit: float) -> None:
    search = Search(first=first, resolution=0.05, max_points=40, max_halvings=20)
    tried = swept(search, limit)
    found = knee(tried)
    assert found is not None
    assert found <= limit <= found * 1.05 * (1 + 1e-9)
    assert len({t.rate for t in tried}) == len(tried), "no rate is run twice"
    assert len(tried) <= 2 + abs(math.log2(limit / first)) + 7


def test_a_sweep_gives_up_on_a_server_that_keeps_nothing_and_stops_at_its_bound() -> None:
    tried = swept(Search(first=8, max_halvings=3), 0.0)
    assert [t.rate for t in tried] == [8, 4, 2, 1]
    assert knee(tried) is None
    assert len(swept(Search(first=1, max_points=5), 1e9)) == 5


def test_a_sweep_by_hand() -> None:
    assert [t.rate for t in swept(Search(first=4, resolution=0.1), 11)] == [4, 8, 16, 12, 10, 11]


@pytest.mark.parametrize("first", [0, math.inf])
def test_a_sweep_that_cannot_be_is_refused(first: float) -> None:
    with pytest.raises(InvalidRequest):
        Search(first=first)
