"""Says where each tensor of a checkpoint goes in a model's memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of a checkpoint goes. `tensor`, dense, is a view of its final (fused) buffer; it takes the part of the
    checkpoint's tensor of that `shape` that begins at `start` and is as large as `tensor`."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]

    @staticmethod
    def whole(tensor: torch.Tensor) -> Place:
        return Place(tensor, tuple(tensor.shape), (0,) * tensor.dim())


Places = dict[str, Place]  # by the checkpoint's (Hugging Face) names
