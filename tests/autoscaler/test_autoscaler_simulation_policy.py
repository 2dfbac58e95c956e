"""The joint policy on short simulated traces, beside two HPAs; the full comparison is `make simulate`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from twostep.autoscaler.decision_log import read_decisions
from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import PolicyConfig, PoolConfig
from twostep.autoscaler.policy import decide
from twostep.errors import InvalidRequest
from twostep.lab.simulation.__main__ import main
from twostep.lab.simulation.cluster import ClusterConfig
from twostep.lab.simulation.contestants import contestant, hpa_grid
from twostep.lab.simulation.hardware import hardware_of
from twostep.lab.simulation.outcome import Outcome
from twostep.lab.simulation.run import Setting, simulate
from twostep.lab.simulation.tape import decision_lines
from twostep.lab.simulation.traces import Curve, Loss, Requests, Trace, requests, trace_names, trace_of

# A rise and a fall, long prompts that turn into long answers, and a loss, in 20 minutes; cold starts are shorter to match.
SHORT = Trace(
    name="short",
    seconds=1200,
    rate=Curve(((0, 15), (400, 35), (800, 35), (1200, 15))),
    prompts=Curve(((300, 2800), (900, 1000))),
    outputs=Curve(((300, 120), (900, 450))),
    losses=(Loss(600, "decode"),),
)
POOL = PoolConfig(max_workers=16, cold_start_s=45)
POLICY = PolicyConfig(prefill=POOL, decode=POOL, ttft_ms=500, tpot_ms=10)


@cache
def setting() -> Setting:
    return Setting(cluster=ClusterConfig(hardware=hardware_of("h200-llama-3.1-8b"), cold_start_s=45), policy=POLICY)


@cache
def short_requests(seed: int) -> Requests:
    return requests(SHORT, seed)


def outcome(who: str, seed: int = 2) -> Outcome:
    return simulate(setting(), SHORT, short_requests(seed), contestant(who, POLICY), seed=seed)


def test_the_joint_policy_keeps_the_targets_with_fewer_gpus_than_two_hpas() -> None:
    ours, theirs = outcome("joint"), outcome("hpas,prefill=busy:0.5,decode=seats:0.16")
    assert ours.attainment >= POLICY.attainment
    assert ours.attainment >= theirs.attainment - 0.01
    assert ours.gpu_hours <= 0.9 * theirs.gpu_hours
    assert ours.reversals <= 1
    assert ours.recoveries
    assert max(ours.recoveries) <= 2
    assert ours.num_requests == theirs.num_requests > 25_000


def test_a_decision_log_of_a_simulation_is_decided_again_alike() -> None:
    trace = SHORT.shortened(0.25).scaled(15)
    lines = decision_lines(setting(), trace, requests(trace, 1), seed=1)
    memory = Memory()
    logged = list(read_decisions(lines))
    assert len(logged) == 20
    for one in logged:
        step = decide(one.config, memory, one.observation)
        assert step.decision == one.decision
        memory = step.memory


def test_every_trace_has_its_peak_and_ends_at_its_end() -> None:
    for name in trace_names():
        trace = trace_of(name, peak=100)
        assert trace.rate.highest == pytest.approx(100)
        assert all(0 < loss.at_s < trace.seconds - 60 for loss in trace.losses)
        assert trace.rate.points[-1][0] <= trace.seconds
    with pytest.raises(InvalidRequest, match="there are diurnal, burst"):
        trace_of("weekly", peak=1)


def test_requests_follow_the_trace() -> None:
    trace = trace_of("shift", peak=2)
    found = requests(trace, 4)
    assert found == requests(trace, 4)
    assert len(found) == pytest.approx(2 * trace.seconds, rel=0.05)
    assert list(found.arrivals) == sorted(found.arrivals)
    late = [n for at, n in zip(found.arrivals, found.outputs, strict=True) if 2400 < at < 3600]
    assert sum(late) / len(late) == pytest.approx(450, rel=0.1)


def test_the_command_prints_a_table_and_compares(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    flags = ["--trace", "loss", "--peak", "5", "--shorten", "0.05", "--seeds", "1", "--decision-log", str(log)]
    assert main([*flags, "--who", "joint", "fleet,prefill=2,decode=2", "ratio,share=0.5,prefill=busy:0.5,decode=seats:0.16"]) == 0
    printed = capsys.readouterr().out
    assert "| joint policy |" in printed
    assert "| fixed fleet 2 + 2 |" in printed
    assert len(log.read_text().splitlines()) > 10


@pytest.mark.parametrize("text", ["hpas,prefill=busy:0.5", "nobody", "joint,spare=many", "ratio,share=2,prefill=busy:1,decode=seats:1"])
def test_contestants_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        contestant(text, POLICY)


def test_the_grid_reaches_below_30_percent() -> None:
    pairs = list(hpa_grid())
    assert len(pairs) == len(set(pairs)) == 48
    assert any("seats:0.08" in pair for pair in pairs)
