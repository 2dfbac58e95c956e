"""Makes a ModelRunner one of several ranks: its part of the model, and operations that exchange with the others."""

from __future__ import annotations

import torch

from twostep.model.families.config import ModelConfig
from twostep.model.families.sharding import ModelPart, shard_of
from twostep.model.kernels.ops import Ops
from twostep.model.parallel.group import BackendGroup, Meeting, TensorGroup


class ParallelOps(Ops):
    """The operations of one of several ranks on a CPU: what is added to a residual is this rank's term of a sum, and is summed over the
    ranks first."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(x)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().add_rms_norm(self._group.all_reduce(x), residual, weight, eps)

    def add_normed(self, x: torch.Tensor, residual: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, eps: float) -> torch.Tensor:
        return super().add_normed(self._group.all_reduce(x), residual, w1, w2, eps)

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return super().add_layer_norm(self._group.all_reduce(x), residual, weight, bias, eps)


class Member:
    """Rank `meeting.rank` of several. Belongs to one ModelRunner."""

    def __init__(self, meeting: Meeting, device: torch.device, *, timeout_s: float, one_shot: bool) -> None:
        """Waits for all ranks. `timeout_s`: how long a rank may keep the others waiting in a step. `one_shot`: sums of few tokens may take
        the kernel for them. Raises SetupError."""
        meeting.exchange(b"here")
        self.meeting = meeting
        self._one_shot = one_shot
        self.group: TensorGroup = BackendGroup(meeting, device, timeout_s=timeout_s)

    def part(self, config: ModelConfig) -> ModelPart:
        """Raises SetupError if the model cannot be cut into so many parts."""
        shard = shard_of(config, self.meeting.rank, self.meeting.size)
        return ModelPart(shard=shard, gather=lambda logits: self.group.gather_columns(logits, config.vocab_size))

    def ops(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Ops:
        if device.type == "cpu":
            return ParallelOps(self.group)
        # Only a GPU needs triton, and importing it takes a second.
        from twostep.model.parallel.triton_ops import parallel_triton_ops  # noqa: PLC0415

        return parallel_triton_ops(self.group, config, dtype, device, one_shot=self._one_shot)


def ops_of(device: torch.device) -> Ops:
    """Returns the operations of a device by itself."""
    if device.type == "cpu":
        return Ops()
    from twostep.model.kernels.triton_ops import TritonOps  # noqa: PLC0415

    return TritonOps(device)
