"""Keeps what a step's tokens look like half-way: the residual as it enters some of a model's layers, for heads that draft from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LayerStates:
    """Keeps the residual that enters each of `layers`, numbers from 0 (the embedding itself) to the last layer's. Of one step at a time."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._found: dict[int, torch.Tensor] = {}

    def enter(self, layer: int, residual: torch.Tensor) -> None:
        """`residual` [T, hidden_size] is about to enter the layer. It is copied: layers add to it in place."""
        if layer in self._layers:
            self._found[layer] = residual.clone()

    def joined(self) -> torch.Tensor:
        """Returns [T, len(layers) * hidden_size] of the last step, layer by layer in the order that was asked for."""
        return torch.cat([self._found[layer] for layer in self._layers], -1)
