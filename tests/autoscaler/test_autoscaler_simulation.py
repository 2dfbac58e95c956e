"""Simulated pods, traces, and the joint policy on a short one beside two HPAs; the full comparison is `make simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from twostep.autoscaler import replay
from twostep.autoscaler.model import PolicyConfig, PoolConfig, Role
from twostep.errors import InvalidRequest
from twostep.lab.plan.machine import machine_of_preset
from twostep.lab.simulation.__main__ import main
from twostep.lab.simulation.outcome import RequestLedger, ScalingOutcome, most_reversals, recovery
from twostep.lab.simulation.pods import PodCluster
from twostep.lab.simulation.run import simulate
from twostep.lab.simulation.sampling import ClusterSample, Sampler
from twostep.lab.simulation.scalers import contestant
from twostep.lab.simulation.traces import TRACES, LoadTrace, TraceCurve, WorkerLoss, requests
from twostep.lab.simulator.cluster import PlacementChoice, SimulatedDeployment, SimulatedRequest, shortest_ttft

POOL = PoolConfig(max_workers=16, cold_start_s=45)
POLICY = PolicyConfig(prefill=POOL, decode=POOL, ttft_ms=500, tpot_ms=10)
# A rise and a fall, long prompts that turn into long answers, and a loss, in 20 minutes; cold starts are shorter to match.
SHORT = LoadTrace(
    name="short",
    seconds=1200,
    rate=TraceCurve(((0, 15), (400, 35), (800, 35), (1200, 15))),
    prompts=TraceCurve(((300, 2800), (900, 1000))),
    outputs=TraceCurve(((300, 120), (900, 450))),
    losses=(WorkerLoss(600, "decode"),),
)


@cache
def deployment() -> SimulatedDeployment:
    return machine_of_preset("h200-llama-3.1-8b").base


def steady(rate: float, prompt: float, output: float, seconds: float, *losses: WorkerLoss) -> LoadTrace:
    level = [TraceCurve(((0.0, value),)) for value in (rate, prompt, output)]
    return LoadTrace(name="steady", seconds=seconds, rate=level[0], prompts=level[1], outputs=level[2], losses=losses)


def cluster_of(
    found: Sequence[SimulatedRequest], replicas: Mapping[Role, int], *, cold_start_s: float = 90, drain_s: float = 30, **more: Any
) -> PodCluster:
    pool = PoolConfig(max_workers=16, cold_start_s=cold_start_s)
    policy = replace(POLICY, prefill=pool, decode=pool, drain_s=drain_s)
    cluster = PodCluster(deployment(), policy, found, RequestLedger(policy), **more)
    cluster.start_with(replicas)
    return cluster


# ---- the cluster --------------------------------------------------------------------------------------------------------


def test_every_request_ends_or_is_refused_whatever_happens_to_workers() -> None:
    found = requests(steady(30, 1500, 150, 60), seed=3)
    cluster = cluster_of(found, {"prefill": 3, "decode": 3}, seed=3, cold_start_s=10, drain_s=0.5)
    cluster.plan_losses([WorkerLoss(10, "prefill"), WorkerLoss(10.5, "decode"), WorkerLoss(40, "decode")])
    # Workers go and come all the time, with half a second to drain: sequences move on with what they have.
    for second, prefill, decode in ((5, 2, 2), (15, 1, 4), (25, 4, 1), (35, 2, 2), (50, 3, 3)):
        cluster.at(second, lambda now, n: cluster.scale("prefill", n, now), prefill)
        cluster.at(second, lambda now, n: cluster.scale("decode", n, now), decode)
    for second in (20, 30, 45, 55):
        cluster.at(second, lambda now, _: turn_one(cluster, now))
    cluster.run(400)
    totals = cluster.ledger.totals
    assert totals.arrived == len(found)
    assert (totals.ended, totals.refused) == (len(found), 0)
    assert totals.output_tokens == sum(request.num_output for request in found)
    assert cluster.num_waiting == 0
    assert len(cluster.ledger.lost_at) == 3
    for pod in cluster.pods.values():
        assert pod.worker is not None
        assert not pod.worker.running
        assert pod.worker.engine.free_blocks == pod.worker.engine.spec.num_blocks, "a pool that nobody uses is empty"


def turn_one(cluster: PodCluster, now: float) -> None:
    """A role switch of the first worker that serves and is not the last of its role."""
    for worker in cluster.pods.values():
        peers = [w for w in cluster.pods.values() if w.serving and w.role == worker.role]
        if worker.serving and len(peers) > 1:
            assert cluster.switch(worker.worker_id, "decode" if worker.role == "prefill" else "prefill", now, drain_s=0.5)
            return


def test_tokens_of_a_lost_worker_stay_and_its_pod_is_paid_until_then() -> None:
    ended: list[Sequence[float]] = []
    request = SimulatedRequest(arrival_s=0.0, num_prompt=1000, num_output=500)
    cluster = cluster_of([request], {"prefill": 1, "decode": 1}, cold_start_s=1.0)
    cluster.ledger.ended = lambda request, token_times: ended.append(token_times)  # type: ignore[method-assign]
    cluster.plan_losses([WorkerLoss(1.0, "decode")])
    cluster.at(10.0, lambda now, _: cluster.pay(now))
    cluster.run(20)
    [times] = ended
    assert len(times) == 500
    before, after = [at for at in times if at <= 1.0], [at for at in times if at > 5.0]
    assert len(before) > 100
    assert len(before) + len(after) == 500, "nothing between the loss and its detection"
    assert cluster.ledger.pod_s == pytest.approx({"prefill": 10.0, "decode": 1.0 + 9.0})


def test_what_nobody_can_hold_is_refused_in_time() -> None:
    found = requests(steady(30, 1500, 150, 20), seed=1)
    cluster = cluster_of(found, {"prefill": 1, "decode": 1}, max_waiting=100, max_wait_s=5)
    cluster.at(1.0, lambda now, _: cluster.scale("decode", 0, now))
    cluster.at(18.0, lambda now, _: cluster.scale("decode", 1, now))
    cluster.run(300)
    assert cluster.ledger.totals.refused > 300
    assert cluster.ledger.totals.ended + cluster.ledger.totals.refused == len(found)


def test_who_waits_too_long_is_refused() -> None:
    found = requests(steady(30, 1500, 150, 10), seed=1)
    cluster = cluster_of(found, {"prefill": 1, "decode": 0}, max_waiting=10**6, max_wait_s=5)
    cluster.run(30)
    assert cluster.ledger.totals.refused == len(found)


def test_who_would_come_too_late_is_refused_unless_its_answer_has_begun() -> None:
    found = [SimulatedRequest(arrival_s=at, num_prompt=1000, num_output=500) for at in (0.0, 3.0)]

    def one_in_time(request: SimulatedRequest, now: float, *rest: Any) -> PlacementChoice | None:
        choice = shortest_ttft(request, now, *rest)
        return None if choice is None else replace(choice, too_late=now > 0.0)

    cluster = cluster_of(found, {"prefill": 1, "decode": 1}, cold_start_s=1.0, placement=one_in_time)
    cluster.plan_losses([WorkerLoss(1.0, "decode")])
    cluster.run(20)
    totals = cluster.ledger.totals
    assert (totals.ended, totals.refused, totals.output_tokens) == (1, 1, 500), "the first went on elsewhere"


@pytest.mark.parametrize("both_roles", [True, False])
def test_too_many_requests_cost_what_is_too_much_where_routers_refuse(both_roles: bool) -> None:
    """And nearly all of them where they do not."""
    base, trace = machine_of_preset("h200-llama-3.1-8b-graphs").base, steady(60.0, 2000, 50, 20)
    kept = [
        simulate(replace(base, both_roles=both_roles), FIXED, trace, requests(trace, 1), Still(), seed=1, refusing=refusing)
        for refusing in (True, False)
    ]
    refusing, waiting = kept
    assert refusing.attainment > 0.35 > 2 * waiting.attainment
    assert refusing.attainment + refusing.refused / refusing.num_requests > 0.8, "who is not refused is served in time"


def test_a_controller_sees_the_mean_of_its_window() -> None:
    cluster = cluster_of(requests(steady(20, 1500, 150, 90), seed=1), {"prefill": 2, "decode": 2})
    sampler, seen = Sampler(cluster, window_s=30), []
    for second in (15, 30, 45, 60, 75):
        cluster.at(second, lambda now, _: seen.append(sampler.sample(now)))
    cluster.run(80)
    traffic = seen[-1].observation.traffic
    assert traffic.requests_per_s == pytest.approx(20, rel=0.25)
    assert (traffic.prompt_tokens, traffic.output_tokens) == (pytest.approx(1500, rel=0.15), pytest.approx(150, rel=0.15))
    assert traffic.prompt_scv == pytest.approx(0.25, abs=0.1)
    assert all(0 < pod.busy <= 1 + 1e-9 and pod.tokens_per_s > 0 for pods in seen[-1].pods.values() for pod in pods)


# Not as many as the beginning needs.
FIXED = replace(POLICY, prefill=replace(POOL, max_workers=1), decode=replace(POOL, max_workers=1))


class Still:
    """Leaves the fleet as it is."""

    name = "still"

    def act(self, now: float, sample: ClusterSample, cluster: PodCluster) -> None: ...


class Flipping:
    """Has one decode worker more at every second interval."""

    name = "flipping"

    def __init__(self) -> None:
        self.replicas: list[int] = []

    def act(self, now: float, sample: ClusterSample, cluster: PodCluster) -> None:
        self.replicas.append(cluster.replicas["prefill"])
        cluster.scale("decode", 3 + len(self.replicas) % 2, now)


def test_a_simulation_begins_with_what_it_needs_and_counts_turns() -> None:
    firsts = []
    for rate in (5, 40):
        scaler, trace = Flipping(), steady(rate, 2000, 50, 90)
        outcome = simulate(deployment(), POLICY, trace, requests(trace, 1), scaler, seed=1)
        assert outcome.reversals >= 3
        firsts.append(scaler.replicas[0])
    assert firsts[0] == 1 < firsts[1]


def test_pods_are_paid_from_their_making_to_their_end() -> None:
    cluster = cluster_of([], {"prefill": 1, "decode": 1}, cold_start_s=40)
    cluster.at(10.0, lambda now, _: cluster.scale("prefill", 3, now))
    cluster.at(20.0, lambda now, _: cluster.scale("prefill", 1, now))  # before they are ready
    cluster.at(100.0, lambda now, _: cluster.pay(now))
    cluster.run(150)
    assert cluster.ledger.pod_s == pytest.approx({"prefill": 120.0, "decode": 100.0})


def test_deletion_cost_says_who_goes() -> None:
    cluster = cluster_of(requests(steady(1, 100, 10, 10), seed=1), {"prefill": 3, "decode": 1})
    names = [pod.worker_id for pod in cluster.pods.values() if pod.owner == "prefill"]
    cluster.scale("prefill", 2, 0.0, victims=(names[1],))
    assert [pod.worker_id for pod in cluster.pods.values() if pod.owner == "prefill"] == [names[0], names[2]]


def test_reversals_are_turns_within_a_window() -> None:
    def turns(*values: int, every_s: float = 60.0) -> int:
        return most_reversals(list(zip(count(0, every_s), values, strict=False)), 180.0)

    assert turns(1, 2, 3, 3, 4) == 0
    assert turns(1, 2, 3, 2, 1) == 1
    assert turns(1, 2, 1, 2, 1) == 3
    assert turns(3, 2, 2, 2, 2, 3, 3, 3, 3, 2) == 1  # turns at 300 and 540 s


def test_recovery_counts_intervals_until_two_are_good() -> None:
    shares = [1.0, 1.0, 0.5, 0.9, 0.96, 0.97, 1.0]
    assert recovery(shares, 0, 0.95) == recovery([0.95, 0.95], 0, 0.95) == 0
    assert recovery(shares, 2, 0.95) == 2
    assert recovery([1.0, 0.5, 0.96, 0.5, None, 1.0], 1, 0.95) == 3
    assert recovery([1.0, 0.5, 0.5], 1, 0.95) == 2  # never, as far as there are any


# ---- who scales it ------------------------------------------------------------------------------------------------------


@cache
def short_requests(seed: int) -> list[SimulatedRequest]:
    return requests(SHORT, seed)


def outcome(who: str, seed: int = 2) -> ScalingOutcome:
    return simulate(deployment(), POLICY, SHORT, short_requests(seed), contestant(who, POLICY), seed=seed, refusing=False)


@pytest.mark.system
def test_the_joint_policy_keeps_the_targets_with_fewer_gpus_than_two_hpas() -> None:
    ours, theirs = outcome("joint"), outcome("hpas,prefill=busy:0.5,decode=seats:0.16")
    assert ours.attainment >= POLICY.attainment
    assert ours.attainment >= theirs.attainment - 0.01
    assert ours.gpu_hours <= 0.9 * theirs.gpu_hours
    assert ours.reversals <= 1
    assert ours.recoveries
    assert max(ours.recoveries) <= 2
    assert ours.num_requests == theirs.num_requests > 25_000


def test_every_trace_has_its_peak_and_ends_at_its_end() -> None:
    for shape in TRACES.values():
        trace = shape.scaled(100)
        assert trace.rate.highest == pytest.approx(100)
        assert all(0 < loss.at_s < trace.seconds - 60 for loss in trace.losses)
        assert trace.rate.points[-1][0] <= trace.seconds


def test_requests_follow_the_trace_and_a_seed_is_a_run() -> None:
    trace = TRACES["shift"].scaled(2)
    found = requests(trace, 4)
    assert found == requests(trace, 4)
    assert len(found) == pytest.approx(2 * trace.seconds, rel=0.05)
    assert found == sorted(found, key=lambda request: request.arrival_s)
    late = [request.num_output for request in found if 2400 < request.arrival_s < 3600]
    assert sum(late) / len(late) == pytest.approx(450, rel=0.1)
    short, joint = steady(10, 1500, 150, 20, WorkerLoss(10, "decode")), contestant("joint", POLICY)
    one, again, other = (simulate(deployment(), POLICY, short, requests(short, seed), joint, seed=seed) for seed in (5, 5, 6))
    assert one == again != other


def test_the_command_prints_a_table_and_compares(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    flags = ["--trace", "loss", "--peak", "5", "--shorten", "0.05", "--seeds", "1", "--decision-log", str(log)]
    assert main([*flags, "--who", "joint", "joint,spare=0", "hpas,prefill=busy:0.5,decode=seats:0.16"]) == 0
    printed = capsys.readouterr().out
    for name in ("joint policy", "joint policy, spare 0", "HPAs, prefill busy 50%, decode seats 16%"):
        assert f"| {name} |" in printed
    assert len(log.read_text().splitlines()) > 10
    assert replay.main([str(log)]) == 0, "it decides the same again"


@pytest.mark.parametrize(
    "text", ["hpas,prefill=busy:0.5", "fleet,prefill=1,decode=1", "joint,spare=many", "joint,hue=2", "hpas,prefill=busy:0,decode=seats:1"]
)
def test_contestants_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        contestant(text, POLICY)
