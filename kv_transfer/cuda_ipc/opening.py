"""Opens a peer's pool on one GPU, or says why that cannot be."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kv_transfer.cuda_ipc.endpoint import IpcEndpoint, ProcessId
from kv_transfer.cuda_ipc.memory import HANDLE_BYTES, close_handle, open_handle
from kv_transfer.cuda_ipc.peers import PeerPool
from twostep.errors import Unavailable


def gpu_uuid(device: torch.device) -> str:
    """Empty for host memory."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


class IpcOpener:
    """See kv_transfer.cuda_ipc.peers.Opener."""

    def __init__(self, device: torch.device, own: ProcessId) -> None:
        self._device = device
        self._own = own

    def open(self, endpoint: IpcEndpoint) -> tuple[PeerPool, Callable[[], None]]:
        if endpoint.process.boot_id != self._own.boot_id or not self._own.boot_id:
            raise Unavailable("the KV source is on another host, and cuda_ipc works within one; use nixl or ray")
        handles = endpoint.pool_handle, endpoint.probe_handle
        if not endpoint.gpu or self._device.type != "cuda" or {len(handle) for handle in handles} != {HANDLE_BYTES}:
            raise Unavailable("cuda_ipc reads from GPU to GPU, and one side's KV pool is in host memory; use ray")
        self._check_reachable(endpoint.gpu)
        pool = open_handle(endpoint.pool_handle, self._device)
        try:
            # Both may lie in one allocation, which can be opened once only.
            probe = pool if handles[0] == handles[1] else open_handle(endpoint.probe_handle, self._device)
        except BaseException:
            close_handle(pool, self._device)
            raise

        def close() -> None:
            for address in {pool, probe}:
                close_handle(address, self._device)

        return PeerPool(pool + endpoint.pool_offset, probe + endpoint.probe_offset), close

    def _check_reachable(self, gpu: str) -> None:
        """Of a GPU that is not visible here only the driver can say."""
        for index in range(torch.cuda.device_count()):
            other = torch.device("cuda", index)
            if gpu_uuid(other) == gpu and other != self._device and not torch.cuda.can_device_access_peer(self._device, other):
                raise Unavailable(f"GPU {gpu} of the KV source is no peer of {self._device}: no NVLink or PCIe path; use nixl or ray")
