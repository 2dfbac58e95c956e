"""Sizing by step curves: against formulae worked out by hand, and against the planner's simulation of the same workers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_fleet import DECODE, PREFILL, config

from twostep.autoscaler.sizing import (
    OfferedLoad,
    WorkerSpec,
    decode_holds,
    decode_need,
    erlang_c,
    late_share,
    needed,
    own_times_s,
    prefill_need,
    prompt_work_s,
    refused_share,
    seats,
    sequences,
)
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.plan.goodput import try_rate
from twostep.lab.plan.workload import parse_workload
from twostep.lab.simulator.cluster import HandOverCost, SimulatedDeployment
from twostep.lab.simulator.engine import EngineSpec
from twostep.step_curve import StepCurve

CONFIG = config()
PREFILL_SPEC = WorkerSpec(curve=PREFILL, step_tokens=8192)
DECODE_SPEC = WorkerSpec(curve=DECODE, step_tokens=2048, max_num_seqs=256, num_blocks=50_000)


def load(rate: float, prompt: float = 2600.0, output: float = 128.0, cached: float = 0.0, scv: float = 0.09) -> OfferedLoad:
    return OfferedLoad(requests_per_s=rate, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output, prompt_scv=scv)


def test_waiting_is_that_of_the_tables() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)  # M/M/1: the load itself
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4)
    assert erlang_c(3, 3.0) == 1.0
    # One worker, prompts of exponential work (scv 1) that take no time of their own: P(wait > t) = rho exp(-(1 - rho) t / S).
    share = late_share(config(ttft_ms=1000.0, edge_s=0.0), load(4.0, scv=1.0), 0.2, (0.0,), 1)
    assert share == pytest.approx(0.8 * math.exp(-0.2 * 1.0 / 0.2))
    curve = StepCurve(fixed_s=0.01, per_row_s=1e-4)
    assert prompt_work_s(WorkerSpec(curve=curve, step_tokens=1000), load(1.0, prompt=500.0, cached=100.0)) == pytest.approx(0.044)


def test_refusals_are_those_of_erlang_where_nobody_waits_and_what_is_too_much_where_too_many_come() -> None:
    assert refused_share(10, 8.0, 0.0) == pytest.approx(0.1217, abs=1e-4)  # Erlang B, from the tables
    assert refused_share(4, 400.0, 3.0) == pytest.approx(0.99)
    assert refused_share(4, 4000.0, 1e3) == pytest.approx(0.999)
    # One worker at its limit, patience of 3 service times: idle, busy and over in the proportion 1 : 3 : 1.
    assert refused_share(1, 1.0, 3.0) == pytest.approx(1 / 5)
    assert refused_share(0, 1.0, 3.0) == 1.0


@given(st.integers(1, 40), st.floats(0.1, 60.0), st.floats(0.0, 20.0))
def test_fewer_are_refused_by_more_workers_and_by_more_patience(num: int, offered: float, patience: float) -> None:
    share = refused_share(num, offered, patience)
    assert max(0.0, 1 - num / offered) - 1e-9 <= share <= 1.0, "nobody does more than all the time"
    assert refused_share(num + 1, offered, patience) <= share + 1e-9
    assert refused_share(num, offered, patience + 1.0) <= share + 1e-9
    assert refused_share(num, offered * 1.1, patience) >= share - 1e-9


@settings(max_examples=40)
@given(st.floats(1.0, 200.0), st.floats(100.0, 4000.0), st.floats(0.0, 1.0))
def test_requests_that_are_refused_rather_than_late_need_no_more_workers(rate: float, prompt: float, promised: float) -> None:
    waiting, some, refused = (replace(load(rate, prompt), promised=share) for share in (0.0, promised, 1.0))
    need = [prefill_need(CONFIG, PREFILL_SPEC, demand) for demand in (refused, some, waiting)]
    assert need == sorted(need)
    assert need[0] >= rate * prompt_work_s(PREFILL_SPEC, refused) * CONFIG.attainment, "and no fewer than the work takes"


@given(st.floats(1.0, 200.0), st.floats(100.0, 4000.0), st.floats(2.0, 600.0))
def test_workers_of_both_roles_are_as_many_as_the_work_takes(rate: float, prompt: float, output: float) -> None:
    """Never more than apart, with each role's share of the work in whole workers; and no fewer than prompts and tokens take together."""
    specs, demands = {"prefill": PREFILL_SPEC, "decode": DECODE_SPEC}, dict.fromkeys(("prefill", "decode"), load(rate, prompt, output))
    apart, both = (needed(CONFIG, specs, demands, both_roles=both_roles) for both_roles in (False, True))
    assert apart.total == apart.prefill + apart.decode
    assert both.total <= apart.total
    assert both.total - 2 < both.prefill + both.decode <= both.total
    tokens_s = load(rate, prompt, output).decode_per_s * (DECODE.per_sequence_s + DECODE.per_context_s * load(rate, prompt, output).context)
    assert both.total >= rate * prompt_work_s(PREFILL_SPEC, demands["prefill"]) + tokens_s
    more = {role: demand.times(1.5) for role, demand in demands.items()}
    assert needed(CONFIG, specs, more, both_roles=True).total >= both.total


def test_more_of_the_prompt_in_caches_needs_fewer_prefill_workers() -> None:
    assert prefill_need(CONFIG, PREFILL_SPEC, load(60.0)) == 4
    assert prefill_need(CONFIG, PREFILL_SPEC, load(60.0, cached=2000.0)) == 1


def test_prompts_that_are_late_by_themselves_do_not_ask_for_workers_without_end() -> None:
    # 30,000 tokens take 0.9 s alone, and the target is 0.5 s: sized by utilization.
    demand = load(4.0, prompt=30_000.0)
    assert min(own_times_s(PREFILL_SPEC, demand)) > 0.5
    need = prefill_need(CONFIG, PREFILL_SPEC, demand)
    assert need == math.ceil(4.0 * prompt_work_s(PREFILL_SPEC, demand) / CONFIG.max_utilization)


def test_sequences_by_littles_law() -> None:
    # 1000 tokens/s of 4 ms + 0.01 ms a sequence: n = 1000 (0.004 + 0.00001 n), so n = 4 / 0.99.
    curve = StepCurve(fixed_s=0.004, per_row_s=0.0, per_sequence_s=1e-5)
    assert sequences(curve, 1000.0, 0.0) == pytest.approx(4 / 0.99)
    assert sequences(curve, 100_000.0, 0.0) == math.inf
    # Beyond the knee a row costs too.
    bent = StepCurve(fixed_s=0.004, per_row_s=1e-4, knee=10.0)
    many = sequences(bent, 4000.0, 0.0)
    assert many == pytest.approx(4000.0 * (0.004 + 1e-4 * (many - 10.0)))


def test_few_seats_or_blocks_ask_for_more_decode_workers_than_tpot_does() -> None:
    spec = WorkerSpec(max_num_seqs=64, num_blocks=1000, block_size=16)
    assert (seats(spec, 100.0), seats(spec, 992.0), seats(WorkerSpec(), 1e6)) == (64, 16, math.inf)
    assert decode_need(CONFIG, DECODE_SPEC, load(30.0)) == 1
    assert decode_need(CONFIG, replace(DECODE_SPEC, num_blocks=2000), load(30.0)) == 3


def test_tokens_given_now_count_where_answers_that_ended_were_short() -> None:
    growing = OfferedLoad(requests_per_s=60.0, prompt_tokens=1000.0, cached_tokens=0.0, output_tokens=100.0, decoded_per_s=40_000.0)
    assert decode_need(CONFIG, DECODE_SPEC, growing) > decode_need(CONFIG, DECODE_SPEC, load(60.0, prompt=1000.0, output=100.0))


def test_without_load_nobody_is_needed() -> None:
    assert prefill_need(CONFIG, PREFILL_SPEC, load(0.0)) == 0
    assert decode_need(CONFIG, DECODE_SPEC, load(0.0)) == 0
    assert decode_need(CONFIG, DECODE_SPEC, load(5.0, output=1.0)) == 0


def test_without_a_curve_what_a_busy_worker_did_counts() -> None:
    assert prefill_need(CONFIG, WorkerSpec(), load(30.0)) == 1  # nothing is known of it yet
    assert prefill_need(CONFIG, WorkerSpec(tokens_per_s=40_000.0), load(30.0)) == math.ceil(30 * 2600 / (40_000 * 0.85))
    seated = OfferedLoad(requests_per_s=1.0, prompt_tokens=100.0, cached_tokens=0.0, output_tokens=100.0, running=60.0)
    assert decode_need(CONFIG, WorkerSpec(max_num_seqs=32), seated) == 3


rates = st.floats(0.01, 300.0)
lengths = st.floats(1.0, 20_000.0)


@settings(max_examples=40)
@given(rates, st.floats(1.0, 3.0), lengths, st.floats(2.0, 2000.0), st.floats(0.0, 3.0))
def test_needs_grow_with_the_load(rate: float, factor: float, prompt: float, output: float, scv: float) -> None:
    little, much = load(rate, prompt, output, scv=scv), load(rate * factor, prompt, output, scv=scv)
    assert prefill_need(CONFIG, PREFILL_SPEC, little) <= prefill_need(CONFIG, PREFILL_SPEC, much)
    assert decode_need(CONFIG, DECODE_SPEC, little) <= decode_need(CONFIG, DECODE_SPEC, much)


@settings(max_examples=40)
@given(rates, lengths, st.floats(2.0, 2000.0))
def test_the_need_is_the_least_that_holds(rate: float, prompt: float, output: float) -> None:
    demand = load(rate, prompt, output)
    num = decode_need(CONFIG, DECODE_SPEC, demand)
    if num < 4096:
        assert decode_holds(CONFIG, DECODE_SPEC, demand, num)
        assert num == 1 or not decode_holds(CONFIG, DECODE_SPEC, demand, num - 1)


@pytest.mark.parametrize(("rate", "output"), [(30.0, 128), (24.0, 400)])
def test_what_is_sized_keeps_its_targets_in_the_planners_simulation(rate: float, output: int) -> None:
    """And with one worker less of the role that is short it does not, or only just."""
    demand = load(rate, output=float(output))
    need = prefill_need(CONFIG, PREFILL_SPEC, demand), decode_need(CONFIG, DECODE_SPEC, demand)
    engine = EngineSpec(curve=PREFILL, num_blocks=50_000, block_size=16, max_num_seqs=256, step_tokens=8192)
    decode = EngineSpec(curve=DECODE, num_blocks=50_000, block_size=16, max_num_seqs=256, step_tokens=2048)
    base = SimulatedDeployment(
        num_prefill=1, num_decode=1, prefill=engine, decode=decode, hand_over=HandOverCost(latency_s=0.007), edge_s=0.011
    )
    workload = parse_workload(f"prompts=2600+-30%,outputs={output}+-30%")
    targets = LatencyTargets(ttft_ms=CONFIG.ttft_ms, tpot_ms=CONFIG.tpot_ms)
    assert try_rate(base.sized(*need), workload, rate, targets, seconds=20.0).met
    for fewer in ((need[0] - 1, need[1]), (need[0], need[1] - 1)):
        if min(fewer) >= 1:
            assert not try_rate(base.sized(*fewer), workload, rate * 1.1, targets, seconds=20.0, to_the_end=False).met
