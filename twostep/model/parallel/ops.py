"""`Ops` of one of several ranks: what is added to a residual is this rank's term of a sum, and is summed over the ranks first."""

from __future__ import annotations

import torch

from twostep.model.kernels.ops import Ops
from twostep.model.parallel.group import TensorGroup


class ParallelOps(Ops):
    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().add_rms_norm(self._group.all_reduce(x), residual, weight, eps)

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return super().add_layer_norm(self._group.all_reduce(x), residual, weight, bias, eps)
