"""Plans: what is recommended keeps its targets, and nothing cheaper that was searched does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.lengths import Fixed, Uniform
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.plan.goodput import try_rate
from twostep.lab.plan.machine import Machine
from twostep.lab.plan.model import PlannedModel
from twostep.lab.plan.planner import Question, decode_rate, plan_for_rate, plan_for_workers, prompt_work_s
from twostep.lab.plan.report import plan_json, plan_text
from twostep.lab.plan.workload import PlannedWorkload
from twostep.lab.simulator.cluster import HandOverCost, SimulatedDeployment
from twostep.lab.simulator.engine import EngineSpec
from twostep.step_curve import StepCurve

# Prefill of 20,000 tokens/s beyond 5 ms a step; a decode step of 5 ms and 0.05 for each sequence.
CURVE = StepCurve(fixed_s=0.005, per_row_s=5e-5, per_sequence_s=0.0)
SPEC = EngineSpec(curve=CURVE, step_tokens=1024, num_blocks=4000)
BASE = SimulatedDeployment(num_prefill=1, num_decode=1, prefill=SPEC, decode=SPEC, hand_over=HandOverCost(latency_s=0.002))
SECONDS = 4.0
WORKLOAD = PlannedWorkload(prompts=Uniform(150, 450), outputs=Uniform(5, 15))


def question(targets: LatencyTargets, **changes: object) -> Question:
    asked = Question(base=BASE, workload=WORKLOAD, targets=targets, budgets=(256, 1024), fixed_roles=True, seconds=SECONDS)
    return replace(asked, **changes)


@settings(max_examples=8, deadline=None)
@given(
    st.floats(10, 60),
    st.sampled_from(
        (LatencyTargets(ttft_ms=100, tpot_ms=10), LatencyTargets(ttft_ms=200, gap_ms=15), LatencyTargets(ttft_ms=150, tpot_ms=30))
    ),
    st.sampled_from(((1.0, 1.0), (3.0, 1.0), (1.0, 2.5))),
)
def test_the_plan_keeps_its_targets_and_no_cheaper_one_does(rate: float, targets: LatencyTargets, prices: tuple[float, float]) -> None:
    asked = question(targets, prefill_hour=prices[0], decode_hour=prices[1])
    shares: list[float] = []
    plan = plan_for_rate(asked, rate, lambda _, share: shares.append(share))
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] <= 1
    for option in (plan.disaggregated, plan.aggregated):
        if option is not None:
            assert try_rate(option.deployment, WORKLOAD, rate, targets, seconds=SECONDS).met
            assert option.goodput >= rate
            assert option.hour == asked.hour(option.deployment)
    best = plan.best
    assert best.hour == min(o.hour for o in (plan.disaggregated, plan.aggregated) if o is not None)
    pair = plan.disaggregated
    if pair is not None:
        for num_prefill in range(1, pair.deployment.num_prefill + 2):
            for num_decode in range(1, pair.deployment.num_decode + 2):
                cheaper = BASE.sized(num_prefill, num_decode)
                if asked.hour(cheaper) < pair.hour - 1e-9:
                    assert not try_rate(cheaper, WORKLOAD, rate, targets, seconds=SECONDS, to_the_end=False).met, cheaper.name
    if plan.aggregated is not None:
        for budget in asked.budgets:
            for num_workers in range(1, plan.aggregated.deployment.num_workers):
                cheaper = asked.aggregated(budget, num_workers)
                assert not try_rate(cheaper, WORKLOAD, rate, targets, seconds=SECONDS, to_the_end=False).met, cheaper.name


def test_of_some_workers_the_best_split_is_found() -> None:
    """Prompts of 600 tokens take 30 ms and more of a prefill worker, answers of 4 tokens next to nothing of a decode worker."""
    workload = PlannedWorkload(prompts=Fixed(600), outputs=Fixed(4))
    targets = LatencyTargets(ttft_ms=300, gap_ms=20)
    shares: list[float] = []
    plan = plan_for_workers(question(targets, workload=workload), 4, lambda _, share: shares.append(share))
    assert shares == sorted(shares), "progress does not go back"
    assert shares[0] == 0
    assert 0.5 < shares[-1] <= 1
    assert plan.disaggregated is not None
    assert plan.disaggregated.deployment.num_prefill == 3
    rates = dict.fromkeys((1, 2), 1.02 * plan.disaggregated.goodput)
    assert not any(try_rate(BASE.sized(p, 4 - p), workload, rate, targets, seconds=SECONDS).met for p, rate in rates.items())


def test_a_gap_shorter_than_a_chunk_needs_separate_prefill_workers() -> None:
    """A step with any prompt in it takes 60 ms here, so no stream beside one can keep gaps of 30 ms."""
    mixed = StepCurve(fixed_s=0.060, per_row_s=0.0)
    asked = question(LatencyTargets(ttft_ms=500, gap_ms=30), base=replace(BASE, decode=replace(SPEC, mixed=mixed)))
    plan = plan_for_workers(asked, 4)
    assert plan.disaggregated is not None
    assert plan.best is plan.disaggregated
    assert plan.aggregated is None or (plan.gain is not None and plan.gain > 1)


def test_without_a_gap_target_prompts_beside_decodes_win_where_answers_are_long() -> None:
    """Hardly any prefill: a worker set apart for it is idle."""
    workload = PlannedWorkload(prompts=Fixed(20), outputs=Fixed(60))
    plan = plan_for_workers(question(LatencyTargets(ttft_ms=500, tpot_ms=20), workload=workload), 2)
    assert plan.best is plan.aggregated
    assert plan.gain is not None
    assert plan.gain < 0


@pytest.mark.exhaustive
def test_workers_of_both_roles_are_never_worse_than_aggregated_ones() -> None:
    """Hardly any prefill again: nothing is set apart for it."""
    workload = PlannedWorkload(prompts=Fixed(20), outputs=Fixed(60))
    targets = LatencyTargets(ttft_ms=500, tpot_ms=20)
    plan = plan_for_workers(question(targets, workload=workload, fixed_roles=False), 2)
    assert plan.disaggregated is not None
    assert plan.disaggregated.deployment.both_roles
    assert plan.gain is not None
    assert plan.gain > -0.05
    cheapest = plan_for_rate(question(targets, workload=workload, fixed_roles=False), 1.5 * plan.disaggregated.goodput).disaggregated
    assert cheapest is not None
    assert 2 < cheapest.deployment.num_workers <= 4


def test_states_and_the_curves_of_another_model_are_told() -> None:
    spec = replace(SPEC, num_state_blocks=5)
    base = replace(BASE, prefill=spec, decode=spec, hand_over=replace(BASE.hand_over, state_bytes=5 * 16 * 1024))
    asked = question(LatencyTargets(ttft_ms=500), base=base)
    model = PlannedModel(name="hybrid", num_layers=4, num_kv_heads=2, head_dim=32, weight_bytes=1)
    machine = Machine(name="here", base=base, model=model, memory=None, curves_of="llama")
    plan = plan_for_rate(asked, 1)
    text, raw = plan_text(plan, asked, machine), plan_json(plan, asked, machine)
    assert "measured with llama" in text
    assert "5 blocks = 81,920 bytes" in text
    assert (raw["curves_of"], raw["state_bytes_per_sequence"]) == ("llama", 81920)
    known = plan_text(plan, asked, replace(machine, base=BASE, curves_of=""))
    assert "measured with" not in known
    assert "states" not in known


def test_impossible_targets_are_refused_with_the_reason() -> None:
    with pytest.raises(InvalidRequest, match="TTFT ≤ 5 ms"):
        plan_for_rate(question(LatencyTargets(ttft_ms=5)), 10)
    with pytest.raises(InvalidRequest, match="tpot"):
        plan_for_workers(question(LatencyTargets(tpot_ms=4)), 2)


@given(st.integers(1, 2000), st.integers(1, 200), st.floats(6, 100))
def test_what_arithmetic_rules_out_cannot_be(num_prompt: int, num_output: int, tpot_ms: float) -> None:
    """The bounds grow with what they bound: longer prompts are more work, looser targets allow more."""
    sample = PlannedWorkload(prompts=Fixed(num_prompt), outputs=Fixed(num_output)).sample(3)
    longer = PlannedWorkload(prompts=Fixed(num_prompt + 100), outputs=Fixed(num_output)).sample(3)
    assert 0 < prompt_work_s(SPEC, sample) <= CURVE.prefill_s(num_prompt, 0, SPEC.step_tokens) + 1e-12
    assert prompt_work_s(SPEC, sample) < prompt_work_s(SPEC, longer)
    rate = decode_rate(SPEC, sample, LatencyTargets(tpot_ms=tpot_ms))
    assert rate >= decode_rate(SPEC, sample, LatencyTargets(tpot_ms=tpot_ms / 1.5)) * 0.999
