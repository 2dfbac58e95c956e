"""What makes a ModelRunner one of several ranks: its part of the model, and operations that exchange with the others."""

from __future__ import annotations

import torch

from twostep.model.families.config import ModelConfig
from twostep.model.families.sharding import ModelPart, shard_of
from twostep.model.kernels.ops import Ops
from twostep.model.parallel.group import BackendGroup, TensorGroup
from twostep.model.parallel.meeting import Meeting
from twostep.model.parallel.ops import ParallelOps


class Member:
    """Of rank `meeting.rank`. Belongs to one ModelRunner."""

    def __init__(self, meeting: Meeting, device: torch.device, *, timeout_s: float, one_shot: bool) -> None:
        """Waits for all ranks. `timeout_s`: how long a rank may keep the others waiting in a step. `one_shot`: sums of few tokens may take
        the kernel for them. Raises SetupError."""
        meeting.exchange(b"here")
        self.meeting = meeting
        self._one_shot = one_shot
        self.group: TensorGroup = BackendGroup(meeting, device, timeout_s=timeout_s)

    @property
    def samples(self) -> bool:
        """Whether this rank picks the tokens; the others only compute."""
        return self.meeting.rank == 0

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
