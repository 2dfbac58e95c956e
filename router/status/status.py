"""The status that a router shows, of itself, its workers and the autoscaler's decision: pure functions from records in Redis, and from its
counters, before and now.

    CounterSample   everything that the router has counted so far, taken once a second (router/status/board.py)
    load     two samples: what came between them, as rates and percentiles
    point    a second in the history that charts are drawn from

Percentiles are read off the histograms' buckets as Prometheus does it (histogram_quantile: straight lines within a bucket), so that the
page, `twostep status` and a dashboard say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from prometheus_client.registry import Collector

from router.placing.load_ratio import RoleLoad, WaitingRequests
from router.status.scaling_watch import SeenDecision
from router.workers.registry import Refusal
from twostep.cluster.records import GpuLoad, WorkerRecord
from twostep.metrics.router import RouterGauges, RouterMetrics
from twostep.rpc.v1 import status_pb2

# What GetStatus tells is over so many seconds; of a point in the history, rates are over fewer, and percentiles, which need observations.
WINDOW_S = 60.0
_RATE_S = 5.0
_PERCENTILE_S = 15.0
# A record that cannot be read may say anything.
_MAX_REASON_CHARS = 1000
_MAX_NAME_CHARS = 200
_MAX_SWITCHES = 100
_MAX_GPUS = 64


@dataclass(frozen=True, slots=True)
class Buckets:
    """Observations of a histogram: `counts[i]` of them at most `bounds[i]` and above the bound before, the last ones above all bounds."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)

    def since(self, before: Buckets) -> Buckets:
        """Returns the observations that came since."""
        if before.bounds != self.bounds:
            return self
        return Buckets(self.bounds, tuple(max(0, now - then) for now, then in zip(self.counts, before.counts, strict=True)))

    @property
    def total(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Returns the value below which `share` of the observations lies. 0 without any; the last bound for what is above all of them."""
        rank, below = share * self.total, 0
        if not self.bounds or not self.total:
            return 0.0
        for index, count in enumerate(self.counts[:-1]):
            if count and below + count >= rank:
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * max(0.0, rank - below) / count
            below += count
        return self.bounds[-1]


# By name, what of it is told as rates and as percentiles.
_RATES = ("requests", "failures", "prompt_tokens", "cached_tokens", "generation_tokens", "handed_over", "local", "local_on_prefill")
_TIMES = ("ttft", "itl", "queue", "tpot")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """Since the router's start; `at` in seconds of a clock that does not go back."""

    at: float
    requests: float = 0
    # Of them, those that ended with a status that is not in _NO_FAILURE.
    failures: float = 0
    started: float = 0  # those that got a first token
    prompt_tokens: float = 0
    cached_tokens: float = 0
    generation_tokens: float = 0
    slo: float = 0
    slo_attained: float = 0
    handed_over: float = 0
    local: float = 0
    local_on_prefill: float = 0  # of them, those on workers that are for prefill
    times: Mapping[str, Buckets] = field(default_factory=lambda: dict.fromkeys(_TIMES, Buckets()))


# The client had its answer, went away, or asked for what no system would give it.
_NO_FAILURE = frozenset({"OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED"})


def take_sample(metrics: RouterMetrics, at: float) -> CounterSample:
    """Less than a millisecond, whatever has been counted."""
    requests = counted(metrics.requests, "status")
    paths = counted(metrics.placements, "path")
    times = {name: observed(getattr(metrics, name)) for name in _TIMES}
    return CounterSample(
        at=at,
        requests=sum(requests.values()),
        failures=sum(count for status, count in requests.items() if status not in _NO_FAILURE),
        started=times["ttft"].total,
        generation_tokens=metrics.num_generation_tokens,
        handed_over=paths.get("handed_over", 0.0),
        local=paths.get("local", 0.0),
        local_on_prefill=counted(metrics.placements, "path", worker_role="prefill").get("local", 0.0),
        times=times,
        **{name: sum(counted(getattr(metrics, name), "").values()) for name in ("prompt_tokens", "cached_tokens", "slo", "slo_attained")},
    )


def counted(counter: Collector, label: str, **of: str) -> Mapping[str, float]:
    """Sums up by the values of one label, what has the values `of` other ones."""
    sums: dict[str, float] = {}
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total") and of.items() <= sample.labels.items():
                value = sample.labels.get(label, "")
                sums[value] = sums.get(value, 0.0) + sample.value
    return sums


def observed(histogram: Collector, without: tuple[str, str] = ("", "")) -> Buckets:
    """Returns a histogram over all label values, but for one value of one label."""
    cumulative: dict[float, float] = {}
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket") and sample.labels.get(without[0], "") != (without[1] or None):
                bound = float(sample.labels["le"])
                cumulative[bound] = cumulative.get(bound, 0.0) + sample.value
    bounds = sorted(cumulative)
    if not bounds:
        return Buckets()
    below = [0, *(int(cumulative[bound]) for bound in bounds)]
    return Buckets(tuple(bounds[:-1]), tuple(now - before for before, now in pairwise(below)))


# ---- two samples -----------------------------------------------------------------------------------------------------------


def sample_before(samples: Sequence[CounterSample], seconds: float) -> CounterSample:
    """Returns the latest sample that is at least so much older than the last one, or the oldest there is. `samples` in order, one at
    least."""
    last = samples[-1].at
    for sample in reversed(samples):
        if last - sample.at >= seconds:
            return sample
    return samples[0]


def router_load(before: CounterSample, now: CounterSample, state: RouterGauges, work: RoleLoad) -> status_pb2.RouterLoad:
    """Returns what came between two samples, and the `work` that is there now."""
    fields: dict[str, Any] = {f"{name}_per_s": _rate(before, now, name) for name in _RATES}
    fields |= {f"{name}_s": _percentiles(now.times[name].since(before.times[name])) for name in _TIMES}
    fields |= {name: getattr(state, name) for name in ("num_running", "num_waiting", "num_streams")}
    fields |= {"prompt_work_s": work.prefill_s * work.num_prefill, "answer_work_s": work.decode_s * work.num_decode}
    load = status_pb2.RouterLoad(window_s=now.at - before.at, **fields)
    with_targets = now.slo - before.slo
    if with_targets > 0:
        load.slo_attainment = (now.slo_attained - before.slo_attained) / with_targets
    if work.ratio is not None:
        load.prefill_decode_load_ratio = work.ratio
    return load


def waiting_requests(before: CounterSample, now: CounterSample, num_waiting: int) -> WaitingRequests:
    """Describes them by the lengths that prompts and answers had between two samples."""
    started = now.started - before.started
    if started <= 0:
        return WaitingRequests(num_requests=num_waiting)
    return WaitingRequests(
        num_requests=num_waiting,
        prompt_tokens=(now.prompt_tokens - before.prompt_tokens) / started,
        answer_tokens=(now.generation_tokens - before.generation_tokens) / started,
    )


def _rate(before: CounterSample, now: CounterSample, name: str) -> float:
    elapsed = now.at - before.at
    more: float = getattr(now, name) - getattr(before, name)
    return max(0.0, more) / elapsed if elapsed > 0 else 0.0


def _percentiles(buckets: Buckets) -> status_pb2.Percentiles:
    return status_pb2.Percentiles(p50=buckets.quantile(0.5), p95=buckets.quantile(0.95), p99=buckets.quantile(0.99))


# ---- workers -----------------------------------------------------------------------------------------------------------


def worker_status(record: WorkerRecord) -> status_pb2.WorkerStatus:
    load = record.load
    fields: dict[str, Any] = {name: getattr(record, name) for name in _OF_RECORD} | {name: getattr(load, name) for name in _OF_LOAD}
    fields |= {name: _unsigned(getattr(record, name)) for name in ("num_blocks", "max_num_seqs")}
    fields |= {name: _unsigned(getattr(load, name)) for name in _COUNTS_OF_LOAD}
    return status_pb2.WorkerStatus(
        num_decoding=_unsigned(load.num_running - load.num_handing_over) if record.takes_over else 0,
        engine_pid=_unsigned(record.engine_pid),
        epoch=_unsigned(record.epoch, 64),
        num_queued_tokens=_unsigned(load.num_queued_tokens, 64),
        num_context_tokens=_unsigned(load.num_context_tokens, 64),
        gpus=[_gpu_status(gpu) for gpu in load.gpus[:_MAX_GPUS]],
        **fields,
    )


def _gpu_status(gpu: GpuLoad) -> status_pb2.GpuStatus:
    memory = {name: _unsigned(getattr(gpu, name), 64) for name in ("memory_used", "memory_total")}
    return status_pb2.GpuStatus(utilization=gpu.utilization, **memory)


# Fields of a worker's status that have their names in its record, and in the load that it tells.
_OF_RECORD = (
    "worker_id",
    "role",
    "address",
    "ready",
    "draining",
    "local_prefill",
    "both_roles",
    "transports",
    "version",
    "not_ready_reason",
)
_OF_LOAD = (
    *("queried_tokens_per_s", "hit_tokens_per_s", "fetched_bytes_per_s", "tokens_per_s", "prompt_tokens_per_s"),
    *("kept_per_s", "handed_over_per_s", "taken_over_per_s"),
)
_COUNTS_OF_LOAD = ("num_running", "num_waiting", "num_reserved", "num_held", "num_free_blocks")


def refused_worker(refusal: Refusal) -> status_pb2.RefusedWorker:
    return status_pb2.RefusedWorker(
        worker_id=refusal.worker_id, role=refusal.role, version=refusal.version, reason=refusal.reason[:_MAX_REASON_CHARS]
    )


def _unsigned(value: int, bits: int = 32) -> int:
    """Returns a number that fits its field. A record may say anything: one worker that is wrong must not hide the others."""
    return min(max(0, value), (1 << bits) - 1)


def what_ends(records: Iterable[WorkerRecord], worker_id: str, role: str) -> str:
    """Says what would not be served any more once the worker had `role`; empty: everything still is, or was not before either."""
    workers = [record for record in records if record.serves]
    leaving = next((record for record in workers if record.worker_id == worker_id), None)
    if leaving is None or leaving.role == role:
        return ""
    others = [record for record in workers if record.worker_id != worker_id]
    if any(record.role == leaving.role or record.both_roles for record in others) or leaving.both_roles:
        return ""
    if leaving.role == "decode":
        return f"{worker_id} is the last decode worker: nothing would be served until there is another"
    if any(record.local_prefill for record in others):
        return ""
    return f"{worker_id} is the last prefill worker, and no decode worker computes prompts: nothing would be served until there is another"


# ---- the autoscaler ------------------------------------------------------------------------------------------------------


def scaling_status(seen: SeenDecision, at: float, workers: Sequence[WorkerRecord]) -> status_pb2.Scaling:
    """`at`: now, by the clock of `seen`. A switch is under way until the worker's own record has the role."""
    record = seen.record
    if record is None:
        return status_pb2.Scaling(problem=_text(seen.problem, _MAX_REASON_CHARS))
    serving = [worker.role for worker in workers if worker.serves]
    roles = {worker.worker_id: worker.role for worker in workers}
    under_way = [(worker_id, role) for worker_id, role in sorted(seen.switches.items()) if roles.get(worker_id) != role]
    return status_pb2.Scaling(
        leader=_text(record.leader, _MAX_NAME_CHARS),
        age_s=seen.age_s(at),
        stale=seen.stale(at),
        roles=[
            status_pb2.RoleScaling(
                role=role,
                pods=record.pods[role],
                wanted_pods=record.replicas[role],
                wanted_workers=record.wanted[role],
                serving_workers=serving.count(role),
            )
            for role in ("prefill", "decode")
        ],
        switches=[
            status_pb2.RoleSwitch(worker_id=_text(worker_id, _MAX_NAME_CHARS), role=_text(role, _MAX_NAME_CHARS))
            for worker_id, role in under_way[:_MAX_SWITCHES]
        ],
        reason=_text(record.reason, _MAX_REASON_CHARS),
        limit=_text(record.limit, _MAX_NAME_CHARS),
        problem=_text(seen.problem, _MAX_REASON_CHARS),
    )


def _text(value: object, most: int) -> str:
    """Returns text that can be sent. Half a surrogate pair, which JSON may hold, is nothing that can be sent."""
    return str(value)[:most].encode(errors="replace").decode()


# ---- history -------------------------------------------------------------------------------------------------------------

# Of one second; None: there was nothing to observe.
Point = Mapping[str, float | None]


def point(samples: Sequence[CounterSample], state: RouterGauges, work: RoleLoad, records: Iterable[WorkerRecord], unix_s: float) -> Point:
    """Returns a point of the charts: the last of `samples`, with what came before it. Figures of workers are sums over them as of their
    last heartbeats; shares (of cached tokens, of KV blocks in use) are of what all of them have."""
    now = samples[-1]
    load = router_load(sample_before(samples, _RATE_S), now, state, work)
    before = sample_before(samples, _PERCENTILE_S)
    values: dict[str, float | None] = {
        "unix_s": round(unix_s, 1),
        "num_running": state.num_running,
        "num_waiting": state.num_waiting,
        "slo_attainment": None,
        "prefill_decode_load_ratio": work.ratio,
    }
    values |= {f"{name}_per_s": getattr(load, f"{name}_per_s") for name in _RATES}
    if now.slo > before.slo:
        values["slo_attainment"] = (now.slo_attained - before.slo_attained) / (now.slo - before.slo)
    for name in ("ttft", "tpot", "itl", "queue"):
        buckets = now.times[name].since(before.times[name])
        for label, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            values[f"{name}_s_{label}"] = buckets.quantile(share) if buckets.total else None
    by_role: dict[str, list[WorkerRecord]] = {"prefill": [], "decode": []}
    for record in records:
        by_role.setdefault(record.role, []).append(record)
    workers = [record for group in by_role.values() for record in group]
    queried, hit = (sum(getattr(w.load, f"{kind}_tokens_per_s") for w in workers) for kind in ("queried", "hit"))
    values["hit_rate"] = hit / queried if queried > 0 else None
    values["fetched_bytes_per_s"] = sum(w.load.fetched_bytes_per_s for w in workers)
    for role in ("prefill", "decode"):
        blocks = sum(w.num_blocks for w in by_role[role])
        free = sum(w.load.num_free_blocks for w in by_role[role])
        values[f"{role}_kv_usage"] = max(0.0, 1 - free / blocks) if blocks > 0 else None
        values[f"{role}_workers"] = len(by_role[role])
        values[f"{role}_running"] = sum(w.load.num_running for w in by_role[role])
        values[f"{role}_waiting"] = sum(w.load.num_waiting + w.load.num_reserved for w in by_role[role])
    return {name: _short(value) for name, value in values.items()}


def columns(points: Sequence[Point]) -> Mapping[str, Sequence[float | None]]:
    """Returns the same points in a list by name: a third of the bytes in JSON."""
    names = points[-1] if points else ()
    return {name: [each.get(name) for each in points] for name in names}


def _short(value: float | None) -> float | None:
    """Rounds to four digits, which are enough to draw."""
    if value is None or float(value).is_integer():
        return value
    return float(f"{value:.4g}") if abs(value) < 1e4 else round(value, 1)
