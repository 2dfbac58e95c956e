"""Looks at what a machine has for workers: which GPU each gets, and how many there is room for, by GPUs, cores and memory.

4 workers, 2 GPUs:   prefill-0 → GPU 0, prefill-1 → GPU 1, decode-0 → GPU 0, decode-1 → GPU 1;   each takes half of 0.9 of its GPU
16 cores, 60 GB free, no GPU, a model of 2 GB:   16 by cores, 17 by memory: 16 workers
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twostep.errors import SetupError

DEFAULT_UTILIZATION = 0.9
_NVML = "libnvidia-ml.so.1"
_CUDA = "libcuda.so.1"
# What a worker has in memory beside weights and KV: interpreter, PyTorch, its KV agent. Of a fake one there is little more.
_PROCESS_BYTES = 1 << 30
_FAKE_BYTES = 256 << 20
# A KV cache on a CPU, unless told otherwise (--kv-cache-memory-bytes of the workers).
CPU_KV_BYTES = 512 << 20
# What weights pass through on their way to a GPU, and what is pinned there.
_GPU_HOST_BYTES = 3 << 30
# A fake worker sleeps most of its time.
FAKES_PER_CORE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """A worker's first GPU, of `num_gpus` in a row counted round, and how much of each it may take; `num_sharing` workers have it."""

    index: int
    num_gpus: int
    utilization: float
    num_sharing: int


def count_gpus(environ: Mapping[str, str]) -> int | None:
    """GPUs that workers will see: those named by CUDA_VISIBLE_DEVICES, else all that the driver knows of. None: there is a driver that
    does not tell, as in a container without its `utility` part. Loads no torch and starts no CUDA."""
    present = _count_by_driver()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if present is None or visible is None:
        return present
    count = 0
    for name in visible.split(","):
        # As CUDA does it: the list ends at the first entry that is no device.
        if not name.strip() or name.strip() == "-1":
            break
        count += 1
    return min(count, present)


def check_device(device: str, environ: Mapping[str, str]) -> None:
    """Refuses, before anything starts, a device that no worker can have. Raises SetupError. What only torch can tell is left to the
    workers (twostep/model/runner/device.py)."""
    match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", device or "auto")
    if match is None or device.startswith("cpu:"):
        raise SetupError(f"--device {device} is not understood; give auto, cpu, cuda or cuda:N")
    if match[1] != "cuda" or (num_gpus := count_gpus(environ)) is None:
        return
    if not num_gpus and _count_by_driver():
        hiding = environ.get("CUDA_VISIBLE_DEVICES")
        raise SetupError(f"--device {device}: CUDA_VISIBLE_DEVICES={hiding!r} hides every GPU; name some in it, or give --device cpu")
    if not num_gpus:
        raise SetupError(
            f"--device {device}: this machine shows no NVIDIA GPU; install its driver (in a container: let the GPUs in, as with "
            "`docker run --gpus all`), or give --device cpu"
        )
    if int(match[2] or 0) >= num_gpus:
        raise SetupError(f"--device {device}: the last GPU that workers would see is cuda:{num_gpus - 1}; give a lower number, or cuda")


def share_gpus(num_workers: int, num_gpus: int, *, per_worker: int = 1, utilization: float | None = None) -> list[GpuShare]:
    """Deals GPUs round-robin, `per_worker` neighbours to each; none without GPUs. Workers that share one share DEFAULT_UTILIZATION of it;
    a given `utilization` is each worker's own."""
    if not num_gpus:
        return []
    per_worker = min(per_worker, num_gpus)
    places = [[(worker * per_worker + i) % num_gpus for i in range(per_worker)] for worker in range(num_workers)]
    users = [sum(gpu in place for place in places) for gpu in range(num_gpus)]
    shares = []
    for place in places:
        most = max(users[gpu] for gpu in place)
        # Rounded down: the shares of one GPU must not add up to more than it.
        part = utilization if utilization is not None else int(1000 * DEFAULT_UTILIZATION / most) / 1000
        shares.append(GpuShare(index=place[0], num_gpus=per_worker, utilization=part, num_sharing=most))
    return shares


def describe(names: Sequence[str], shares: Sequence[GpuShare]) -> str:
    parts = []
    for name, share in zip(names, shares, strict=True):
        gpu = f"GPU {share.index}" if share.num_gpus == 1 else f"{share.num_gpus} GPUs from {share.index}"
        parts.append(f"{name} on {gpu}" + (f" ({share.utilization:g} of it)" if share.num_sharing > 1 else ""))
    return ", ".join(parts)


def _count_by_driver() -> int | None:
    nvml = _library(_NVML)
    if nvml is None:
        return 0 if _library(_CUDA) is None else None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        return int(count.value) if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


# ---- room ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerLimit:
    """So many workers, and what there would have to be more of for another one."""

    num_workers: int
    limit: str


def room_for(memory_each: int, *, memory_bytes: int, cores: int, gpus: int | None) -> WorkerLimit:
    """At least one: whether that fits shows when it starts. `gpus`: for how many workers they are enough; None: they compute on `cores`."""
    rooms = [WorkerLimit(memory_bytes // max(1, memory_each), "memory")]
    rooms.append(WorkerLimit(cores, "cores") if gpus is None else WorkerLimit(gpus, "GPUs"))
    least = min(rooms, key=lambda room: room.num_workers)
    return WorkerLimit(max(1, least.num_workers), least.limit)


def memory_of(weight_bytes: int, *, fake: bool, on_gpu: bool, kv_cache_bytes: int) -> int:
    """Host memory that a worker takes, in bytes. `weight_bytes` as a CPU holds them. `kv_cache_bytes` 0: the default."""
    if fake or on_gpu:
        return _FAKE_BYTES if fake else _GPU_HOST_BYTES
    return _PROCESS_BYTES + weight_bytes + (kv_cache_bytes or CPU_KV_BYTES)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
