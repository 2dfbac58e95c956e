"""Simulations whose outcome is known: by hand, by queueing theory, or by what must hold of any."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.engine.step_bound import MADE_UP_WITHIN
from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.lengths import Fixed, Uniform
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.plan.goodput import find_knee, seconds_for, simulate, try_rate, try_requests
from twostep.lab.plan.machine import machine_of_preset
from twostep.lab.plan.workload import PlannedWorkload, parse_workload
from twostep.lab.simulator.cluster import HandOverCost, SimulatedDeployment
from twostep.lab.simulator.cluster import SimulatedRequest as Request
from twostep.lab.simulator.engine import EngineSpec, SimulatedEngine, SimulatedSequence
from twostep.step_curve import FIRST_GAP_SHARE, StepCurve

# A step takes 10 ms, and 1 ms more for each row.
PLAIN = StepCurve(fixed_s=0.010, per_row_s=0.001)


def times_of(deployment: SimulatedDeployment, *requests: Request) -> list[list[float]]:
    run = simulate(deployment, requests)
    order = {id(request): i for i, request in enumerate(requests)}
    times: list[list[float]] = [[] for _ in requests]
    for served in run.served:
        times[order[id(served.request)]] = [round(t, 6) for t in served.token_times]
    return times


def test_one_request_on_one_pair_by_hand() -> None:
    """100 tokens in one step of 110 ms; 0.1 MB over 10 MB/s and 5 ms of latency; then steps of 11 ms."""
    spec = EngineSpec(curve=PLAIN, step_tokens=512)
    hand_over = HandOverCost(latency_s=0.005, bytes_per_s=1e7, kv_token_bytes=1000)
    deployment = SimulatedDeployment(num_prefill=1, num_decode=1, prefill=spec, decode=spec, hand_over=hand_over, edge_s=0.002)
    [times] = times_of(deployment, Request(arrival_s=1.0, num_prompt=100, num_output=4))
    assert times == [1.112, 1.138, 1.149, 1.160]
    run = simulate(deployment, [Request(arrival_s=1.0, num_prompt=100, num_output=4)])
    assert [use.peak_blocks for use in run.workers] == [7, 7]
    latency = run.served[0].latency
    assert (round(latency.ttft_s, 6), round(latency.tpot_s or 0, 6), round(latency.longest_gap_s or 0, 6)) == (0.112, 0.016, 0.026)


def test_look_ahead_makes_a_newcomer_wait_for_one_step_more() -> None:
    """Steps of 11 ms, one of which ends at 55. Who arrives 1.5 ms before that is in the next without look-ahead, and in the one after
    it where the next was planned already."""
    requests = [
        Request(arrival_s=0.0, num_prompt=1, num_output=20),
        Request(arrival_s=0.0535, num_prompt=1, num_output=1),
    ]
    for look_ahead, ahead_s, first in (
        (False, inf, 0.055 + 0.012),
        (True, inf, 0.066 + 0.012),
        (True, 0.002, 0.066 + 0.012),
        (True, 0.001, 0.055 + 0.012),
    ):
        spec = EngineSpec(curve=PLAIN, step_tokens=64, look_ahead=look_ahead, ahead_s=ahead_s)
        [_, second] = times_of(SimulatedDeployment(num_prefill=0, num_decode=1, decode=spec), *requests)
        assert second == [pytest.approx(first, abs=1e-6)]


def test_mixed_steps_have_a_curve_of_their_own() -> None:
    spec = EngineSpec(curve=PLAIN, mixed=StepCurve(fixed_s=0.1, per_row_s=0.0), step_tokens=64)
    [times] = times_of(SimulatedDeployment(num_prefill=0, num_decode=1, decode=spec), Request(arrival_s=0, num_prompt=10, num_output=3))
    assert times == [0.1, 0.111, 0.122]


def test_while_anybody_decodes_steps_with_prompts_are_bounded() -> None:
    """A decode and 9 tokens of a prompt take 20 ms; a bound that leaves room for none lets 4 through all the same."""
    first = Request(arrival_s=0.0, num_prompt=1, num_output=100)
    second = Request(arrival_s=0.1055, num_prompt=18, num_output=1)
    for max_step_s, steps in ((0.0, [0.029]), (0.0205, [0.020, 0.020]), (0.005, [0.015] * 4 + [0.013])):
        spec = EngineSpec(curve=PLAIN, step_tokens=64, max_step_s=max_step_s, min_chunk=4)
        _, [at] = times_of(SimulatedDeployment(num_prefill=0, num_decode=1, decode=spec), first, second)
        assert at == pytest.approx(0.110 + sum(steps), abs=1e-6)


def test_promises_bound_steps_with_prompts() -> None:
    """A decode step takes 11 ms. With a TPOT of 20 the first token leaves 19 for a step, and 8 more for each of the 4 tokens to come; an
    answer with none to come has the 19 alone. A gap of 60 leaves two steps, and does so while a sequence is to come."""
    for promise, num_output, longest in (
        ({"tpot_s": 0.020}, 100, 0.019 + MADE_UP_WITHIN * 0.008),
        ({"tpot_s": 0.020}, 2, 0.019),
        ({"tpot_s": 0.020, "gap_s": 0.060}, 100, 0.060 * FIRST_GAP_SHARE),
    ):
        engine = SimulatedEngine(EngineSpec(curve=PLAIN, **promise))
        assert engine.time_limit(0.0) is None
        coming = SimulatedSequence(num_prompt=10, num_output=num_output, num_uncached=10)
        assert engine.reserve(coming)
        limit = engine.time_limit(0.0)
        assert (None if limit is None else limit.max_step_s) == (pytest.approx(longest) if "gap_s" in promise else None)
        engine.commit(coming, 0.0)
        limit = engine.time_limit(0.0)
        assert limit is not None
        assert limit.max_step_s == pytest.approx(longest)


def test_the_edge_has_a_tail_and_keeps_the_order_of_tokens() -> None:
    spec = EngineSpec(curve=StepCurve(fixed_s=0.05, per_row_s=0.0), step_tokens=64)
    deployment = SimulatedDeployment(num_prefill=0, num_decode=1, decode=spec, edge_s=0.02, edge_tail_s=0.01)
    [served] = simulate(deployment, [Request(arrival_s=0.0, num_prompt=1, num_output=4000)]).served
    late = sorted(time - 0.05 * (i + 1) for i, time in enumerate(served.token_times))
    assert late[2000] == pytest.approx(0.02, abs=0.0003)
    assert late[3960] - late[2000] == pytest.approx(0.01, rel=0.1)
    assert all(later >= earlier for earlier, later in pairwise(served.token_times))


def test_both_roles_at_once_keep_a_rate_that_neither_fixed_roles_nor_aggregated_workers_keep() -> None:
    base = machine_of_preset("h200-llama-3.1-8b-graphs").base
    workload, targets = parse_workload("prompts=2600+-30%,outputs=128+-30%"), LatencyTargets(ttft_ms=500, tpot_ms=10)
    split = base.sized(1, 1)
    aggregated = replace(base, num_prefill=0, num_decode=2, decode=replace(base.decode, step_tokens=256, max_step_s=0.0))
    kept = [
        try_rate(one, workload, 21.5, targets, seconds=30, to_the_end=False).met
        for one in (replace(split, both_roles=True), split, aggregated)
    ]
    assert kept == [True, False, False]


def test_where_one_worker_is_full_another_is_asked() -> None:
    """Seven of eight blocks are the first one's."""
    spec = EngineSpec(curve=PLAIN, num_blocks=8, block_size=4)
    deployment = SimulatedDeployment(num_prefill=1, num_decode=2, prefill=replace(spec, num_blocks=100), decode=spec)
    small = [Request(arrival_s=0.0, num_prompt=4, num_output=8) for _ in range(2)]
    _, second, third = times_of(deployment, Request(arrival_s=0.0, num_prompt=28, num_output=4), *small)
    assert third[0] == second[0], "both prompts are in one step: it waited for nothing"


def test_what_no_worker_could_ever_hold_is_refused() -> None:
    spec = EngineSpec(curve=PLAIN, num_blocks=4, block_size=4)
    with pytest.raises(InvalidRequest, match=r"10 \+ 8"):
        simulate(SimulatedDeployment(num_prefill=0, num_decode=1, decode=spec), [Request(arrival_s=0, num_prompt=10, num_output=8)])


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_waiting_is_that_of_an_m_d_1_queue(load: float) -> None:
    """One prefill worker whose budget holds one prompt is a server of constant time s: a prompt that comes a gap later waits s less that
    gap longer (Lindley), and the mean wait is load · s / (2 (1 - load)) (Pollaczek and Khinchine)."""
    prompt = 64
    spec = EngineSpec(curve=PLAIN, step_tokens=prompt, max_waiting=10**6)
    service = 0.010 + 0.001 * prompt
    deployment = SimulatedDeployment(num_prefill=1, num_decode=1, prefill=spec, decode=spec)
    workload = PlannedWorkload(prompts=Fixed(prompt), outputs=Fixed(1))
    requests = workload.requests(load / service, 40_000 * service / load, seed=3)
    expected, wait = [0.0], 0.0
    for earlier, later in pairwise(requests):
        wait = max(0.0, wait + service - (later.arrival_s - earlier.arrival_s))
        expected.append(wait)
    few = 3_000
    waits = [served.latency.ttft_s - service for served in simulate(deployment, requests[:few]).served]
    assert waits == pytest.approx(expected[:few], abs=1e-9)
    assert sum(expected) / len(expected) == pytest.approx(load * service / (2 * (1 - load)), rel=0.06)


workloads = st.builds(
    PlannedWorkload,
    prompts=st.integers(2, 60).map(lambda n: Uniform(1, n)),
    outputs=st.integers(1, 20).map(lambda n: Uniform(1, n)),
    cached=st.sampled_from((0.0, 0.4)),
    burstiness=st.sampled_from((0.3, 1.0, 4.0)),
)
deployments = st.builds(
    lambda prefill, decode, spec, latency, both: SimulatedDeployment(
        num_prefill=prefill,
        num_decode=decode,
        both_roles=both and prefill > 0,
        prefill=spec,
        decode=spec,
        hand_over=HandOverCost(latency_s=latency, bytes_per_s=1e6, kv_token_bytes=10),
    ),
    st.integers(0, 3),
    st.integers(1, 3),
    st.builds(
        EngineSpec,
        curve=st.just(PLAIN),
        step_tokens=st.sampled_from((16, 64)),
        num_blocks=st.sampled_from((25, 1000)),
        block_size=st.just(4),
        look_ahead=st.booleans(),
        ahead_s=st.sampled_from((0.001, inf)),
        max_step_s=st.sampled_from((0.0, 0.02)),
    ),
    st.sampled_from((0.0, 0.004)),
    st.booleans(),
)


@settings(max_examples=80, deadline=None)
@given(deployments, workloads, st.floats(1.0, 40.0), st.integers(0, 5))
def test_every_request_is_served_whole_in_order_and_no_faster_than_its_steps(deployment, workload, rate, seed) -> None:
    requests = workload.requests(rate, 3.0, seed=seed)
    run = simulate(deployment, requests)
    assert sorted(map(id, requests)) == sorted(id(served.request) for served in run.served)
    for served in run.served:
        times, request = served.token_times, served.request
        assert len(times) == request.num_output
        assert times[0] >= request.arrival_s + 0.010 + 0.001 * request.num_uncached - 1e-9
        assert all(later - earlier >= 0.011 - 1e-9 for earlier, later in pairwise(times))
    for use in run.workers:
        assert 0 <= use.busy <= 1 + 1e-9
        assert use.peak_blocks <= deployment.decode.num_blocks
    again = simulate(deployment, requests)
    assert [s.token_times for s in again.served] == [s.token_times for s in run.served]


def test_goodput_counts_who_keeps_all_targets() -> None:
    """Ten prompts a second come for 10 s, each alone on its worker; the long ones take 110 ms."""
    spec = EngineSpec(curve=PLAIN, step_tokens=512)
    requests = [Request(arrival_s=i / 10, num_prompt=100 if i % 4 == 0 else 20, num_output=2) for i in range(100)]
    deployment = SimulatedDeployment(num_prefill=2, num_decode=1, prefill=spec, decode=spec)
    trial = try_requests(deployment, requests, 10.0, LatencyTargets(ttft_ms=100))
    assert (trial.goodput.num_met, trial.goodput.per_s, trial.met) == (75, 7.5, False)
    stopped = try_requests(deployment, requests, 10.0, LatencyTargets(ttft_ms=100), to_the_end=False)
    assert stopped.run.stopped
    assert not stopped.met
    assert len(stopped.run.served) < 40
    assert try_requests(deployment, requests, 10.0, LatencyTargets(ttft_ms=111)).met
    few = [replace(request, num_prompt=100 if i % 25 == 0 else 20) for i, request in enumerate(requests)]
    kept = try_requests(deployment, few, 10.0, LatencyTargets(ttft_ms=100), to_the_end=False)
    assert (kept.met, kept.run.stopped, kept.goodput.num_met) == (True, False, 96)


def test_rates_are_simulated_for_as_long_as_it_takes_to_judge_them() -> None:
    assert [seconds_for(rate) for rate in (1, 10, 100)] == [600, 120, 60]


@given(st.floats(0.01, 5000), st.floats(0.01, 5000))
def test_the_knee_is_found_from_wherever_the_search_begins(knee: float, guess: float) -> None:
    tried: list[float] = []

    def meets(rate: float) -> bool:
        tried.append(rate)
        return rate <= knee

    found = find_knee(meets, guess=guess, precision=0.01)
    assert found <= knee <= found * 1.0101
    assert len(tried) <= 40


def test_there_may_be_no_knee() -> None:
    assert find_knee(lambda rate: False, guess=10.0) == 0.0
    assert find_knee(lambda rate: rate < 0.1, guess=10.0, precision=0.01) == pytest.approx(0.1, rel=0.01)
