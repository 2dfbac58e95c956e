"""How many workers a machine has room for, by its GPUs, its cores and its memory.

16 cores, 60 GB free, no GPU, a model of 2 GB:    16 by cores, 17 by memory                  16 workers
4 GPUs, two for each worker:                       2 by GPUs                                  2 workers
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from twostep.process.free_memory import free_memory

# What a worker has in memory beside weights and KV: interpreter, PyTorch, its KV agent. Of a fake one there is little more.
_PROCESS_BYTES = 1 << 30
_FAKE_BYTES = 256 << 20
# A KV cache on a CPU, unless told otherwise (--kv-cache-memory-bytes of the workers).
CPU_KV_BYTES = 512 << 20
# What weights pass through on their way to a GPU, and what is pinned there.
_GPU_HOST_BYTES = 3 << 30
# A fake worker sleeps most of its time.
_FAKES_PER_CORE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResources:
    """Holds what can be taken of a machine: `memory_bytes` that are free now."""

    cores: int
    memory_bytes: int
    num_gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources:
    """Holds what one worker takes. `num_gpus` 0: it computes on the CPU."""

    memory_bytes: int
    num_gpus: int = 0
    workers_per_core: int = 1


@dataclass(frozen=True, slots=True)
class WorkerLimit:
    """So many workers, and what there would have to be more of for another one."""

    num_workers: int
    limit: str


def room_for(machine: HostResources, need: WorkerResources) -> WorkerLimit:
    """At least one: whether that fits shows when it starts."""
    rooms = [WorkerLimit(machine.memory_bytes // max(1, need.memory_bytes), "memory")]
    if need.num_gpus:
        rooms.append(WorkerLimit(machine.num_gpus // need.num_gpus, "GPUs"))
    else:
        rooms.append(WorkerLimit(machine.cores * need.workers_per_core, "cores"))
    least = min(rooms, key=lambda room: room.num_workers)
    return WorkerLimit(max(1, least.num_workers), least.limit)


def need_of(model_dir: Path, *, fake: bool, num_gpus: int, kv_cache_bytes: int | None) -> WorkerResources:
    """`num_gpus` of each worker, 0 without any; `kv_cache_bytes` None: the default."""
    if fake:
        return WorkerResources(memory_bytes=_FAKE_BYTES, workers_per_core=_FAKES_PER_CORE)
    if num_gpus:
        return WorkerResources(memory_bytes=_GPU_HOST_BYTES, num_gpus=num_gpus)
    weights = sum(path.stat().st_size for pattern in ("*.safetensors", "*.gguf") for path in model_dir.glob(pattern))
    return WorkerResources(memory_bytes=_PROCESS_BYTES + weights + (kv_cache_bytes or CPU_KV_BYTES))


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_machine(num_gpus: int, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostResources:
    """A container's bound on memory counts where it is less than what is free."""
    return HostResources(cores=num_cores(), memory_bytes=free_memory(proc=proc, cgroup=cgroup).num_bytes, num_gpus=num_gpus)
