"""What users felt and what it cost: the ledger that a simulation writes, and what is read from it.

A request counts as kept if its first token came within the TTFT target and its others at the TPOT target or faster, on average; who is
refused or never ends has not been kept. It counts in the interval in which it came.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from twostep.autoscaler.model import ROLES, PolicyConfig, Role
from twostep.lab.simulation.traces import Requests

_KEPT, _MISSED = 1, 2
# Intervals in a row that keep the target: then it is back.
_STEADY = 2


@dataclass(slots=True)
class Totals:
    """Sums since the start, of which samplers take differences."""

    arrived: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    uncached_squares: int = 0
    refused: int = 0
    ended: int = 0
    output_tokens: int = 0
    ttft_kept: int = 0
    tpot_kept: int = 0


class Ledger:
    """Instants in seconds since the start."""

    def __init__(self, requests: Requests, *, ttft_ms: float, tpot_ms: float) -> None:
        self.totals = Totals()
        self.pod_s: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        self.losses: list[tuple[float, Role]] = []
        self.closed = False  # nothing more is paid
        self._requests = requests
        self._ttft_s, self._tpot_s = ttft_ms / 1e3, tpot_ms / 1e3
        self._first = array("d", bytes(8 * len(requests)))
        self._fate = bytearray(len(requests))

    def arrived(self, num_prompt: int, num_cached: int) -> None:
        totals = self.totals
        totals.arrived += 1
        totals.prompt_tokens += num_prompt
        totals.cached_tokens += num_cached
        totals.uncached_squares += (num_prompt - num_cached) ** 2

    def first_token(self, request: int, now: float) -> None:
        self._first[request] = now

    def ended(self, request: int, now: float) -> None:
        totals, num_output = self.totals, self._requests.outputs[request]
        first = self._first[request]
        ttft_kept = first - self._requests.arrivals[request] <= self._ttft_s
        tpot_kept = num_output < 2 or (now - first) / (num_output - 1) <= self._tpot_s
        totals.ended += 1
        totals.output_tokens += num_output
        totals.ttft_kept += ttft_kept
        totals.tpot_kept += tpot_kept
        assert not self._fate[request], "a request ended twice"
        self._fate[request] = _KEPT if ttft_kept and tpot_kept else _MISSED

    def refused(self, request: int) -> None:
        assert not self._fate[request], "a request that had ended was refused"
        self.totals.refused += 1
        self._fate[request] = _MISSED

    def paid(self, role: Role, seconds: float) -> None:
        if not self.closed:
            self.pod_s[role] += seconds

    def lost(self, now: float, role: Role) -> None:
        self.losses.append((now, role))

    def kept_shares(self, interval_s: float) -> list[float | None]:
        """Of the requests that came in each interval, the share that was kept; None: none came."""
        kept: list[int] = []
        came: list[int] = []
        for arrival, fate in zip(self._requests.arrivals, self._fate, strict=True):
            index = int(arrival / interval_s)
            while len(came) <= index:
                came.append(0)
                kept.append(0)
            came[index] += 1
            kept[index] += fate == _KEPT
        return [k / n if n else None for k, n in zip(kept, came, strict=True)]

    @property
    def firsts(self) -> Sequence[float]:
        """Of each request, when its first token came; 0: not yet."""
        return self._first

    @property
    def kept(self) -> int:
        return self._fate.count(_KEPT)


@dataclass(frozen=True, slots=True)
class Moment:
    """One interval as it is drawn: pods asked for and workers that serve, of each role."""

    at_s: float
    requests_per_s: float
    wanted: Mapping[Role, int]
    serving: Mapping[Role, int]
    pods: Mapping[Role, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`reversals`: the most changes of direction of a role's wanted number within one cool-down. `recoveries`: for each loss, intervals
    until attainment was back at the target."""

    name: str
    num_requests: int
    attainment: float
    worst_minute: float
    gpu_hours: float
    cost: float
    mean_gpus: float
    peak_gpus: int
    reversals: int
    num_changes: int
    recoveries: tuple[int, ...]
    refused: int
    kept_shares: Sequence[float | None] = field(default=(), repr=False)
    moments: Sequence[Moment] = field(default=(), repr=False)
    losses: Sequence[tuple[float, Role]] = field(default=(), repr=False)


def judge(name: str, ledger: Ledger, moments: Sequence[Moment], policy: PolicyConfig, seconds: float) -> Outcome:
    shares = ledger.kept_shares(policy.interval_s)
    minutes = [share for share in ledger.kept_shares(60.0) if share is not None]
    num = ledger.totals.arrived
    gpus = {role: max(1, policy.pool(role).gpus_per_worker) for role in ROLES}
    hours = {role: ledger.pod_s[role] / 3600 for role in ROLES}
    series = [[(moment.at_s, moment.wanted[role]) for moment in moments] for role in ROLES]
    return Outcome(
        name=name,
        num_requests=num,
        attainment=ledger.kept / num if num else 1.0,
        worst_minute=min(minutes, default=1.0),
        gpu_hours=sum(hours[role] * gpus[role] for role in ROLES),
        cost=sum(hours[role] * policy.pool(role).worker_hour for role in ROLES),
        mean_gpus=sum(hours[role] * gpus[role] for role in ROLES) * 3600 / seconds,
        peak_gpus=max((sum(moment.pods[role] * gpus[role] for role in ROLES) for moment in moments), default=0),
        reversals=max(most_reversals(one, policy.cool_down_s) for one in series),
        num_changes=sum(a[1] != b[1] for one in series for a, b in pairwise(one)),
        recoveries=tuple(recovery(shares, int(at / policy.interval_s), policy.attainment) for at, _ in ledger.losses),
        refused=ledger.totals.refused,
        kept_shares=shares,
        moments=moments,
        losses=tuple(ledger.losses),
    )


def most_reversals(series: Sequence[tuple[float, int]], window_s: float) -> int:
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
