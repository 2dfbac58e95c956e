"""A measured run beside its simulation: the same requests at the same times, judged by the same definitions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.metrics import Distribution, Goodput, Latency, Targets, goodput
from twostep.lab.bench.serve.metrics import latency_of as measured_latency
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.plan.deployment import Deployment
from twostep.lab.plan.goodput import SHARE, latency_of
from twostep.lab.plan.overheads import Overheads, overheads_of, with_typical
from twostep.lab.plan.placing import Placement, shortest_ttft
from twostep.lab.plan.simulator import simulate
from twostep.lab.plan.workload import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Measured, or simulated. Times in seconds."""

    goodput: Goodput
    ttft_s: Distribution
    tpot_s: Distribution
    longest_gap_s: Distribution

    @classmethod
    def of(cls, latencies: Sequence[Latency | None], targets: Targets, seconds: float, num_gpus: int) -> Side:
        there = [latency for latency in latencies if latency is not None]
        return cls(
            goodput=goodput(latencies, targets, seconds, num_gpus),
            ttft_s=Distribution.of(x.ttft_s for x in there),
            tpot_s=Distribution.of(x.tpot_s for x in there if x.tpot_s is not None),
            longest_gap_s=Distribution.of(x.longest_gap_s for x in there if x.longest_gap_s is not None),
        )


class HostTime(StrEnum):
    """What hosts add to each simulated request (overheads.py)."""

    DEPLOYMENT = "deployment"  # as the deployment says
    MEDIAN = "median"  # the medians of the measured requests
    OWN = "own"  # what each of them had itself: what is still amiss then comes from steps and queues


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measured rate. `rate` is that of the requests that count: how many came, over the time in which they did."""

    rate: float
    deployment: Deployment
    measured: Side
    simulated: Side

    @property
    def error(self) -> float:
        """Of the simulated goodput, as a share of the measured one."""
        return self.simulated.goodput.per_s / self.measured.goodput.per_s - 1 if self.measured.goodput.per_s else math.nan


def compare(
    records: Iterable[RequestRecord],
    deployment: Deployment,
    targets: Targets,
    *,
    host_time: HostTime = HostTime.DEPLOYMENT,
    placement: Placement = shortest_ttft,
) -> Comparison:
    """`records` of one run at one rate. Those that came while it warmed up are simulated too, and judged by neither side. What was refused
    or failed counts as missed on the measured side, and is simulated with as many tokens as it asked for. Raises InvalidRequest for fewer
    than two that count."""
    sent = sorted((r for r in records if not math.isnan(r.sent_s)), key=lambda r: r.sent_s)
    counted = [r for r in sent if r.measured]
    if len(counted) < 2:
        raise InvalidRequest(f"{len(counted)} measured requests are too few to compare; measure for a minute at least")
    span = counted[-1].sent_s - counted[0].sent_s
    seconds = span * len(counted) / (len(counted) - 1)
    start = sent[0].sent_s
    if host_time is not HostTime.DEPLOYMENT:
        deployment = with_typical(deployment, counted)
    requests = [_request(r, start, own=host_time is HostTime.OWN) for r in sent]
    measured_ids = {id(request) for request, r in zip(requests, sent, strict=True) if r.measured}
    run = simulate(deployment, requests, placement=placement)
    simulated = [latency_of(served) for served in run.served if id(served.request) in measured_ids]
    gpus = deployment.num_workers
    return Comparison(
        rate=len(counted) / seconds,
        deployment=deployment,
        measured=Side.of([measured_latency(r) for r in counted], targets, seconds, gpus),
        simulated=Side.of(simulated, targets, seconds, gpus),
    )


def _request(record: RequestRecord, start_s: float, *, own: bool) -> Request:
    overheads = overheads_of(record) if own else Overheads()
    num_output = record.output_tokens if record.completed and record.output_tokens else record.max_tokens
    return Request(
        arrival_s=record.sent_s - start_s,
        num_prompt=record.prompt_tokens,
        num_output=max(1, num_output),
        num_cached=min(record.cached_tokens, record.prompt_tokens - 1),
        edge_s=overheads.edge_s,
        hand_over_s=overheads.hand_over_s,
    )


def knee_of(points: Iterable[tuple[float, float]], share: float = SHARE) -> float | None:
    """The rate at which the share of requests that kept their targets falls to `share`, on straight lines between (rate, share) points: the
    last such crossing before the first point below. None: it does not happen between the points."""
    ordered = sorted(points)
    if not ordered or ordered[0][1] < share:
        return None
    for (rate, kept), (next_rate, next_kept) in pairwise(ordered):
        if next_kept < share:
            return rate + (next_rate - rate) * (kept - share) / (kept - next_kept)
    return None
