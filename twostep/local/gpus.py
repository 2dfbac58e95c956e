"""Which GPU each worker of a local system gets.

4 workers, 2 GPUs:   prefill-0 → GPU 0, prefill-1 → GPU 1, decode-0 → GPU 0, decode-1 → GPU 1;   each takes half of 0.9 of its GPU
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEFAULT_UTILIZATION = 0.9
_NVML = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """A worker's first GPU, of `num_gpus` in a row counted round, and how much of each it may take; `num_sharing` workers have it."""

    index: int
    num_gpus: int
    utilization: float
    num_sharing: int


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that workers will see: those named by CUDA_VISIBLE_DEVICES, else all that the driver knows of. Loads neither torch nor CUDA."""
    present = _count_by_driver()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    count = 0
    for name in visible.split(","):
        # As CUDA does it: the list ends at the first entry that is no device.
        if not name.strip() or name.strip() == "-1":
            break
        count += 1
    return min(count, present)


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
    """One line for people."""
    parts = []
    for name, share in zip(names, shares, strict=True):
        gpu = f"GPU {share.index}" if share.num_gpus == 1 else f"{share.num_gpus} GPUs from {share.index}"
        parts.append(f"{name} on {gpu}" + (f" ({share.utilization:g} of it)" if share.num_sharing > 1 else ""))
    return ", ".join(parts)


def _count_by_driver() -> int:
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return 0
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        return int(count.value) if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()
