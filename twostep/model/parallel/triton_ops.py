"""`Ops` of one of several ranks on NVIDIA GPUs. Sums of few tokens take the one-shot kernel, others the group's (NCCL's) all-reduce."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from twostep.errors import SetupError
from twostep.model.families.config import ModelConfig
from twostep.model.kernels.ops import Linear
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.kernels.triton_reduce import RowExchange, inbox_bytes
from twostep.model.parallel.group import Meeting, TensorGroup

# Tokens of the largest one-shot sum, all ranks' together: beyond it a ring, which moves fewer bytes, is as fast.
_MAX_ROWS_OF_ALL = 1024


class ParallelTritonOps(TritonOps):
    def __init__(self, device: torch.device, group: TensorGroup, exchange: RowExchange | None) -> None:
        super().__init__(device)
        self._group = group
        self._exchange = exchange

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x, x.dtype)

    def _add(self, x: torch.Tensor, residual: torch.Tensor, first: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if self._exchange is not None and len(residual) <= self._exchange.max_rows:
            return self._exchange.add_rms_norm(x, residual, weight, eps, first_weight=first)
        return super()._add(self._sum(x, residual.dtype), residual, first, weight, eps)

    def _join(
        self,
        linear: Linear,
        x: torch.Tensor,
        residual: torch.Tensor,
        first: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        then: Linear,
    ) -> torch.Tensor:
        # In one piece with neither product: what the first gives is but a term of what is added.
        return then(self._add(linear(x), residual, first, weight, eps))

    def add_layer_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return super().add_layer_norm(self._sum(x, residual.dtype), residual, weight, bias, eps)

    def _sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sums this rank's parts, then over all ranks."""
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


_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


class PeerMemory:
    """As many bytes on every rank's device, zero at first, that the other ranks' devices write to over NVLink or PCIe (CUDA IPC).

    Through the driver's own library, which is there wherever a GPU is: each rank allocates, the ranks exchange handles, each opens the
    others' on its own device. No multicast objects are made. Freed with the process: a peer may still write.
    """

    def __init__(self, meeting: Meeting, device: torch.device, num_bytes: int) -> None:
        """All ranks call it together. Raises SetupError."""
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's context current
            driver = ctypes.CDLL("libcuda.so.1")
            own = ctypes.c_uint64()
            _call(driver.cuMemAlloc_v2, ctypes.byref(own), ctypes.c_size_t(num_bytes))
            _call(driver.cuMemsetD8_v2, own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            _call(driver.cuCtxSynchronize)
            handle = _Handle()
            _call(driver.cuIpcGetMemHandle, ctypes.byref(handle), own)
            addresses = []
            for rank, note in enumerate(meeting.exchange(bytes(handle))):
                if rank == meeting.rank:
                    addresses.append(own.value)
                    continue
                opened = ctypes.c_uint64()
                _call(
                    driver.cuIpcOpenMemHandle_v2,
                    ctypes.byref(opened),
                    _Handle.from_buffer_copy(note),
                    ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
                )
                addresses.append(opened.value)
        # int64 [size]: where each rank's memory lies, as this device sees it.
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=device)


def all_reach_all(meeting: Meeting, device: torch.device, others: Sequence[torch.device]) -> bool:
    """Returns whether every rank's device can access every other's memory; the same answer on all ranks."""
    reaches = all(torch.cuda.can_device_access_peer(device, other) for other in others if other != device)
    return bool(meeting.least(int(reaches)))


def _call(function: object, *arguments: object) -> None:
    assert callable(function)
    if code := function(*arguments):
        raise SetupError(
            f"the GPUs of the tensor-parallel ranks cannot share memory (CUDA error {code} of {getattr(function, '__name__', '?')}); "
            "choose GPUs of one host that are peers of each other, or --tensor-parallel-size 1"
        )
