"""Kubernetes's HorizontalPodAutoscaler, as far as it decides: the formula with its tolerance and its treatment of pods without a metric,
stabilization and rate policies (pkg/controller/podautoscaler: replica_calculator.go, horizontal.go), with the defaults of `behavior`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

DEFAULT_TOLERANCE = 0.1
_PERIOD_S = 15.0


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


def average_value(current: int, total: float, tolerance: float = DEFAULT_TOLERANCE) -> int:
    """Replicas for one number of the whole (type External or Object, AverageValue) with a target of 1: KEDA's way."""
    if current and abs(1 - total / current) <= tolerance:
        return current
    return math.ceil(total)


class Hpa:
    """One HPA's memory: what it recommended and did lately. Instants of one clock. Up at once, by 100 % or by `up_pods`, whichever is more,
    in 15 s; down to the most that was recommended within `settle_s`."""

    def __init__(self, *, least: int, most: int, up_pods: int = 4, settle_s: float = 300.0) -> None:
        self._least, self._most, self._up_pods, self._settle_s = least, most, up_pods, settle_s
        self._recommended: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()

    def follow(self, now: float, current: int, wanted: int) -> int:
        """Replicas to have, where the metrics ask for `wanted`."""
        recommended, changes = self._recommended, self._changes
        recommended.append((now, wanted))
        while recommended[0][0] < now - self._settle_s:
            recommended.popleft()
        while changes and changes[0][0] <= now - _PERIOD_S:
            changes.popleft()
        wanted = max(wanted, min(current, max(value for _, value in recommended)))
        wanted = min(max(wanted, self._least), self._most)
        if wanted > current:
            before = current - sum(change for _, change in changes)
            wanted = max(current, min(wanted, before + max(before, self._up_pods)))
        if wanted != current:
            changes.append((now, wanted - current))
        return wanted
