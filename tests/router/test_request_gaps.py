"""Where the time between two tokens went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.gaps import LongestGaps, StepTimes, gap_between, gap_of_hand_over
from twostep.rpc.v1.decode_pb2 import StepEvents, StepRecord
from twostep.rpc.v1.inference_pb2 import Gap

PARTS = [field.name for field in Gap.DESCRIPTOR.fields if field.name.endswith("_s") and field.name != "gap_s"]
times = st.floats(0, 10)


def parts_of(gap: Gap) -> dict[str, float]:
    return {name: pytest.approx(value, abs=1e-6) for name in PARTS if (value := getattr(gap, name))}


def message(*steps: StepRecord, sent_s: float) -> StepTimes | None:
    return StepTimes.of(StepEvents(step=steps[-1].step, steps=steps, sent_s=sent_s))


@given(ended=times, late=times, launch=times, duration=times, late_now=times, network=times)
def test_the_parts_of_a_gap_add_up_to_it(
    ended: float, late: float, launch: float, duration: float, late_now: float, network: float
) -> None:
    before = message(StepRecord(step=1, ended_s=ended), sent_s=ended + late)
    end = ended + launch + duration
    now = message(StepRecord(step=2, ended_s=end, duration_s=duration), sent_s=end + late_now)
    gap_s = launch + duration + late_now - late + network
    gap = gap_between(3, gap_s, before, now)
    assert sum(getattr(gap, name) for name in PARTS) == pytest.approx(gap_s, abs=1e-4)
    assert (gap.outside_s, gap.network_s) == (pytest.approx(launch, abs=1e-4), pytest.approx(network, abs=1e-4))


def test_a_gap_by_hand() -> None:
    # Two steps in one message, a step without the sequence, then one with 512 prompt tokens of 30 ms, sent 5 ms after its end.
    before = message(StepRecord(step=7, ended_s=0.99), StepRecord(step=8, ended_s=1.0), sent_s=1.001)
    mixed = StepRecord(step=10, ended_s=1.05, duration_s=0.03, prompt_tokens=512, decodes=4)
    gap = gap_between(9, 0.056, before, message(mixed, sent_s=1.055))
    assert parts_of(gap) == {"outside_s": 0.02, "step_s": 0.03, "late_s": 0.004, "network_s": 0.002}
    assert (gap.position, gap.prompt_tokens, gap.decodes, gap.steps_missed) == (9, 512, 4, 1)
    # The hand-over took 50 ms, then it waited for the end of a step that was under way.
    gap = gap_of_hand_over(1, 0.1, 0.05, message(mixed, sent_s=1.055))
    assert parts_of(gap) == {"hand_over_s": 0.05, "step_s": 0.03, "late_s": 0.005, "outside_s": 0.015}
    # Events without steps are of a replay, or of a worker that never tells.
    assert parts_of(gap_between(9, 0.5, before, None)) == {"replay_s": 0.5}
    assert parts_of(gap_between(9, 0.5, None, None)) == {}


@given(most=st.integers(1, 8), gaps=st.lists(times, max_size=40))
def test_the_longest_are_kept(most: int, gaps: list[float]) -> None:
    kept = LongestGaps(most)
    for position, gap_s in enumerate(gaps):
        if gap_s > kept.least_s:
            kept.keep(Gap(position=position), gap_s)
    told = [gap.position for gap in kept.told()]
    assert told == sorted(told)
    assert sorted(gaps[i] for i in told) == sorted((g for g in gaps if g), reverse=True)[:most][::-1]
    assert kept.longest_s == max(gaps, default=0.0)
