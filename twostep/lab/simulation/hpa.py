"""Kubernetes's HorizontalPodAutoscaler, as far as it decides: the formula with its tolerance and its treatment of pods without a metric,
stabilization and rate policies (pkg/controller/podautoscaler: replica_calculator.go, horizontal.go), with the defaults of `behavior`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one direction. `pods` and `percent` may be added or taken in each `period_s`, whichever is more; None: no such
    policy."""

    stabilization_s: float
    percent: float | None = 100.0
    pods: int | None = None
    period_s: float = 15.0


UP = Rules(stabilization_s=0.0, pods=4)
DOWN = Rules(stabilization_s=300.0)


def pods_metric(current: int, values: Sequence[float], num_missing: int, target: float, tolerance: float = DEFAULT_TOLERANCE) -> int:
    """Replicas for a metric of each pod (type Pods, AverageValue). `values` of those that have one; the `num_missing` others, not ready
    yet, count as idle when it would scale up and as on target when it would scale down. Without any value nothing changes."""
    if not values:
        return current
    ratio = sum(values) / (len(values) * target)
    if not num_missing:
        return current if abs(1 - ratio) <= tolerance else math.ceil(ratio * len(values))
    num = len(values) + num_missing
    total = sum(values) + (target * num_missing if ratio < 1 else 0.0)
    new_ratio = total / (num * target)
    if abs(1 - new_ratio) <= tolerance or (ratio < 1) != (new_ratio < 1):
        return current
    wanted = math.ceil(new_ratio * num)
    return current if (new_ratio < 1 and wanted > current) or (new_ratio > 1 and wanted < current) else wanted


def average_value(current: int, total: float, target: float, tolerance: float = DEFAULT_TOLERANCE) -> int:
    """Replicas for one number of the whole (type External or Object, AverageValue): KEDA's way. From nothing, one for each target."""
    if current and abs(1 - total / (target * current)) <= tolerance:
        return current
    return math.ceil(total / target)


class Hpa:
    """One HPA's memory: what it recommended and did lately. Instants of one clock."""

    def __init__(self, *, least: int, most: int, up: Rules = UP, down: Rules = DOWN) -> None:
        self._least, self._most = least, most
        self._up, self._down = up, down
        self._recommended: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def follow(self, now: float, current: int, wanted: int) -> int:
        """Replicas to have, where the metrics ask for `wanted`."""
        window = max(self._up.stabilization_s, self._down.stabilization_s)
        self._recommended.append((now, wanted))
        while self._recommended[0][0] < now - window:
            self._recommended.popleft()
        # Up to the least that was asked for of late, down to the most.
        low = min(value for at, value in self._recommended if at >= now - self._up.stabilization_s)
        high = max(value for at, value in self._recommended if at >= now - self._down.stabilization_s)
        wanted = min(max(current, low), high)
        wanted = self._paced(now, current, min(max(wanted, self._least), self._most))
        if wanted != current:
            self._changes.append((now, wanted - current))
        return wanted

    def _paced(self, now: float, current: int, wanted: int) -> int:
        longest = max(self._up.period_s, self._down.period_s)
        while self._changes and self._changes[0][0] <= now - longest:
            self._changes.popleft()
        rules = self._up if wanted > current else self._down
        before = current - sum(change for at, change in self._changes if at > now - rules.period_s)
        shares = [] if rules.percent is None else [before * rules.percent / 100]
        steps = shares if rules.pods is None else [*shares, float(rules.pods)]
        if wanted > current:
            return max(current, min(wanted, math.ceil(before + max(steps))))
        return min(current, max(wanted, math.floor(before - max(steps)))) if wanted < current else current
