"""Looks into a step: what its tokens look like as they enter a layer and when the last one is through, for heads that draft from it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch

from twostep.model.kernels.ops import AttentionPlan


class Reads(Enum):
    """Says whose state after the last norm is read."""

    NOTHING = "nobody's"
    SAMPLED = "that of rows whose logits are computed"
    ALL = "everybody's: the last layer is then computed for all rows"


class StepTap(Protocol):
    """Is told of each step what its T tokens look like, while it runs: what it does may be captured."""

    reads: Reads

    def enter(self, layer: int, residual: torch.Tensor) -> None:
        """`residual` [T, hidden_size] is about to enter the layer, which adds to it in place."""
        ...

    def leave(self, plan: AttentionPlan, last: torch.Tensor | None, rows: torch.Tensor | None) -> None:
        """The last layer is through. `last` [R, hidden_size] is what the last norm gave, of `rows` int64 [R] of the T tokens; None: of all
        of them. With nothing to read, there is no `last`."""
        ...


class LayerStates:
    """A StepTap that keeps the residual that enters each of `layers`, numbers from 0 (the embedding itself) to the last layer's. Of one
    step at a time."""

    reads = Reads.NOTHING

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._joined: torch.Tensor | None = None

    def enter(self, layer: int, residual: torch.Tensor) -> None:
        if layer not in self._layers:
            return
        num_rows, size = residual.shape
        if self._joined is None or len(self._joined) != num_rows:
            self._joined = residual.new_empty(num_rows, len(self._layers) * size)
        for place, wanted in enumerate(self._layers):
            if wanted == layer:
                self._joined[:, place * size : (place + 1) * size] = residual

    def leave(self, plan: AttentionPlan, last: torch.Tensor | None, rows: torch.Tensor | None) -> None:
        """Nothing is read."""

    def joined(self) -> torch.Tensor:
        """Returns [T, len(layers) * hidden_size] of the last step, layer by layer in the order that was asked for, and lets go of it."""
        joined, self._joined = self._joined, None
        assert joined is not None
        return joined
