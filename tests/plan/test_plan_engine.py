"""The simulation's engine beside the real one: the same times for every token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from engine_replay import Replay
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.lab.plan.goodput import simulate
from twostep.lab.simulator.cluster import HandOverCost, PlacementChoice, SimulatedDeployment
from twostep.lab.simulator.cluster import SimulatedRequest as Request
from twostep.lab.simulator.engine import EngineSpec
from twostep.step_curve import StepCurve

CURVE = StepCurve(fixed_s=0.004, per_row_s=2e-4, knee=8, per_pair_s=1e-6, per_sequence_s=3e-5, per_context_s=1e-6)


# What bounds steps with prompts: a decode step takes 4 to 6 ms, one with 90 rows 20, and with `mixed_s` none is shorter than 9.
BOUNDS = st.fixed_dictionaries(
    {},
    optional={
        "tpot_s": st.floats(0.003, 0.01),
        "gap_s": st.floats(0.012, 0.05),
        "max_step_s": st.floats(0.003, 0.02),
        "min_chunk": st.integers(1, 16),
        "curve": st.just(replace(CURVE, mixed_s=0.009)),
        "num_state_blocks": st.integers(1, 3),
    },
)


def short_of_blocks(num_blocks: int, look_ahead: bool, **bounds: Any) -> SimulatedDeployment:
    spec = EngineSpec(curve=CURVE, step_tokens=48, max_num_seqs=16, num_blocks=num_blocks, block_size=4, look_ahead=look_ahead)
    return SimulatedDeployment(num_prefill=0, num_decode=1, decode=replace(spec, **bounds))


def assert_same(deployment: SimulatedDeployment, requests: list[Request], alone: Collection[int] = ()) -> int:
    """Returns how many gave way."""
    replay = Replay(deployment, alone)
    real = replay.run(requests)
    numbered = {id(request): i for i, request in enumerate(requests)}

    def place(request, now, prefill, decode, full):
        i = numbered[id(request)]
        choice = PlacementChoice(i % len(prefill) if prefill and i not in alone else None, i % len(decode))
        return None if choice.decode in full else choice

    run = simulate(deployment, requests, placement=place)
    simulated: list[list[float]] = [[] for _ in requests]
    for served in run.served:
        simulated[numbered[id(served.request)]] = list(served.token_times)
    assert sum(worker.num_preemptions for worker in run.workers) == replay.num_preemptions
    for i, request in enumerate(requests):
        assert len(real[i]) == request.num_output
        assert simulated[i] == pytest.approx(real[i], abs=1e-9), f"request {i} of {len(requests)}: {request}"
    return replay.num_preemptions


@st.composite
def arrivals(draw, *, most_output: int = 12) -> list[Request]:
    gaps = draw(st.lists(st.floats(0.0001, 0.05), min_size=1, max_size=25))
    now, requests = 0.0, []
    for gap in gaps:
        now += gap
        requests.append(Request(arrival_s=now, num_prompt=draw(st.integers(1, 90)), num_output=draw(st.integers(1, most_output))))
    return requests


@settings(max_examples=100, deadline=None)
@given(
    arrivals(),
    st.tuples(st.integers(0, 3), st.integers(1, 2)),
    st.booleans(),
    st.integers(16, 200),
    st.integers(2, 16),
    st.floats(0.0001, 0.02),
    BOUNDS,
    st.sets(st.integers(0, 24)),
)
def test_every_token_comes_when_the_engines_says(requests, split, look_ahead, step_tokens, max_num_seqs, latency_s, bounds, alone) -> None:
    num_prefill, num_decode = split
    seats = 16 if num_prefill else max_num_seqs
    spec = EngineSpec(curve=CURVE, step_tokens=step_tokens, max_num_seqs=seats, num_blocks=1000, block_size=4, look_ahead=look_ahead)
    spec = replace(spec, **bounds)
    hand_over = HandOverCost(latency_s=latency_s, bytes_per_s=1e6, kv_token_bytes=7.0, state_bytes=40.0 * spec.num_state_blocks)
    deployment = SimulatedDeployment(
        num_prefill=num_prefill, num_decode=num_decode, prefill=spec if num_prefill else None, decode=spec, hand_over=hand_over
    )
    assert_same(deployment, requests, alone)


@settings(max_examples=60, deadline=None)
@given(arrivals(most_output=40), st.integers(26, 50), st.booleans(), BOUNDS)
def test_who_gives_way_when_blocks_run_out(requests, num_blocks, look_ahead, bounds) -> None:
    # Beside the longest sequence, states and all.
    assert_same(short_of_blocks(num_blocks + 8 + bounds.get("num_state_blocks", 0), look_ahead, **bounds), requests)


@pytest.mark.parametrize("look_ahead", [False, True])
def test_blocks_do_run_out_there(look_ahead) -> None:
    """Shows that the property above has cases to look at."""
    requests = [Request(arrival_s=0.001 * i, num_prompt=20, num_output=40) for i in range(1, 9)]
    assert assert_same(short_of_blocks(45, look_ahead), requests) > 0
