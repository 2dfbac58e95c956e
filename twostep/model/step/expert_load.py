"""How evenly tokens go to a mixture's experts: steps count on the device, and the counts are looked at once in some hundred of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_STEPS = 256


class ExpertLoadMeter:
    """`due` with every step, in the order of their launch; `imbalance` with what it gave, in the same order."""

    def __init__(self, loads: Sequence[torch.Tensor], steps: int = _STEPS) -> None:
        """loads: of each layer with experts int64 [E], how many tokens each has had since the start, rows that pad a captured step
        included; read every so many `steps`."""
        self._loads = loads
        self._steps = steps
        self._launched = 0
        self._seen: torch.Tensor | None = None

    def due(self) -> torch.Tensor | None:
        """Returns int64 [layers, E], on the device, to be copied to the host; None: not with this step."""
        if not self._loads:
            return None
        self._launched += 1
        return torch.stack(list(self._loads)) if self._launched % self._steps == 0 else None

    def imbalance(self, counts: torch.Tensor) -> float:
        """Returns how many times the mean of its layer the busiest expert has had since the last call, in the layer where that is most:
        1 is even. `counts` are on the host."""
        since = counts if self._seen is None else counts - self._seen
        self._seen = counts
        mean = since.double().mean(1)
        return float((since.amax(1) / mean.clamp(min=1e-9)).max())
