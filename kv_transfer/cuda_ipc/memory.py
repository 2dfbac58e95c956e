"""A GPU's memory in another process of the same host: CUDA IPC handles, through the driver's own library.

The exporter asks for a handle of the allocation that a tensor lies in; the importer opens it *on its own device*, so that its kernels
read it over NVLink or PCIe without a copy on the exporter's. Whoever has a handle may read and write the whole allocation.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from twostep.errors import SetupError, Unavailable

_LAZY_ENABLE_PEER_ACCESS = 1
HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@dataclass(frozen=True, slots=True)
class Exported:
    """Where a tensor lies: `offset` bytes into the allocation that `handle` stands for."""

    handle: bytes
    offset: int


def export(tensor: torch.Tensor) -> Exported:
    """Raises SetupError if other processes cannot open the tensor's memory."""
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(tensor.device):
        torch.cuda.current_stream().synchronize()  # makes the device's context current
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = ctypes.c_uint64(tensor.data_ptr())
        code = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
        code = code or driver.cuIpcGetMemHandle(ctypes.byref(handle), base)
    if code:
        raise SetupError(
            f"the KV pool's memory cannot be shared with other processes (CUDA error {code}); cuda_ipc needs torch's allocator without "
            "expandable_segments and with backend:native in PYTORCH_CUDA_ALLOC_CONF, or choose another --kv-transfer"
        )
    return Exported(bytes(handle), tensor.data_ptr() - base.value)


def open_handle(handle: bytes, device: torch.device) -> int:
    """The allocation's address as `device` sees it. Raises Unavailable. At most once for each handle until it is closed."""
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        opened = ctypes.c_uint64()
        code = driver.cuIpcOpenMemHandle_v2(ctypes.byref(opened), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS))
    if code:
        raise Unavailable(
            f"the peer's GPU memory cannot be opened on {device} (CUDA error {code}): the peer has ended, its GPU is no peer of this one "
            "or not visible here, or containers do not share the host's IPC and PID namespaces; choose another --kv-transfer"
        )
    return int(opened.value)


def close_handle(address: int, device: torch.device) -> None:
    """No kernel may be reading. Does not raise: after a failure the mapping goes with the process."""
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
