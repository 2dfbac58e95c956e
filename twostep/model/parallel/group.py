"""The exchange between the ranks of a model: notes while they start; inside a step sums of partial results, and parts of the logits.

All ranks call the same methods in the same order with the same shapes. A sum has the same bits on every rank.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from twostep.errors import SetupError

log = logging.getLogger(__name__)

_END_S = 5.0
_FAILED = "failed"
_POLL_S = 0.005
# Of single look-ups, which never wait for a note.
_STORE_TIMEOUT = timedelta(seconds=60)


class Meeting:
    """Where the ranks of one worker agree on something while they start: each leaves a note, each reads all of them.

    The notes are files of a private directory (torch's FileStore): nothing listens on a port. A rank that waits looks for the note of one
    that failed, so that one rank's error is everybody's, at once, and none is left inside a collective. Not thread-safe but for `fail`.
    """

    def __init__(self, directory: Path, rank: int, size: int, *, timeout_s: float = 900.0) -> None:
        """`directory` is the same for all ranks, and theirs alone. Waiting ends after `timeout_s`: loading a model takes minutes."""
        self.rank = rank
        self.size = size
        self._path = directory / "notes"
        self._timeout_s = timeout_s
        self._notes = self.store("notes")
        self._round = 0

    def store(self, name: str) -> c10d.Store:
        """Returns a store of its own for a process group."""
        store = c10d.FileStore(str(self._path.with_name(name)), self.size)
        store.set_timeout(_STORE_TIMEOUT)
        return c10d.PrefixStore(name, store)

    def exchange(self, note: bytes) -> list[bytes]:
        """Returns every rank's note of this round, in order of rank; all ranks call it equally often. Raises SetupError with what another
        rank failed with, or if one does not come."""
        self._round += 1
        keys = [f"{self._round}.{rank}" for rank in range(self.size)]
        self._notes.set(keys[self.rank], note.hex())
        give_up = time.monotonic() + self._timeout_s
        while not self._notes.check(keys):
            if self._notes.check([_FAILED]):
                raise SetupError(self._notes.get(_FAILED).decode())
            if time.monotonic() > give_up:
                raise SetupError(f"not all {self.size} tensor-parallel ranks were ready within {self._timeout_s:g} s; see their log above")
            time.sleep(_POLL_S)
        return [bytes.fromhex(self._notes.get(key).decode()) for key in keys]

    def least(self, value: int) -> int:
        """Returns the smallest of all ranks' values."""
        return min(int(note) for note in self.exchange(str(value).encode()))

    def fail(self, message: str) -> None:
        """Ends the waiting of all others with this message."""
        self._notes.set(_FAILED, message)


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
