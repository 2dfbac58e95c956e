"""Peers' pools in this process's GPU: CUDA IPC handles, opened once, kept while they are used, closed when the peer is gone.

The exporter asks the driver's own library for a handle of the allocation that a tensor lies in; the importer opens it *on its own device*,
so that its kernels read it over NVLink or PCIe without a copy on the exporter's. A process that has a handle may read and write the whole
allocation.

The driver keeps a dead process's GPU memory until the last mapping of it is closed, so that a read under way ends as if nothing had
happened; and so that a mapping that stays open would keep a restarted worker from getting its pool.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kv_transfer.cuda_ipc.endpoint import IpcEndpoint, ProcessId
from twostep.errors import ResourceExhausted, SetupError, Unavailable

_LAZY_ENABLE_PEER_ACCESS = 1
_HANDLE_BYTES = 64
_MAX_PEERS = 64
# For peers whose process cannot be watched (another PID namespace): longer than between two probes of a living one.
_IDLE_S = 60.0


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor's place: `offset` bytes into the allocation that `handle` stands for."""

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
    """Returns the allocation's address as `device` sees it. Raises Unavailable. At most once for each handle until it is closed."""
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
    """Closes a handle, of which no kernel may be reading. Does not raise: after a failure the mapping goes with the process."""
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))


def gpu_uuid(device: torch.device) -> str:
    """Returns "" for host memory."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


@dataclass(frozen=True, slots=True)
class PeerPool:
    """Addresses of a peer's pool and of its probe region."""

    pool: int
    probe: int


# Opens a peer's pool; returns it and what closes it. Blocks for milliseconds. Raises Unavailable.
OpenPool = Callable[[IpcEndpoint], tuple[PeerPool, Callable[[], None]]]


def opener_on(device: torch.device, own: ProcessId) -> OpenPool:
    """Returns what opens pools of other processes on one GPU, or says why that cannot be."""

    def open_pool(endpoint: IpcEndpoint) -> tuple[PeerPool, Callable[[], None]]:
        if endpoint.process.boot_id != own.boot_id or not own.boot_id:
            raise Unavailable("the KV source is on another host, and cuda_ipc works within one; use nixl or ray")
        handles = endpoint.pool_handle, endpoint.probe_handle
        if not endpoint.gpu or device.type != "cuda" or {len(handle) for handle in handles} != {_HANDLE_BYTES}:
            raise Unavailable("cuda_ipc reads from GPU to GPU, and one side's KV pool is in host memory; use ray")
        _check_reachable(device, endpoint.gpu)
        pool = open_handle(endpoint.pool_handle, device)
        try:
            # Both may lie in one allocation, which can be opened once only.
            probe = pool if handles[0] == handles[1] else open_handle(endpoint.probe_handle, device)
        except BaseException:
            close_handle(pool, device)
            raise

        def close() -> None:
            for address in {pool, probe}:
                close_handle(address, device)

        return PeerPool(pool + endpoint.pool_offset, probe + endpoint.probe_offset), close

    return open_pool


def _check_reachable(device: torch.device, gpu: str) -> None:
    """Raises Unavailable. Whether a GPU that is not visible here can be reached, only the driver can say."""
    for index in range(torch.cuda.device_count()):
        other = torch.device("cuda", index)
        if gpu_uuid(other) == gpu and other != device and not torch.cuda.can_device_access_peer(device, other):
            raise Unavailable(f"GPU {gpu} of the KV source is no peer of {device}: no NVLink or PCIe path; use nixl or ray")


@dataclass(slots=True)
class _Mapping:
    endpoint: IpcEndpoint
    pool: PeerPool
    close: Callable[[], None]
    last_used: float
    users: int = 0


class IpcPeers:
    """Safe from any thread. Methods block for milliseconds where something is opened or closed."""

    def __init__(
        self, open_pool: OpenPool, own: ProcessId, *, max_peers: int = _MAX_PEERS, idle_s: float = _IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._open_pool = open_pool
        self._own = own
        self._max_peers = max_peers
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()
        self._mappings: OrderedDict[str, _Mapping] = OrderedDict()

    @property
    def num_open(self) -> int:
        return len(self._mappings)

    @contextmanager
    def pool_of(self, endpoint: IpcEndpoint) -> Iterator[PeerPool]:
        """Gives a peer's pool, which stays open within the context. Raises Unavailable (the peer is gone, or cannot be read from here) and
        ResourceExhausted."""
        with self._lock:
            if endpoint.process.gone(self._own):
                raise Unavailable(f"the KV source, process {endpoint.process.pid}, has ended; prefill again")
            mapping = self._mappings.get(endpoint.incarnation)
            if mapping is None:
                self._make_room()
                pool, close = self._open_pool(endpoint)
                mapping = self._mappings[endpoint.incarnation] = _Mapping(endpoint, pool, close, self._clock())
            elif mapping.endpoint != endpoint:
                raise Unavailable(f"there are two cuda_ipc endpoints of one incarnation, {endpoint.incarnation}; prefill again")
            mapping.users += 1
            self._mappings.move_to_end(endpoint.incarnation)
        try:
            yield mapping.pool
        finally:
            with self._lock:
                mapping.users -= 1
                mapping.last_used = self._clock()

    def sweep(self) -> None:
        """Closes what nothing reads of peers that are gone, or that were not read for long and cannot be watched."""
        with self._lock:
            for mapping in list(self._mappings.values()):
                gone = mapping.endpoint.process.gone(self._own)
                if gone or (gone is None and self._clock() - mapping.last_used > self._idle_s):
                    self._close(mapping)

    def close(self) -> None:
        """Closes all handles. Nothing may be read any more."""
        with self._lock:
            for mapping in list(self._mappings.values()):
                assert not mapping.users
                self._close(mapping)

    def _make_room(self) -> None:
        for mapping in list(self._mappings.values()):
            if len(self._mappings) < self._max_peers:
                return
            self._close(mapping)
        if len(self._mappings) >= self._max_peers:
            raise ResourceExhausted(f"the pools of {self._max_peers} peers are being read at once; try again, or another worker")

    def _close(self, mapping: _Mapping) -> None:
        if not mapping.users:
            del self._mappings[mapping.endpoint.incarnation]
            mapping.close()
