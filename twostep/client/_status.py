"""Defines what `status()` returns: the whole deployment as one router sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twostep.client._types import read_message
from twostep.errors import InternalError
from twostep.rpc.v1 import status_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """A GPU as its driver tells of it, whoever uses it; memory in bytes."""

    utilization: float | None
    """Share of the last second or so in which anything ran there; None: it is not measured."""
    memory_used: int
    memory_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker as of its last heartbeat. Rates are those of the last ten seconds or so."""

    worker_id: str
    role: Literal["prefill", "decode"]
    address: str
    epoch: int
    ready: bool
    draining: bool
    local_prefill: bool
    """It may compute prompts whose answers it decodes."""
    transports: tuple[str, ...]
    num_running: int
    num_waiting: int
    num_reserved: int
    """Requests with blocks whose KV has not come yet."""
    num_held: int
    """Requests whose KV waits to be fetched."""
    num_blocks: int
    num_free_blocks: int
    num_queued_tokens: int
    """Prompt tokens that are there and not yet computed."""
    num_context_tokens: int
    """Tokens of running sequences."""
    max_num_seqs: int
    queried_tokens_per_s: float
    """Prompt tokens looked up in the prefix cache."""
    hit_tokens_per_s: float
    """Those of them found there."""
    fetched_bytes_per_s: float
    """KV taken from prefill workers."""
    tokens_per_s: float
    """Computed, of prompts and answers."""
    version: str = ""
    not_ready_reason: str = ""
    """Why nobody could be served there although it is ready itself; empty otherwise."""
    gpus: tuple[GpuStatus, ...] = ()
    """By rank; empty: a CPU, or the driver does not tell."""
    both_roles: bool = False
    """It takes work of either role; `role` is what it is for."""
    num_decoding: int = 0
    """Of num_running, those whose answers are computed here."""
    prompt_tokens_per_s: float = 0.0
    """Of tokens_per_s, those of prompts."""
    kept_per_s: float = 0.0
    """Sequences whose prompt and answer are both computed here."""
    handed_over_per_s: float = 0.0
    """Those whose KV went to another worker."""
    taken_over_per_s: float = 0.0
    """Those whose KV came from another worker."""
    engine_pid: int = 0
    """Of the process that its engine has to itself, on the worker's host; 0: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedWorker:
    """One that registers and gets no request. `role` and `version` are empty where nothing of it could be read."""

    worker_id: str
    role: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Seconds; 0 if nothing was observed."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad:
    """Describes what the router did over the last `window_s` seconds."""

    window_s: float
    num_running: int
    num_waiting: int
    num_streams: int
    requests_per_s: float
    failures_per_s: float
    """Counts those that got no answer and could have had one: not what clients cancelled, or were refused for what they sent."""
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    """Counts the tokens among prompt_tokens_per_s that were cached."""
    generation_tokens_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    itl_s: Percentiles
    queue_s: Percentiles
    slo_attainment: float | None
    """Gives the share of the requests with targets that kept them; None: there were none."""
    handed_over_per_s: float
    """Requests whose KV a prefill worker handed over."""
    local_per_s: float
    """Requests whose KV was kept by the worker that computed the prompt."""
    prefill_decode_load_ratio: float | None
    """Seconds of prompts to compute per worker for prefill, for each second of answers to decode per worker for decode; None: nothing is to
    be done."""
    local_on_prefill_per_s: float = 0.0
    """Of local_per_s, those on workers that are for prefill."""
    prompt_work_s: float = 0.0
    """Seconds that the prompts which are there now would take one worker."""
    answer_work_s: float = 0.0
    """The same of answers, in full batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleScaling:
    """`pods` are those of the role's Deployment as they were thought to be at the decision, those to come included."""

    role: str
    pods: int
    wanted_pods: int
    wanted_workers: int
    """Counts workers by their role: one that has switched is a worker of its role and a pod of the other one's Deployment."""
    serving_workers: int
    """Now, as the router knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSwitch:
    """A worker that was told to take `role` and has not yet."""

    worker_id: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The autoscaler's last decision. Without `roles` none could be read, and `problem` says why."""

    leader: str
    age_s: float
    stale: bool
    """Nobody decides any more."""
    roles: tuple[RoleScaling, ...]
    switches: tuple[RoleSwitch, ...]
    reason: str
    limit: str
    """The bound that held it back, such as "max_cost"; empty: none did."""
    problem: str
    """Why what is decided now cannot be read; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition that has held for as long as the alert rule of its name asks (docs/runbook.md)."""

    name: str
    severity: str
    """ "critical" or "warning"."""
    text: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    router_id: str
    version: str
    model: str
    uptime_s: float
    ready: bool
    """A request could be placed now."""
    draining: bool
    workers: tuple[WorkerStatus, ...]
    load: RouterLoad
    refused: tuple[RefusedWorker, ...] = ()
    scaling: Scaling | None = None
    """None: no autoscaler has decided anything of late."""
    alerts: tuple[Alert, ...] = ()
    """The critical ones first."""


def cluster_status(message: pb.ClusterStatus) -> ClusterStatus:
    for worker in message.workers:
        if worker.role not in ("prefill", "decode"):
            raise InternalError(f"worker {worker.worker_id} has the role {worker.role!r}, unknown to this client; upgrade it")
    return read_message(message, ClusterStatus)
