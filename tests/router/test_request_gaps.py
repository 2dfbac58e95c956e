"""Where the time between two tokens went."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import Cluster, Script, until

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
            kept.keep(gap_s, partial(Gap, position=position))
    told = [gap.position for gap in kept.in_order()]
    assert told == sorted(told)
    assert sorted(gaps[i] for i in told) == sorted((g for g in gaps if g), reverse=True)[:most][::-1]
    assert kept.longest_s == max(gaps, default=0.0)


@pytest.mark.parametrize(
    ("script", "part", "position"),
    [
        (Script(), "hand_over_s", 1),
        (Script(fail_at=4), "migration_s", 4),
        (Script(break_stream_at=4), "replay_s", 4),
    ],
)
async def test_an_end_tells_what_was_waited_for(cluster: Cluster, script: Script, part: str, position: int) -> None:
    await cluster.prefill()
    for name in ("d0", "d1"):
        decode = await cluster.decode(name)
        decode.script = script
        script.prompt_tokens = 512
    async with cluster.serving():
        request = cluster.request(max_tokens=8)
        request.num_gaps = 16
        end = (await cluster.ask(request)).end
        assert end is not None
        short = (await cluster.ask(max_tokens=8)).end
    gaps = {gap.position: gap for gap in end.gaps}
    assert getattr(gaps[position], part) > 0
    assert {p for p, gap in gaps.items() if gap.migration_s or gap.replay_s} <= {4}
    assert gaps[2].prompt_tokens == 512
    assert short is not None
    assert len(short.gaps) == 1, "whoever does not ask is told of the longest"


async def test_a_wait_for_a_worker_is_told_apart_from_the_route(cluster: Cluster) -> None:
    await cluster.prefill()
    decode = await cluster.decode()
    decode.max_held = 0
    async with cluster.serving():
        asked = asyncio.create_task(cluster.ask(max_tokens=3))
        await until(lambda: bool(decode.requests), "it was refused")
        decode.max_held = 1 << 30
        end = (await asked).end
    assert end is not None
    assert 0 < end.phases.wait_s <= end.phases.route_s
