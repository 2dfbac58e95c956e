"""`Ops` of one of several ranks on NVIDIA GPUs. Sums of few tokens take the one-shot kernel, others the group's (NCCL's) all-reduce."""

from __future__ import annotations

import torch

from twostep.model.families.config import ModelConfig
from twostep.model.kernels.ops import Linear
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.kernels.triton_reduce import RowExchange, inbox_bytes
from twostep.model.parallel.group import TensorGroup
from twostep.model.parallel.peer_memory import PeerMemory, all_reach_all

# Tokens of the largest one-shot sum, all ranks' together: beyond it a ring, which moves fewer bytes, is as fast.
_MAX_ROWS_OF_ALL = 1024


class ParallelTritonOps(TritonOps):
    def __init__(self, device: torch.device, group: TensorGroup, exchange: RowExchange | None) -> None:
        super().__init__(device)
        self._group = group
        self._exchange = exchange

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if self._exchange is not None and len(residual) <= self._exchange.max_rows:
            return self._exchange.add_rms_norm(x, residual, weight, eps)
        return super().add_rms_norm(self._sum(x, residual.dtype), residual, weight, eps)

    def join_rms_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, then: Linear
    ) -> torch.Tensor:
        # In one piece with neither product: what the first gives is but a term of what is added.
        return then(self.add_rms_norm(linear(x), residual, weight, eps))

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return super().add_layer_norm(self._sum(x, residual.dtype), residual, weight, bias, eps)

    def _sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of this rank's parts, then of all ranks."""
        return self._group.all_reduce((x.sum(0) if x.dim() == 3 else x).to(dtype).contiguous())


def parallel_triton_ops(
    group: TensorGroup, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, one_shot: bool = True
) -> ParallelTritonOps:
    """All ranks call it together. `one_shot`: whether the kernel for few tokens may be used, where the devices reach each other."""
    meeting = group.meeting
    devices = [torch.device(note.decode()) for note in meeting.exchange(str(device).encode())]
    exchange = None
    width = config.hidden_size
    if one_shot and width * dtype.itemsize % 4 == 0 and all_reach_all(meeting, device, devices):
        max_rows = _MAX_ROWS_OF_ALL // meeting.size
        memory = PeerMemory(meeting, device, inbox_bytes(width, dtype.itemsize, size=meeting.size, max_rows=max_rows))
        exchange = RowExchange(memory.addresses, meeting.rank, max_rows=max_rows)
    return ParallelTritonOps(device, group, exchange)
