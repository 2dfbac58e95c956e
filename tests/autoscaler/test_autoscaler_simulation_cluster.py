"""The simulated cluster: nothing is lost, the same seed gives the same, and steady loads look as `twostep plan`'s simulator has them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import count
from statistics import median

import pytest

from twostep.autoscaler.model import PolicyConfig, Role
from twostep.lab.plan.goodput import latency_of
from twostep.lab.plan.machine import machine_of
from twostep.lab.plan.memory import worker_memory
from twostep.lab.plan.presets import load_preset
from twostep.lab.plan.simulator import simulate as plan_simulate
from twostep.lab.plan.workload import Request
from twostep.lab.simulation.cluster import Cluster, ClusterConfig
from twostep.lab.simulation.hardware import Hardware, hardware_of
from twostep.lab.simulation.outcome import Ledger, most_reversals, recovery
from twostep.lab.simulation.run import Setting, simulate
from twostep.lab.simulation.scalers import FixedFleet
from twostep.lab.simulation.traces import Curve, Loss, Requests, Trace, requests

PRESET = "h200-llama-3.1-8b"
POLICY = PolicyConfig(ttft_ms=500, tpot_ms=10)


@cache
def hardware() -> Hardware:
    return hardware_of(PRESET)


def steady(rate: float, prompt: float, output: float, seconds: float, *losses: Loss) -> Trace:
    level = [Curve(((0.0, value),)) for value in (rate, prompt, output)]
    return Trace(name="steady", seconds=seconds, rate=level[0], prompts=level[1], outputs=level[2], losses=losses)


class Watched(Ledger):
    """Remembers when requests ended."""

    def __init__(self, found: Requests) -> None:
        super().__init__(found, ttft_ms=500, tpot_ms=10)
        self.ends: dict[int, float] = {}

    def ended(self, request: int, now: float) -> None:
        self.ends[request] = now
        super().ended(request, now)


def served(found: Requests, replicas: Mapping[Role, int], until: float) -> tuple[Cluster, Watched]:
    ledger = Watched(found)
    cluster = Cluster(ClusterConfig(hardware=hardware()), found, ledger)
    cluster.start_with(replicas)
    cluster.run(until)
    return cluster, ledger


@pytest.mark.parametrize(("num_prefill", "num_decode", "rate", "prompt", "output"), [(3, 1, 30, 2600, 128), (1, 2, 35, 1000, 450)])
def test_steady_loads_as_the_planner_simulates_them(num_prefill: int, num_decode: int, rate: float, prompt: float, output: float) -> None:
    """Step by step there, at the pace of steps here: TTFT and TPOT within 3 %, attainment within 2 points."""
    found = requests(steady(rate, prompt, output, 12), seed=1)
    _, ledger = served(found, {"prefill": num_prefill, "decode": num_decode}, 320)
    ttft = [first - arrival for first, arrival in zip(ledger.firsts, found.arrivals, strict=True)]
    tpot = [(ledger.ends[i] - ledger.firsts[i]) / (found.outputs[i] - 1) for i in range(len(found))]

    preset = load_preset(PRESET)
    assert preset.model is not None
    memory = worker_memory(preset.model, preset.gpu_memory_bytes, runtime_bytes=preset.runtime_bytes)
    deployment = machine_of(preset, preset.model, memory).base.sized(num_prefill, num_decode)
    asked = [
        Request(arrival_s=at, num_prompt=p, num_output=n) for at, p, n in zip(found.arrivals, found.prompts, found.outputs, strict=True)
    ]
    latencies = [latency_of(one) for one in plan_simulate(deployment, asked).served]
    kept = sum(one.ttft_s <= 0.5 and (one.tpot_s or 0) <= 0.01 for one in latencies) / len(latencies)
    assert median(ttft) == pytest.approx(median(one.ttft_s for one in latencies), rel=0.03)
    assert median(tpot) == pytest.approx(median(one.tpot_s for one in latencies if one.tpot_s is not None), rel=0.03)
    assert ledger.kept / len(found) == pytest.approx(kept, abs=0.02)


def test_every_request_ends_or_is_refused_whatever_happens_to_workers() -> None:
    found = requests(steady(30, 1500, 150, 60), seed=3)
    ledger = Watched(found)
    cluster = Cluster(ClusterConfig(hardware=hardware(), cold_start_s=10, drain_s=0.5), found, ledger, seed=3)
    cluster.start_with({"prefill": 3, "decode": 3})
    cluster.plan_losses([Loss(10, "prefill"), Loss(10.5, "decode"), Loss(40, "decode")])
    # Workers go and come all the time, with half a second to drain: sequences move on with what they have.
    for second, prefill, decode in ((5, 2, 2), (15, 1, 4), (25, 4, 1), (35, 2, 2), (50, 3, 3)):
        cluster.at(second, lambda now, n: cluster.scale("prefill", n, now), prefill)
        cluster.at(second, lambda now, n: cluster.scale("decode", n, now), decode)
    for second in (20, 30, 45, 55):
        cluster.at(second, lambda now, _: turn_one(cluster, now))
    cluster.run(400)
    assert ledger.totals.arrived == len(found)
    assert ledger.totals.ended + ledger.totals.refused == len(found)
    assert cluster.num_unfinished == 0
    assert len(ledger.losses) == 3
    for worker in cluster.workers.values():
        side = worker.side
        taken = getattr(side, "taken_tokens", 0)
        assert taken == 0, "a pool that nobody uses is empty"


def turn_one(cluster: Cluster, now: float) -> None:
    """A role switch of the first worker that serves and is not the last of its role."""
    for worker in cluster.workers.values():
        peers = [w for w in cluster.workers.values() if w.serving and w.role == worker.role]
        if worker.serving and len(peers) > 1:
            assert cluster.switch(worker.worker_id, "decode" if worker.role == "prefill" else "prefill", now, drain_s=0.5)
            return


def test_what_nobody_can_hold_is_refused_in_time() -> None:
    found = requests(steady(30, 1500, 150, 20), seed=1)
    config = ClusterConfig(hardware=hardware(), max_waiting=100, max_wait_s=5)
    ledger = Watched(found)
    cluster = Cluster(config, found, ledger)
    cluster.start_with({"prefill": 1, "decode": 1})
    cluster.at(1.0, lambda now, _: cluster.scale("decode", 0, now))
    cluster.at(18.0, lambda now, _: cluster.scale("decode", 1, now))
    cluster.run(300)
    assert ledger.totals.refused > 300
    assert ledger.totals.ended + ledger.totals.refused == len(found)


def test_a_seed_is_a_run() -> None:
    trace = steady(10, 1500, 150, 60, Loss(30, "decode"))
    setting = Setting(cluster=ClusterConfig(hardware=hardware()), policy=POLICY)
    fleet = FixedFleet({"prefill": 2, "decode": 2})
    one, again = (simulate(setting, trace, requests(trace, seed=5), fleet, seed=5) for _ in range(2))
    assert one == again
    assert simulate(setting, trace, requests(trace, seed=6), fleet, seed=6) != one


def test_pods_are_paid_from_their_making_to_their_end() -> None:
    found = requests(steady(1, 100, 10, 100), seed=1)
    ledger = Watched(found)
    cluster = Cluster(ClusterConfig(hardware=hardware(), cold_start_s=40), found, ledger)
    cluster.start_with({"prefill": 1, "decode": 1})
    cluster.at(10.0, lambda now, _: cluster.scale("prefill", 3, now))
    cluster.at(20.0, lambda now, _: cluster.scale("prefill", 1, now))  # before they are ready
    cluster.at(100.0, lambda now, _: cluster.pay(now))
    cluster.run(150)
    assert ledger.pod_s == pytest.approx({"prefill": 120.0, "decode": 100.0})


def test_deletion_cost_says_who_goes() -> None:
    found = requests(steady(1, 100, 10, 10), seed=1)
    cluster = Cluster(ClusterConfig(hardware=hardware()), found, Watched(found))
    cluster.start_with({"prefill": 3, "decode": 1})
    names = [worker.worker_id for worker in cluster.workers.values() if worker.owner == "prefill"]
    cluster.scale("prefill", 2, 0.0, victims=(names[1],))
    assert [worker.worker_id for worker in cluster.workers.values() if worker.terminating] == [names[1]]


def test_reversals_are_turns_within_a_window() -> None:
    def turns(*values: int, every_s: float = 60.0) -> int:
        return most_reversals(list(zip(count(0, every_s), values, strict=False)), 180.0)

    assert turns(1, 2, 3, 3, 4) == 0
    assert turns(1, 2, 3, 2, 1) == 1
    assert turns(1, 2, 1, 2, 1) == 3
    assert turns(3, 2, 2, 2, 2, 3, 3, 3, 3, 2) == 1  # turns at 300 and 540 s


def test_recovery_counts_intervals_until_two_are_good() -> None:
    shares = [1.0, 1.0, 0.5, 0.9, 0.96, 0.97, 1.0]
    assert recovery(shares, 0, 0.95) == 0
    assert recovery(shares, 2, 0.95) == 2
    assert recovery([1.0, 0.5, 0.96, 0.5, None, 1.0], 1, 0.95) == 3
    assert recovery([1.0, 0.5, 0.5], 1, 0.95) == 2  # never, as far as there are any
