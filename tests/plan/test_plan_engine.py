"""The simulation's engine beside the real one: the same times for every token."""

from __future__ import annotations

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


def both(deployment: SimulatedDeployment, requests: list[Request]) -> tuple[list[list[float]], list[list[float]], int, int]:
    replay = Replay(deployment)
    real = replay.run(requests)
    numbered = {id(request): i for i, request in enumerate(requests)}

    def place(request, now, prefill, decode, full):
        i = numbered[id(request)]
        choice = PlacementChoice(i % len(prefill) if prefill else None, i % len(decode))
        return None if choice.decode in full else choice

    run = simulate(deployment, requests, placement=place)
    simulated: list[list[float]] = [[] for _ in requests]
    for served in run.served:
        simulated[numbered[id(served.request)]] = list(served.token_times)
    return real, simulated, replay.num_preemptions, sum(worker.num_preemptions for worker in run.workers)


@st.composite
def arrivals(draw, *, most_output: int = 12) -> list[Request]:
    gaps = draw(st.lists(st.floats(0.0001, 0.05), min_size=1, max_size=25))
    now, requests = 0.0, []
    for gap in gaps:
        now += gap
        requests.append(Request(arrival_s=now, num_prompt=draw(st.integers(1, 90)), num_output=draw(st.integers(1, most_output))))
    return requests


def assert_same(real: list[list[float]], simulated: list[list[float]], requests: list[Request]) -> None:
    for i, request in enumerate(requests):
        assert len(real[i]) == request.num_output
        assert simulated[i] == pytest.approx(real[i], abs=1e-9), f"request {i} of {len(requests)}: {request}"


@settings(max_examples=60, deadline=None)
@given(arrivals(), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.integers(16, 64), st.floats(0.0001, 0.02))
def test_prefill_and_decode_workers(requests, num_prefill, num_decode, look_ahead, step_tokens, latency_s) -> None:
    spec = EngineSpec(curve=CURVE, step_tokens=step_tokens, max_num_seqs=16, num_blocks=400, block_size=4, look_ahead=look_ahead)
    hand_over = HandOverCost(latency_s=latency_s, bytes_per_s=1e6, kv_token_bytes=7.0)
    deployment = SimulatedDeployment(num_prefill=num_prefill, num_decode=num_decode, prefill=spec, decode=spec, hand_over=hand_over)
    real, simulated, _, _ = both(deployment, requests)
    assert_same(real, simulated, requests)


@settings(max_examples=60, deadline=None)
@given(arrivals(), st.integers(1, 2), st.booleans(), st.integers(16, 64), st.integers(2, 16))
def test_aggregated_workers(requests, num_decode, look_ahead, step_tokens, max_num_seqs) -> None:
    spec = EngineSpec(curve=CURVE, step_tokens=step_tokens, max_num_seqs=max_num_seqs, num_blocks=400, block_size=4, look_ahead=look_ahead)
    real, simulated, _, _ = both(SimulatedDeployment(num_prefill=0, num_decode=num_decode, decode=spec), requests)
    assert_same(real, simulated, requests)


@settings(max_examples=60, deadline=None)
@given(arrivals(most_output=40), st.integers(26, 50), st.booleans())
def test_who_gives_way_when_blocks_run_out(requests, num_blocks, look_ahead) -> None:
    spec = EngineSpec(curve=CURVE, step_tokens=48, max_num_seqs=16, num_blocks=num_blocks + 8, block_size=4, look_ahead=look_ahead)
    real, simulated, num_real, num_simulated = both(SimulatedDeployment(num_prefill=0, num_decode=1, decode=spec), requests)
    assert num_simulated == num_real
    assert_same(real, simulated, requests)


def test_blocks_do_run_out_there() -> None:
    """Of the property above: that it has something to show."""
    requests = [Request(arrival_s=0.001 * i, num_prompt=20, num_output=40) for i in range(1, 9)]
    for look_ahead in (False, True):
        spec = EngineSpec(curve=CURVE, step_tokens=48, max_num_seqs=16, num_blocks=45, block_size=4, look_ahead=look_ahead)
        real, simulated, num_real, num_simulated = both(SimulatedDeployment(num_prefill=0, num_decode=1, decode=spec), requests)
        assert num_real == num_simulated > 0
        assert_same(real, simulated, requests)
