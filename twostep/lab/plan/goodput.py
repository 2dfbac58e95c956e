"""Simulates a deployment and judges what users feel, by the definitions of `twostep bench serve` (docs/benchmarking.md), and the rate at
which too many of them would feel too much."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from twostep.errors import InvalidRequest, SetupError
from twostep.extras import install
from twostep.lab.bench.serve.metrics import Goodput, Latency, LatencyTargets, goodput, latency_of_times
from twostep.lab.bench.serve.sweep import Search, Tried, knee
from twostep.lab.plan.workload import PlannedWorkload
from twostep.lab.simulator.cluster import (
    ClusterObserver,
    HandOverCost,
    PlacementRule,
    SimulatedCluster,
    SimulatedDeployment,
    SimulatedRequest,
    SimulatedWorker,
    shortest_ttft,
)

# Share of the requests that must keep all targets, and the least time over which they must.
SHARE = 0.95
LEAST_SECONDS = 60.0
# So that a share of 0.95 is known to about 0.6 %.
LEAST_REQUESTS = 1200
_LONGEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request and when each of its tokens was at the client, in seconds since the start."""

    request: SimulatedRequest
    token_times: Sequence[float]

    @property
    def latency(self) -> Latency:
        times = self.token_times
        return latency_of_times(times, num_tokens=len(times), sent_s=self.request.arrival_s, ended_s=times[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """How a worker was used. `busy` is the share of the time until the last token; `decodes` how many sequences decoded in its steps, on
    average over the time they took; `peak_blocks` the most KV blocks that were owned at once."""

    role: str
    busy: float
    decodes: float
    peak_decodes: int
    peak_blocks: int
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRun:
    """`served` in order of their ends. `stopped`: enough was seen, and the rest is missing."""

    served: Sequence[ServedRequest]
    workers: Sequence[WorkerUse]
    stopped: bool


def simulate(
    deployment: SimulatedDeployment,
    requests: Sequence[SimulatedRequest],
    *,
    targets: LatencyTargets | None = None,
    placement: PlacementRule | None = None,
    enough: Callable[[ServedRequest], bool] | None = None,
) -> SimulationRun:
    """Serves `requests`, which are in the order of arrival, to the end, or until `enough`, called with each that is done, returns True.
    `targets`: that each of them carries. `placement` None: the router's own where workers have both roles, else the shortest TTFT.

    Raises InvalidRequest for a request that an empty worker could not hold."""
    served: list[ServedRequest] = []
    at_client = _Edge(deployment.edge_s, deployment.edge_tail_s)

    class CompletionRecorder(ClusterObserver):
        def ended(self, request: SimulatedRequest, token_times: Sequence[float]) -> None:
            served.append(ServedRequest(request, at_client(token_times)))
            cluster.stopped = enough is not None and enough(served[-1])

    targets = targets or LatencyTargets()
    if placement is None:
        placement = routed(targets, deployment.hand_over) if deployment.both_roles else shortest_ttft
    deployment = promising(deployment, targets)
    cluster = SimulatedCluster(deployment, requests, CompletionRecorder(), placement=placement)
    workers = [cluster.add_worker("prefill") for _ in range(deployment.num_prefill)]
    workers += [cluster.add_worker("decode") for _ in range(deployment.num_decode)]
    for engine in (workers[0].engine, workers[-1].engine):
        for request in requests:
            if not engine.fits(request.num_prompt + request.num_output):
                raise InvalidRequest(
                    f"{request.num_prompt} + {request.num_output} tokens do not fit a worker's {engine.spec.num_blocks} KV blocks of "
                    f"{engine.spec.block_size}; give the workers more memory, or shorter prompts"
                )
    seconds = cluster.run()
    assert cluster.stopped or len(served) == len(requests), "requests were lost"
    return SimulationRun(
        served=served,
        workers=[_use(worker, seconds, aggregated=deployment.aggregated) for worker in workers],
        stopped=cluster.stopped,
    )


class _Edge:
    """When tokens are at their clients: each `median_s` later than at the worker, or later still, with an exponential tail whose 99th
    percentile is `tail_s` above the median; and none before the one before it."""

    def __init__(self, median_s: float, tail_s: float) -> None:
        self._rate = math.log(50) / tail_s if tail_s else 0.0
        self._least_s = median_s - (math.log(2) / self._rate if tail_s else 0.0)
        self._late = random.Random("edge")

    def __call__(self, token_times: Sequence[float]) -> Sequence[float]:
        if not self._rate:
            return [time + self._least_s for time in token_times] if self._least_s else token_times
        times: list[float] = []
        last = 0.0
        for time in token_times:
            last = max(last, time + self._least_s + self._late.expovariate(self._rate))
            times.append(last)
        return times


def routed(targets: LatencyTargets, hand_over: HandOverCost, *, refusing: bool = False, both_roles: bool = True) -> PlacementRule:
    """The router's placement. `refusing`: it refuses whoever would miss the targets; `both_roles`: of the workers. Raises
    SetupError where the router's packages are not installed."""
    try:
        # Deployments of fixed roles are planned without them.
        from twostep.lab.simulator.routed import RoutedPlacement  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SetupError(
            f"the router's placement needs the package {error.name}, which this installation lacks; {install('router')}; "
            "twostep plan --fixed-roles does without"
        ) from error
    return RoutedPlacement(targets, hand_over, refusing=refusing, both_roles=both_roles)


def promising(deployment: SimulatedDeployment, targets: LatencyTargets) -> SimulatedDeployment:
    """The same with workers of both roles that know which targets their sequences have."""
    if not deployment.both_roles:
        return deployment
    decode = replace(deployment.decode, tpot_s=(targets.tpot_ms or 0.0) / 1e3, gap_s=(targets.gap_ms or 0.0) / 1e3)
    return replace(deployment, decode=decode)


def _use(worker: SimulatedWorker, seconds: float, *, aggregated: bool) -> WorkerUse:
    engine = worker.engine
    return WorkerUse(
        role="aggregated" if aggregated else worker.role,
        busy=engine.busy_s / seconds if seconds else 0.0,
        decodes=engine.sequence_s / engine.busy_s if engine.busy_s else 0.0,
        peak_decodes=engine.most_decodes,
        peak_blocks=engine.most_blocks,
        num_preemptions=engine.num_preemptions,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One rate tried. `run.stopped`: it was clear before its end that too many requests missed their targets, and `goodput` counts the rest
    as missed."""

    rate: float
    goodput: Goodput
    latencies: Sequence[Latency]
    run: SimulationRun

    @property
    def met(self) -> bool:
        return self.goodput.num_requests > 0 and self.goodput.attainment >= SHARE


def seconds_for(rate: float) -> float:
    """How long a rate is simulated: 60 s, more where that is too few requests to judge by."""
    return min(_LONGEST_SECONDS, max(LEAST_SECONDS, LEAST_REQUESTS / rate))


def try_requests(
    deployment: SimulatedDeployment,
    requests: Sequence[SimulatedRequest],
    seconds: float,
    targets: LatencyTargets,
    *,
    to_the_end: bool = True,
) -> Trial:
    """Serves all `requests`, which came within `seconds`. Not `to_the_end`: only until it is clear that too many missed."""
    latencies: list[Latency] = []
    most_missed = (1 - SHARE) * len(requests)
    num_missed = 0

    def enough(served: ServedRequest) -> bool:
        nonlocal num_missed
        latency = served.latency
        latencies.append(latency)
        num_missed += bool(targets.missed(latency))
        return not to_the_end and num_missed > most_missed

    run = simulate(deployment, requests, targets=targets, enough=enough)
    lost: list[Latency | None] = [None] * (len(requests) - len(latencies))
    judged = goodput([*latencies, *lost], targets, seconds, deployment.num_workers)
    return Trial(rate=len(requests) / seconds, goodput=judged, latencies=latencies, run=run)


def try_rate(
    deployment: SimulatedDeployment,
    workload: PlannedWorkload,
    rate: float,
    targets: LatencyTargets,
    *,
    seed: int = 0,
    seconds: float | None = None,
    to_the_end: bool = True,
) -> Trial:
    """`seconds` of arrivals; None: enough to judge by."""
    seconds = seconds_for(rate) if seconds is None else seconds
    return try_requests(deployment, workload.requests(rate, seconds, seed=seed), seconds, targets, to_the_end=to_the_end)


def find_knee(meets: Callable[[float], bool], *, guess: float, precision: float = 0.01) -> float:
    """The highest rate that meets its targets, to `precision` of itself; 0.0 where none from `guess` down does. Rates below the knee are
    taken to meet them."""
    search = Search(first=guess, resolution=precision, max_points=40, max_halvings=20)
    tried: list[Tried] = []
    while (rate := search.next_rate(tried)) is not None:
        tried.append(Tried(rate, meets(rate)))
    return knee(tried) or 0.0
