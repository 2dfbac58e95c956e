"""Judges what users felt and what it cost: the ledger that a simulation writes, and what is read from it.

A request counts as kept if its first token came within the TTFT target and its others at the TPOT target or faster, on average; who is
refused or never ends has not been kept. It counts in the interval in which it came.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from twostep.autoscaler.model import ROLES, PolicyConfig, Role
from twostep.lab.simulator.cluster import ClusterObserver, SimulatedRequest

# Intervals in a row that keep the target: then it is back.
_STEADY = 2
# Instants, and the pods that a role was to have from then on.
Asked = list[tuple[float, int]]


@dataclass(slots=True)
class Totals:
    """Sums since the start, of which samplers take differences."""

    arrived: int = 0
    prompt_tokens: int = 0
    prompt_squares: int = 0
    refused: int = 0
    ended: int = 0
    output_tokens: int = 0
    ttft_kept: int = 0
    tpot_kept: int = 0


class RequestLedger(ClusterObserver):
    """Instants in seconds since the start. `edge_s` is what comes on top of the times at the workers."""

    def __init__(self, *, ttft_ms: float, tpot_ms: float, edge_s: float = 0.0) -> None:
        self.totals = Totals()
        self.pod_s: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        self.lost_at: list[float] = []
        self.closed = False  # nothing more is paid
        self.kept = 0
        self._ttft_s, self._tpot_s, self._edge_s = ttft_ms / 1e3, tpot_ms / 1e3, edge_s
        self._came, self._kept = array("d"), array("d")  # arrivals of all requests, and of those that were kept

    def arrived(self, request: SimulatedRequest) -> None:
        totals = self.totals
        totals.arrived += 1
        totals.prompt_tokens += request.num_prompt
        totals.prompt_squares += request.num_prompt**2
        self._came.append(request.arrival_s)

    def ended(self, request: SimulatedRequest, token_times: Sequence[float]) -> None:
        totals, num_output = self.totals, len(token_times)
        ttft_kept = token_times[0] + self._edge_s - request.arrival_s <= self._ttft_s
        tpot_kept = num_output < 2 or (token_times[-1] - token_times[0]) / (num_output - 1) <= self._tpot_s
        totals.ended += 1
        totals.output_tokens += num_output
        totals.ttft_kept += ttft_kept
        totals.tpot_kept += tpot_kept
        if ttft_kept and tpot_kept:
            self.kept += 1
            self._kept.append(request.arrival_s)

    def refused(self, request: SimulatedRequest) -> None:
        self.totals.refused += 1

    def paid(self, role: Role, seconds: float) -> None:
        if not self.closed:
            self.pod_s[role] += seconds

    def kept_shares(self, interval_s: float) -> list[float | None]:
        """Returns the share of the requests that came in each interval which was kept; None: none came."""
        came, kept = (Counter(int(at / interval_s) for at in found) for found in (self._came, self._kept))
        return [kept[i] / came[i] if came[i] else None for i in range(max(came, default=-1) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingOutcome:
    """`reversals`: the most changes of direction of a role's wanted number within one cool-down. `recoveries`: for each loss, intervals
    until attainment was back at the target."""

    name: str
    num_requests: int
    attainment: float
    gpu_hours: float
    reversals: int
    recoveries: tuple[int, ...]
    refused: int


def judge(name: str, ledger: RequestLedger, asked: Mapping[Role, Asked], policy: PolicyConfig) -> ScalingOutcome:
    shares = ledger.kept_shares(policy.interval_s)
    num = ledger.totals.arrived
    return ScalingOutcome(
        name=name,
        num_requests=num,
        attainment=ledger.kept / num if num else 1.0,
        gpu_hours=sum(ledger.pod_s[role] * max(1, policy.pool(role).gpus_per_worker) for role in ROLES) / 3600,
        reversals=max(most_reversals(one, policy.cool_down_s) for one in asked.values()),
        recoveries=tuple(recovery(shares, int(at / policy.interval_s), policy.attainment) for at in ledger.lost_at),
        refused=ledger.totals.refused,
    )


def most_reversals(series: Asked, window_s: float) -> int:
    """The most changes of direction that lie within `window_s`. A change of direction is a step up after a step down, or the other way
    round, however long after it; it happens when the second step does."""
    turns: list[float] = []
    direction = 0
    for (_, before), (at, after) in pairwise(series):
        if after == before:
            continue
        sign = 1 if after > before else -1
        if direction and sign != direction:
            turns.append(at)
        direction = sign
    return max((sum(at <= other < at + window_s for other in turns) for at in turns), default=0)


def recovery(shares: Sequence[float | None], lost_in: int, target: float) -> int:
    """Intervals from that of the loss to the first of two in a row that keep the target: 0 where it was never missed. An interval before
    the loss is not looked at."""
    for start in range(lost_in, len(shares)):
        ahead = shares[start : start + _STEADY]
        if all(share is None or share >= target for share in ahead):
            return start - lost_in
    return len(shares) - lost_in
