"""What the ranks of a model exchange inside a step: sums of partial results, and parts of the logits.

All ranks call the same methods in the same order with the same shapes. A sum has the same bits on every rank.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from twostep.model.parallel.meeting import Meeting

log = logging.getLogger(__name__)

_END_S = 5.0


class TensorGroup(Protocol):
    """The ranks as one of them sees them."""

    @property
    def meeting(self) -> Meeting: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place, x dense. On a GPU in order of the current stream, and a graph may capture it."""
        ...

    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        """[R, num_columns] from every rank's [R, n]: n is num_columns / size, rounded up, less for the last ranks."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """Rank 0's x, dense, to all, in place."""
        ...

    def close(self) -> None:
        """Waits for no other rank; nothing may be exchanged any more, and no graph that does may be left."""
        ...


class BackendGroup:
    """A TensorGroup over a process group of torch: gloo between CPUs, NCCL between GPUs. It is made directly, not as the default group,
    so that a process may belong to several."""

    def __init__(self, meeting: Meeting, device: torch.device, *, timeout_s: float) -> None:
        """`timeout_s`: how long a rank may keep others waiting in an exchange."""
        self.meeting = meeting
        self._device = device
        self._backend = _nccl(meeting, timeout_s) if device.type == "cuda" else _gloo(meeting, timeout_s)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        options = dist.AllreduceOptions()
        options.asyncOp = False
        _finish(self._backend.allreduce([x], options))
        return x

    def gather_columns(self, x: torch.Tensor, num_columns: int) -> torch.Tensor:
        size = self.meeting.size
        each = -(-num_columns // size)
        if x.shape[1] < each:
            x = torch.nn.functional.pad(x, (0, each - x.shape[1]))
        parts = x.new_empty(size * len(x), each)
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        _finish(self._backend._allgather_base(parts, x.contiguous(), options))
        whole = parts.view(size, len(x), each).transpose(0, 1).reshape(len(x), size * each)
        return whole[:, :num_columns].contiguous()

    def broadcast(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = False
        _finish(self._backend.broadcast([x], options))

    def close(self) -> None:
        # NCCL may take it ill that the others are gone: what it does then is not waited for.
        ending = threading.Thread(target=self._backend.abort, name="group's end", daemon=True)
        ending.start()
        ending.join(_END_S)
        if ending.is_alive():
            log.warning("the exchange between ranks did not end within %g s; leaving it behind", _END_S)


def _finish(work: Any) -> None:
    """On a GPU this makes the current stream wait, not the host."""
    if work is not None:
        work.wait()


def _gloo(meeting: Meeting, timeout_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # The loopback interface only: gloo does not authenticate who connects.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(meeting.store("gloo"), meeting.rank, meeting.size, options)


def _nccl(meeting: Meeting, timeout_s: float) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(meeting.store("nccl"), meeting.rank, meeting.size, options)
