"""Measures what hand-overs to this worker really take, for routers that weigh whether KV is to move at all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from twostep.cluster.records import MeasuredHandOver

# The last ten or so count.
_WEIGHT = 0.1
# For so long. Slow ones keep others from being tried: were they never forgotten, one bad minute would end hand-overs for good.
_FORGOTTEN_AFTER_S = 30.0


@dataclass(slots=True)
class _Mean:
    """The mean of one transport's hand-overs. `count` 0: the first one, which has made connections, is all there was."""

    last_at: float
    count: int = 0
    seconds: float = 0.0
    num_bytes: float = 0.0


class HandOverMeter:
    """Keeps running means by transport."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._means: dict[str, _Mean] = {}

    def observe(self, transport: str, seconds: float, num_bytes: int) -> None:
        """Notes that a hand-over was committed, so long after the prompt's first token."""
        now, mean = self._clock(), self._means.get(transport)
        if mean is None:
            self._means[transport] = _Mean(last_at=now)
            return
        if self._is_old(mean):
            mean.count = 0
        mean.last_at, mean.count = now, mean.count + 1
        weight = max(_WEIGHT, 1 / mean.count)
        mean.seconds += weight * (seconds - mean.seconds)
        mean.num_bytes += weight * (num_bytes - mean.num_bytes)

    @property
    def means(self) -> tuple[MeasuredHandOver, ...]:
        """Returns those of late."""
        return tuple(
            MeasuredHandOver(transport=transport, seconds=mean.seconds, num_bytes=mean.num_bytes)
            for transport, mean in self._means.items()
            if mean.count and not self._is_old(mean)
        )

    def _is_old(self, mean: _Mean) -> bool:
        return self._clock() - mean.last_at > _FORGOTTEN_AFTER_S
