"""Defines the input and the output of the autoscaler's policy: plain frozen values. Instants are seconds of whatever clock the caller has,
if it does not go back; times are seconds, but for the two targets, which are milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from twostep.errors import InvalidRequest
from twostep.step_curve import StepCurve

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")


def other(role: Role) -> Role:
    return "decode" if role == "prefill" else "prefill"


def longest_start_s(cold_start_s: float) -> float:
    """Returns the seconds after which a pod that was asked for is not thought to come any more."""
    return 2 * cold_start_s + 30.0


# ---- what is seen -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The load that was offered, as a mean over the last `window_s`, summed over all routers.

    `requests_per_s` counts whatever came, requests refused for want of room among it; `refused_per_s` those alone (not what a quota
    refused, or what was no request). Tokens are means per request: `prompt_tokens` of the whole prompt, `cached_tokens` of it found in
    caches, `output_tokens` of the answer. Without a request in the window the means are those of the last one that had some, or 0."""

    requests_per_s: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    refused_per_s: float = 0.0
    queued_requests: int = 0  # that wait in routers now
    # Share of the answers that ended in the window within the target; None: none ended.
    ttft_met: float | None = None
    tpot_met: float | None = None
    # Squared coefficient of variation (variance / mean²) of the uncached tokens of prompts: how unlike they are. 0: all alike.
    prompt_scv: float = 0.5
    # Share of the requests that name a time to their first token: routers refuse these rather than let them come late.
    promised: float = 0.0
    # Routers that have fallen silent without a word that they leave: what is asked of them, if they serve on, is not in here.
    silent_routers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker as it is registered. `role` is the one that it has now, `owner` the role of the Deployment that its pod belongs to: they
    differ after a role switch. None: of neither Deployment; what it does others need not do, and it is left as it is."""

    worker_id: str
    role: Role
    owner: Role | None
    pod_name: str = ""
    ready: bool = True
    draining: bool = False
    can_switch: bool = False
    both_roles: bool = False  # it takes work of either role; `role` is what it is for
    curve: StepCurve | None = None  # None: it has not measured itself
    step_tokens: int = 512
    max_num_seqs: int = 0  # 0: not known, no bound
    num_blocks: int = 0  # 0: not known, no bound
    block_size: int = 16
    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    context_tokens: int = 0
    tokens_per_s: float = 0.0  # that it computes, of prompts and answers
    started_s: float = 0.0  # instant at which it was first seen

    @property
    def serves(self) -> bool:
        return self.ready and not self.draining


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Holds what one decision looks at. `pods`: pods that each Deployment has asked for, registered or not yet; a role that is missing has
    as many as are registered and do not drain."""

    now_s: float
    traffic: Traffic
    workers: tuple[WorkerView, ...] = ()
    pods: Mapping[Role, int] = field(default_factory=dict)


# ---- what is decided ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """This worker is to take the role `to`."""

    worker_id: str
    to: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`prefill` and `decode`: workers wanted in each role, once all that was asked for is there. `replicas`: pods wanted of each
    Deployment, what KEDA is told; a switched worker counts for the Deployment that owns its pod, so that the two sums are equal. `victims`:
    workers to go first where a Deployment is to shrink, least costly first, never more than it is to lose."""

    prefill: int
    decode: int
    replicas: Mapping[Role, int]
    switches: tuple[Switch, ...] = ()
    victims: tuple[str, ...] = ()
    reason: str = ""  # one line for the log
    limit: str = ""  # which bound held it back; "": none
    # What the traffic asks for by itself, without spare, bounds and cool-down: for metrics.
    needed: Mapping[Role, int] = field(default_factory=dict)

    def wanted(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode


# ---- configuration ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The Deployment of one role. `min_workers` 0 lets it go to zero when idle (`scale_to_zero_after_s`); with traffic there is always one
    worker of each role at least. Raises InvalidRequest for numbers that mean nothing."""

    min_workers: int = 1
    max_workers: int = 8
    gpus_per_worker: int = 1
    price_per_gpu_hour: float = 1.0
    cold_start_s: float = 60.0  # from asking for a pod to a worker that is ready

    def __post_init__(self) -> None:
        if not 0 <= self.min_workers <= self.max_workers or self.max_workers < 1:
            raise InvalidRequest(f"min_workers {self.min_workers}, max_workers {self.max_workers}: give 0 <= min <= max and 1 <= max")
        if self.gpus_per_worker < 0:
            raise InvalidRequest(f"gpus_per_worker is 0 or more, not {self.gpus_per_worker}")
        for name in ("price_per_gpu_hour", "cold_start_s"):
            _check_range(name, getattr(self, name), 0.0)

    @property
    def worker_hour(self) -> float:
        """Returns what a worker costs an hour. A worker without a GPU costs as much as one with a single GPU."""
        return max(1, self.gpus_per_worker) * self.price_per_gpu_hour

    @property
    def least(self) -> int:
        """Workers while there is traffic."""
        return max(1, self.min_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Raises InvalidRequest for numbers that mean nothing, or that contradict each other."""

    prefill: PoolConfig = field(default_factory=PoolConfig)
    decode: PoolConfig = field(default_factory=PoolConfig)
    ttft_ms: float
    tpot_ms: float
    attainment: float = 0.95  # share of the answers that are to be within each target
    interval_s: float = 15.0  # between decisions
    window_s: float = 30.0  # that Traffic is a mean over
    cool_down_s: float = 180.0  # for which less must have been enough before anything is taken away; at most one change of direction in it
    hysteresis: float = 0.35  # what is kept must carry so much more load
    surge: int = 4  # workers added, taken away or switched in one decision at most
    spare: int = 1  # workers that may be lost at once: shared by both roles where workers can switch, else of each role
    max_cost: float | None = None  # an hour, of all workers together
    max_workers: int | None = None  # of both roles together
    switching: bool = True  # role switches are allowed
    switch_s: float = 0.1  # what a role switch takes beyond the drain
    drain_s: float = 30.0  # streams have so long before they are migrated
    scale_to_zero_after_s: float = 0.0  # without a request; 0: never
    max_utilization: float = 0.9  # of a prefill worker, and of a decode worker's seats and blocks
    edge_s: float = 0.02  # of a TTFT that is spent outside queue and prefill
    hand_over_s: float = 0.02  # from the first token to the decode worker's first step

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "interval_s", "window_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidRequest(f"{name} is above 0, not {getattr(self, name)}")
        for name in ("cool_down_s", "hysteresis", "switch_s", "drain_s", "scale_to_zero_after_s", "edge_s", "hand_over_s"):
            _check_range(name, getattr(self, name), 0.0)
        if not 0 < self.attainment < 1:
            raise InvalidRequest(f"attainment is a share between 0 and 1, not {self.attainment}")
        if not 0 < self.max_utilization <= 1:
            raise InvalidRequest(f"max_utilization is above 0 and at most 1, not {self.max_utilization}")
        if self.surge < 1 or self.spare < 0:
            raise InvalidRequest(f"surge is 1 or more and spare 0 or more, not {self.surge} and {self.spare}")
        num_least = sum(self.pool(role).least for role in ROLES)
        if self.max_workers is not None and self.max_workers < num_least:
            raise InvalidRequest(
                f"max_workers {self.max_workers} of both roles leaves no room for the least, which are {num_least}; raise it"
            )
        if self.max_cost is not None:
            least = self.cost({role: self.pool(role).least for role in ROLES})
            if not self.max_cost >= least:
                raise InvalidRequest(f"max_cost {self.max_cost} an hour does not pay for the least workers, which cost {least}; raise it")

    def pool(self, role: Role) -> PoolConfig:
        return self.prefill if role == "prefill" else self.decode

    def cost(self, replicas: Mapping[Role, int]) -> float:
        """An hour of so many pods."""
        return sum(replicas[role] * self.pool(role).worker_hour for role in ROLES)

    def affordable(self, replicas: Mapping[Role, int]) -> bool:
        return not self.beyond(replicas)

    def beyond(self, replicas: Mapping[Role, int]) -> str:
        """The bound on both roles together that so many pods are too many for; "": there is none."""
        if self.max_workers is not None and sum(replicas[role] for role in ROLES) > self.max_workers:
            return f"max_workers of both roles: {self.max_workers}"
        return "" if self.max_cost is None or self.cost(replicas) <= self.max_cost * (1 + 1e-9) else "max_cost"


def _check_range(name: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise InvalidRequest(f"{name} is {least:g} or more, not {value}")
