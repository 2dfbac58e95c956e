"""What hosts add, taken from a run's own phases; and the worker that stands for its role."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan_inputs import CURVE, worker_record

from twostep.lab.bench.serve.metrics import Targets
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.plan.compare import HostTime, compare
from twostep.lab.plan.deployment import Deployment, HandOver
from twostep.lab.plan.machine import machine_of_workers
from twostep.lab.plan.overheads import Overheads, overheads_of, with_typical
from twostep.lab.plan.presets import load_preset
from twostep.lab.plan.simulator import simulate
from twostep.lab.plan.virtual_sequence import EngineSpec
from twostep.lab.plan.workload import Request

# No waiting for a step that runs: the decode worker of these tests serves one sequence at a time, or waits less than a step.
SPEC = EngineSpec(curve=CURVE, step_tokens=512)


def record(sent_s: float, edge_s: float, hand_over_s: float, *, prompt: int = 200, queue_s: float = 0.003) -> RequestRecord:
    """A first token after edge, queue and 25 ms of prefill; a second one after the hand-over and a step of 5.1 ms."""
    first = sent_s + edge_s + queue_s + 0.025
    second = first + hand_over_s + 0.0051
    return RequestRecord(
        index=0,
        scheduled_s=sent_s,
        sent_s=sent_s,
        ended_s=second,
        prompt_tokens=prompt,
        max_tokens=2,
        times_s=array("d", [first, second]),
        num_tokens=array("I", [1, 1]),
        phases={"queue_s": queue_s, "prefill_s": 0.025, "fetch_s": hand_over_s / 2, "first_decode_s": 0.0051},
    )


@given(st.floats(0, 0.1), st.floats(1e-4, 0.1), st.floats(0, 0.1))
def test_edge_and_hand_over_are_what_no_step_and_no_queue_explains(edge_s: float, hand_over_s: float, queue_s: float) -> None:
    found = overheads_of(record(7.0, edge_s, hand_over_s, queue_s=queue_s))
    assert found.edge_s == pytest.approx(edge_s, abs=1e-9)
    assert found.hand_over_s == pytest.approx(hand_over_s, abs=1e-9)


def test_what_was_not_told_is_not_known() -> None:
    told = record(0.0, 0.01, 0.02)
    assert overheads_of(replace(told, phases=None)) == Overheads()
    assert overheads_of(replace(told, error="refused")) == Overheads()
    assert told.phases is not None
    # Computed where it decodes: no hand-over.
    local = replace(told, phases={**told.phases, "fetch_s": 0.0})
    assert overheads_of(local) == Overheads(edge_s=overheads_of(told).edge_s)
    bare = Deployment(num_prefill=1, num_decode=1, prefill=SPEC, decode=SPEC, edge_s=0.5)
    assert with_typical(bare, [replace(told, phases=None)]) == bare


def test_medians_take_the_constants_places_and_bytes_are_not_counted_twice() -> None:
    hand_over = HandOver(latency_s=9.0, bytes_per_s=1e9, kv_token_bytes=1e4)
    deployment = Deployment(num_prefill=1, num_decode=1, prefill=SPEC, decode=SPEC, hand_over=hand_over, edge_s=9.0)
    found = with_typical(deployment, [record(0, 0.001, 0.010), record(1, 0.002, 0.012), record(2, 0.050, 0.500)])
    assert found.edge_s == pytest.approx(0.002)
    assert found.hand_over.latency_s == pytest.approx(0.012 - 200 * 1e4 / 1e9)


def test_own_overheads_are_replayed_request_by_request() -> None:
    """Far apart, so that nobody waits: what was measured is found again to the microsecond, though each had another edge and hand-over."""
    deployment = Deployment(num_prefill=1, num_decode=1, prefill=SPEC, decode=SPEC)
    overheads = [(0.001 * i, 0.002 + 0.003 * i) for i in range(12)]
    records = [record(float(i), edge, hand_over, queue_s=0.0) for i, (edge, hand_over) in enumerate(overheads)]
    result = compare(records, deployment, Targets(gap_ms=25.0), host_time=HostTime.OWN)
    assert result.simulated.ttft_s.p50 == pytest.approx(result.measured.ttft_s.p50, abs=1e-6)
    assert result.simulated.longest_gap_s.p99 == pytest.approx(result.measured.longest_gap_s.p99, abs=1e-6)
    assert result.error == pytest.approx(0.0)
    typical = compare(records, deployment, Targets(gap_ms=25.0), host_time=HostTime.MEDIAN)
    assert typical.deployment.edge_s == pytest.approx(0.0055)
    # One hand-over for all: all keep the target, or none does.
    assert typical.simulated.goodput.attainment in (0.0, 1.0)
    assert 0.0 < typical.measured.goodput.attainment < 1.0


def test_a_requests_own_hand_over_does_not_wait_for_the_link_again() -> None:
    slow = HandOver(latency_s=0.0, bytes_per_s=1e6, kv_token_bytes=1e4)
    deployment = Deployment(num_prefill=2, num_decode=1, prefill=SPEC, decode=SPEC, hand_over=slow)
    requests = [Request(arrival_s=0.0, num_prompt=100, num_output=2, hand_over_s=0.01) for _ in range(2)]
    ends = [served.token_times[-1] for served in simulate(deployment, requests).served]
    assert max(ends) < 0.1
    assert max(served.token_times[-1] for served in simulate(deployment, [replace(r, hand_over_s=None) for r in requests]).served) > 2.0


def test_one_curve_gone_wrong_does_not_stand_for_its_role() -> None:
    """Three sound workers, and one whose calibration found no fixed part, before and after them in the alphabet."""
    preset = load_preset("h200-llama-3.1-8b")
    wrong = replace(CURVE, fixed_s=0.0, per_sequence_s=3e-4, per_context_s=4.5e-7)
    for name in ("decode-0", "decode-9"):
        records = [worker_record("decode", worker_id=f"decode-{i}", step_tokens=2048) for i in (1, 2, 3)]
        records.append(worker_record("decode", worker_id=name, curve=wrong, step_tokens=512))
        machine = machine_of_workers(records, preset)
        assert (machine.base.decode.curve, machine.base.decode.step_tokens) == (CURVE, 2048)


def test_workers_that_compute_prompts_launch_as_early_as_prefill_workers() -> None:
    early, late = replace(SPEC, ahead_s=0.024), replace(SPEC, ahead_s=0.003)
    deployment = Deployment(num_prefill=3, num_decode=1, prefill=early, decode=late)
    assert deployment.decode_spec == late
    assert deployment.sized(0, 4).decode_spec == early
    assert deployment.sized(0, 4).sized(3, 1).decode_spec == late
