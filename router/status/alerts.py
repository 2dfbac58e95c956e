"""The alerts that a router raises by itself, so that the page and `twostep status` have them where no Prometheus runs: those rules of
helm/files/prometheus/alerts.yaml, by their names and with their bounds, that can be judged by what one router knows. The others need the
metrics of all processes, or hours of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from router.status.status import Buckets, counted, observed
from twostep.cluster.records import WorkerRecord
from twostep.metrics.router import RouterGauges, RouterMetrics
from twostep.rpc.v1 import status_pb2

_SAMPLE_EVERY_S = 15.0
_LONGEST_WINDOW_S = 900.0
MAX_ALERTS = 50
_OWED = ("UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED", "DATA_LOSS", "UNKNOWN")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertCounts:
    """Since the router's start. `errors`: answers that were owed and not given, of `ended` requests that were waited for; `queue`: how long
    those waited that are not meant to."""

    at: float
    ended: float = 0.0
    errors: float = 0.0
    refused: float = 0.0
    migrations: float = 0.0
    queue: Buckets = field(default_factory=Buckets)


def take_counts(metrics: RouterMetrics, at: float) -> AlertCounts:
    requests = counted(metrics.requests, "status")
    return AlertCounts(
        at=at,
        ended=sum(requests.values()) - requests.get("CANCELLED", 0.0),
        errors=sum(requests.get(status, 0.0) for status in _OWED),
        refused=sum(counted(metrics.refused, "").values()),
        migrations=sum(counted(metrics.migrations, "").values()),
        queue=observed(metrics.queue, without=("request_class", "batch")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """All that a router knows at one moment. `counts`: the latest last, one at least; `had_prefill`: there was a prefill worker once;
    `nobody_decides`: there was an autoscaler, and it decides no more."""

    counts: Sequence[AlertCounts]
    workers: Sequence[WorkerRecord]
    gauges: RouterGauges
    had_prefill: bool = False
    nobody_decides: bool = False

    def before(self, seconds: float) -> AlertCounts:
        """Returns the latest counts that are so much older than the last ones, or the oldest there are."""
        last = self.counts[-1].at
        return next((each for each in reversed(self.counts) if last - each.at >= seconds), self.counts[0])


# By what it is true of (a worker; empty: the deployment) a sentence; none: it is not true.
Judge = Callable[[Sight], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class AlertRule:
    """`hold_s`: how long it has to be true."""

    name: str
    severity: str
    hold_s: float
    judge: Judge


def _when(true: bool, text: str) -> Mapping[str, str]:
    return {"": text} if true else {}


def _error_rate(sight: Sight) -> Mapping[str, str]:
    now, before = sight.counts[-1], sight.before(300)
    share = _share(now.errors - before.errors, now.ended - before.ended)
    return _when(share > 0.05, f"{share:.0%} of requests fail")


def _refusals(sight: Sight) -> Mapping[str, str]:
    now, before = sight.counts[-1], sight.before(600)
    share = _share(now.refused - before.refused, now.ended - before.ended)
    return _when(share > 0.2, f"{share:.0%} of requests are refused for want of room or time")


def _queue(sight: Sight) -> Mapping[str, str]:
    waited = sight.counts[-1].queue.since(sight.before(600).queue).quantile(0.95)
    return _when(waited > 10, f"one request in twenty waits {waited:.0f} s before its prompt is computed")


def _migrations(sight: Sight) -> Mapping[str, str]:
    count = sight.counts[-1].migrations - sight.before(900).migrations
    return _when(count > 10, f"{count:.0f} requests had to be begun again within 15 minutes")


def _no_prefill(sight: Sight) -> Mapping[str, str]:
    return _when(sight.had_prefill and not sight.gauges.workers.get("prefill", 0), "no prefill worker takes requests")


def _no_decode(sight: Sight) -> Mapping[str, str]:
    return _when(not sight.gauges.workers.get("decode", 0), "no decode worker takes requests")


def _balance(sight: Sight, low: float, high: float) -> Mapping[str, str]:
    ratio = sight.gauges.load_ratio
    beyond = ratio is not None and low < ratio < high and sight.gauges.num_waiting > 0
    return _when(beyond, f"prefill workers have {ratio or 0:.2g} times the work of decode workers, and requests wait")


def _kv_full(sight: Sight) -> Mapping[str, str]:
    used = {each.worker_id: 1 - each.load.num_free_blocks / each.num_blocks for each in sight.workers if each.num_blocks > 0}
    return {name: f"the KV cache of {name} is {share:.0%} full" for name, share in used.items() if share > 0.95}


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


_INFINITE = float("inf")
RULES = (
    AlertRule("TwostepHighErrorRate", "critical", 300, _error_rate),
    AlertRule("TwostepNoDecodeWorkers", "critical", 60, _no_decode),
    AlertRule("TwostepNoPrefillWorkers", "critical", 120, _no_prefill),
    AlertRule("TwostepRegistryLost", "critical", 60, lambda s: _when(not s.gauges.registry_connected, "this router does not reach Redis")),
    AlertRule(
        "TwostepNoTransport",
        "critical",
        120,
        lambda s: {each.worker_id: f"{each.worker_id}: {each.not_ready_reason}" for each in s.workers if each.not_ready_reason},
    ),
    AlertRule("TwostepManyRefusals", "warning", 600, _refusals),
    AlertRule("TwostepLongQueue", "warning", 600, _queue),
    AlertRule("TwostepMigrations", "warning", 0, _migrations),
    AlertRule(
        "TwostepWorkersRefused",
        "warning",
        120,
        lambda s: _when(s.gauges.num_refused > 0, f"{s.gauges.num_refused} workers register and are given no request"),
    ),
    AlertRule(
        "TwostepWorkerNotReady",
        "warning",
        600,
        lambda s: {each.worker_id: f"{each.worker_id} takes no new work" for each in s.workers if not each.ready or each.draining},
    ),
    AlertRule("TwostepPrefillShort", "warning", 900, lambda s: _balance(s, 3, _INFINITE)),
    AlertRule("TwostepDecodeShort", "warning", 900, lambda s: _balance(s, -_INFINITE, 0.33)),
    AlertRule("TwostepKvCacheFull", "warning", 600, _kv_full),
    AlertRule("TwostepAutoscalerNoLeader", "warning", 120, lambda s: _when(s.nobody_decides, "no autoscaler decides any more")),
)


class AlertWatch:
    """look() once a second. `at`: seconds of a clock that does not go back."""

    def __init__(self, metrics: RouterMetrics, at: float) -> None:
        self._metrics = metrics
        self._counts = deque([take_counts(metrics, at)], maxlen=int(_LONGEST_WINDOW_S / _SAMPLE_EVERY_S) + 2)
        self._since: dict[tuple[str, str], float] = {}
        self._had_prefill = False
        self._true: list[tuple[AlertRule, str, str]] = []

    def look(self, workers: Sequence[WorkerRecord], gauges: RouterGauges, *, nobody_decides: bool, at: float) -> None:
        now = take_counts(self._metrics, at)
        self._had_prefill = self._had_prefill or gauges.workers.get("prefill", 0) > 0
        sight = Sight(
            counts=(*self._counts, now), workers=workers, gauges=gauges, had_prefill=self._had_prefill, nobody_decides=nobody_decides
        )
        self._true = [(rule, subject, text) for rule in RULES for subject, text in rule.judge(sight).items()]
        self._since = {(rule.name, subject): self._since.get((rule.name, subject), at) for rule, subject, _ in self._true}
        if at - self._counts[-1].at >= _SAMPLE_EVERY_S:
            self._counts.append(now)

    def firing(self, at: float) -> list[status_pb2.Alert]:
        """Returns those that have been true for long enough, in the order of RULES, the critical ones first."""
        alerts = []
        for rule, subject, text in self._true:
            age_s = at - self._since[rule.name, subject]
            if age_s >= rule.hold_s:
                alerts.append(status_pb2.Alert(name=rule.name, severity=rule.severity, text=text, age_s=age_s))
        return alerts[:MAX_ALERTS]
