"""The HorizontalPodAutoscaler's own reckoning for an external metric with AverageValue, as Kubernetes has it (replica_calculator.go:
GetExternalPerPodMetricReplicas), in thousandths, with both ways in which its versions have compared with the tolerance."""

from __future__ import annotations

import math


def desired(value: float, current: int, *, tolerance: float = 0.1, target: int = 1, one_sided: bool = False) -> int:
    """Pods that it comes to. `value` is the metric as KEDA was told it; `one_sided`: since 1.33, where each side has a tolerance."""
    usage = int(value * 1000)
    ratio = usage / (target * 1000 * current)
    within = 1.0 - tolerance <= ratio <= 1.0 + tolerance if one_sided else abs(1.0 - ratio) <= tolerance
    return current if within else math.ceil(usage / (target * 1000))
