"""The cost formula, and the knee of a throughput curve."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.step_curve import StepCurve, StepWorkload, ThroughputPoint, chunk_pairs, knee_budget, knee_of

CURVE = StepCurve(fixed_s=4e-3, per_row_s=20e-6, knee=200, per_pair_s=1e-9, per_sequence_s=2e-6, per_context_s=3e-8)


def test_a_step_by_hand() -> None:
    assert CURVE.step_s(StepWorkload()) == 4e-3
    assert CURVE.decode_step_s(100, 50_000) == pytest.approx(4e-3 + 100 * 2e-6 + 50_000 * 3e-8)
    work = StepWorkload(prompt_tokens=300, pairs=chunk_pairs(300, 1000), decodes=100, context=50_000)
    assert chunk_pairs(300, 1000) == 300 * 1150
    assert CURVE.step_s(work) == pytest.approx(4e-3 + 200 * 20e-6 + 345_000e-9 + 100 * 2e-6 + 50_000 * 3e-8)


def test_a_prompt_in_chunks_is_the_sum_of_its_steps() -> None:
    first = StepWorkload(prompt_tokens=90, pairs=chunk_pairs(90, 20), decodes=10, context=500)
    last = StepWorkload(prompt_tokens=10, pairs=chunk_pairs(10, 110), decodes=10, context=500)
    assert CURVE.prefill_s(120, 20, 100, decodes=10, context=500) == pytest.approx(CURVE.step_s(first) + CURVE.step_s(last))


@given(st.integers(0, 400), st.integers(0, 400_000), st.integers(0, 9000), st.floats(1e-3, 0.1), st.sampled_from([0.0, 1e-9]))
def test_the_chunk_within_a_bound_is_the_largest(decodes: int, context: int, before: int, bound_s: float, per_pair_s: float) -> None:
    curve = dataclasses.replace(CURVE, per_pair_s=per_pair_s)

    def seconds(count: float) -> float:
        work = StepWorkload(prompt_tokens=math.ceil(count), pairs=count * (before + count / 2), decodes=decodes, context=context)
        return curve.step_s(work)

    fits = curve.chunk_within(bound_s, decodes=decodes, context=context, before=before)
    assert not fits or seconds(math.floor(fits)) <= bound_s + 1e-9
    assert seconds(math.floor(fits) + 2) > bound_s


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 5000))
def test_splitting_a_chunk_computes_the_same_pairs(before: int, first: int, second: int) -> None:
    assert chunk_pairs(first, before) + chunk_pairs(second, before + first) == pytest.approx(chunk_pairs(first + second, before))


def test_the_knee_is_where_larger_steps_gain_little() -> None:
    sizes = (64, 128, 256, 512, 1024, 2048)
    # Up to 512 tokens a step takes 10 ms whatever is in it; then 20 us for each token more.
    points = [ThroughputPoint(n, max(10e-3, 10e-3 + (n - 512) * 19e-6)) for n in sizes]
    assert knee_budget(points) == 512
    assert knee_budget(points, share=0.2) == 128
    assert knee_budget(points[::-1]) == 512
    assert knee_budget(points[:3]) == 256


def test_one_lucky_small_step_is_no_knee() -> None:
    points = [ThroughputPoint(64, 1e-3), ThroughputPoint(128, 20e-3), ThroughputPoint(256, 4.0e-3), ThroughputPoint(512, 7.9e-3)]
    assert knee_budget(points) == 256


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-4, 10)), min_size=1, unique_by=lambda point: point[0]), st.floats(0.01, 1))
def test_the_knee_reaches_its_share_and_no_smaller_neighbour_does(sizes: list[tuple[int, float]], share: float) -> None:
    points = sorted((ThroughputPoint(*size) for size in sizes), key=lambda point: point.num_tokens)
    knee = knee_budget(points, share=share)
    best = max(point.tokens_per_s for point in points)
    index = next(i for i, point in enumerate(points) if point.num_tokens == knee)
    assert points[index].tokens_per_s >= share * best
    assert index == 0 or points[index - 1].tokens_per_s < share * best


@pytest.mark.parametrize("points", [[], [ThroughputPoint(0, 1.0)], [ThroughputPoint(5, 0.0)]])
def test_points_that_say_nothing_are_refused(points: list[ThroughputPoint]) -> None:
    with pytest.raises(ValueError, match="points"):
        knee_budget(points)
    with pytest.raises(ValueError, match="share"):
        knee_budget([ThroughputPoint(1, 1.0)], share=0)


def test_the_knee_of_a_curve() -> None:
    assert knee_of(StepCurve(fixed_s=0.0, per_row_s=1e-3), 512) == 16, "each token costs the same"
    assert knee_of(StepCurve(fixed_s=10.0, per_row_s=1e-6), 500) == 500, "and here they cost nothing"
    # A 20th of 19 ms is the fixed part of a step of 1000 tokens: a step of 1024 is there, one of 512 is not.
    assert knee_of(StepCurve(fixed_s=1e-3, per_row_s=19e-6), 1 << 30, share=0.95) == 1024
    # Pairs make large prompts slow: 4096 tokens a step would be worse than 1024.
    assert knee_of(StepCurve(fixed_s=1e-3, per_row_s=1e-6, per_pair_s=1e-9), 1 << 16, share=1.0) == 1024
    assert knee_of(StepCurve(fixed_s=1e-3, per_row_s=1e-6), 7) == 7
