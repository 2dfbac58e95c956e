"""What a linear layer has of its checkpoint's quantized layers: filled by loading, then joined to as few products as their formats allow.

q ─┐ same format and inputs: one weight, rows of q, k and v one after the other
k ─┤
v ─┘ another format: a product of its own, its result beside theirs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from twostep.checkpoint.linear_format import LinearFormat
from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.quantized_weight import QuantizedWeight


class QuantizedPart:
    """One quantized layer of the checkpoint, or a rank's part of it. `stored`: the files hold it in this format; else it is put into it
    as it is read."""

    def __init__(self, format: LinearFormat, *, stored: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.format = format
        self.stored = stored
        self.dtype = dtype  # of the model
        self.device = device
        self.activations = None if format.activations is None else InputQuantizer(format.activations, device)
        self._weight: LoadedWeight | None = None

    def fill(self, weight: QuantizedWeight | torch.Tensor) -> None:
        """Takes what was loaded; dense [rows, columns] where the columns' groups are in no order that a product knows."""
        activations = self.activations
        if isinstance(weight, QuantizedWeight):
            self._weight = LoadedWeight(replace(weight, activations=activations), activations)
        else:
            self._weight = LoadedWeight(weight, activations)

    def take(self) -> LoadedWeight:
        """Returns what was filled in, and lets go of it."""
        assert self._weight is not None
        weight, self._weight = self._weight, None
        return weight


@dataclass(frozen=True, slots=True, eq=False)
class LoadedWeight:
    """A weight, and how its product rounds the input, which a QuantizedWeight says itself, too."""

    weight: QuantizedWeight | torch.Tensor
    activations: InputQuantizer | None


def joined(weights: Sequence[LoadedWeight]) -> list[LoadedWeight]:
    """Neighbours that can be one product as one weight, the rows of each behind those of the one before. Waits for the device."""
    runs: list[list[LoadedWeight]] = []
    for weight in weights:
        if runs and _are_joinable(runs[-1][-1], weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [_as_one(run) for run in runs]


def _are_joinable(one: LoadedWeight, other: LoadedWeight) -> bool:
    if one.activations is not other.activations and (one.activations is None or not one.activations.is_same_as(other.activations)):
        return False
    a, b = one.weight, other.weight
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return (a.values.dtype, a.group, a.float4) == (b.values.dtype, b.group, b.float4)


def _as_one(run: Sequence[LoadedWeight]) -> LoadedWeight:
    if len(run) == 1:
        return run[0]
    dense = [each.weight for each in run if isinstance(each.weight, torch.Tensor)]
    if dense:
        return LoadedWeight(torch.cat(dense), run[0].activations)
    parts = [each.weight for each in run if isinstance(each.weight, QuantizedWeight)]
    # A block of rows must not reach from one part into the next.
    heights = {part.block_rows for part in parts}
    height = parts[0].block_rows
    if len(heights) > 1 or any(part.shape[0] % height for part in parts[:-1]):
        parts = [by_rows(part) for part in parts]
        height = 1
    # float8 has no cat on some devices.
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(parts[0].values.dtype)
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_zeros(part) for part in parts])
    scales = torch.cat([part.scales for part in parts])
    return LoadedWeight(replace(parts[0], values=values, scales=scales, zeros=zeros, block_rows=height), run[0].activations)


def by_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """The same with scales for each row."""
    if weight.block_rows == 1:
        return weight
    rows = weight.shape[0]
    scales, zeros = (
        None if each is None else each.repeat_interleave(weight.block_rows, 0)[:rows].contiguous() for each in (weight.scales, weight.zeros)
    )
    assert scales is not None
    return replace(weight, scales=scales, zeros=zeros, block_rows=1)


def _zeros(weight: QuantizedWeight) -> torch.Tensor:
    """The zero points, those that go without saying written out."""
    if weight.zeros is not None:
        return weight.zeros
    middle = 8 if weight.bits == 4 else 0
    return torch.full(weight.scales.shape, middle, dtype=weight.values.dtype, device=weight.device)
