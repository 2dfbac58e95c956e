"""Measures what hand-overs to this worker really take, for routers that weigh whether KV is to move at all."""

from __future__ import annotations

from twostep.cluster.records import MeasuredHandOver

# The last ten or so count.
_WEIGHT = 0.1


class HandOverMeter:
    """Keeps running means by transport."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[int, float, float]] = {}

    def observe(self, transport: str, seconds: float, num_bytes: int) -> None:
        """One was committed, so long after the prompt's first token."""
        count, mean_s, mean_bytes = self._means.get(transport, (0, 0.0, 0.0))
        weight = max(_WEIGHT, 1 / (count + 1))
        self._means[transport] = count + 1, mean_s + weight * (seconds - mean_s), mean_bytes + weight * (num_bytes - mean_bytes)

    @property
    def means(self) -> tuple[MeasuredHandOver, ...]:
        return tuple(
            MeasuredHandOver(transport=transport, seconds=seconds, num_bytes=num_bytes)
            for transport, (_, seconds, num_bytes) in self._means.items()
        )
