"""Memory of one GPU that other processes' GPUs write to over NVLink or PCIe (CUDA IPC).

Through the driver's own library, which is there wherever a GPU is: each rank allocates, the ranks exchange handles, each opens the
others' on its own device. No multicast objects are made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from twostep.errors import SetupError
from twostep.model.parallel.meeting import Meeting

_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


class PeerMemory:
    """As many bytes on every rank's device, zero at first. Freed with the process: a peer may still write."""

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
    """Whether every rank's device can access every other's memory; the same answer on all ranks."""
    reaches = all(torch.cuda.can_device_access_peer(device, other) for other in others if other != device)
    return bool(meeting.least(int(reaches)))


def _call(function: object, *arguments: object) -> None:
    assert callable(function)
    if code := function(*arguments):
        raise SetupError(
            f"the GPUs of the tensor-parallel ranks cannot share memory (CUDA error {code} of {getattr(function, '__name__', '?')}); "
            "choose GPUs of one host that are peers of each other, or --tensor-parallel-size 1"
        )
